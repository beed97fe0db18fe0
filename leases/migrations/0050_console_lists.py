"""Indexes for the searches and filters of the console, created while the tables are written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("leases", "0049_token_rate_permissions")]

    operations = [
        AddIndexConcurrently(
            model_name="lease",
            index=models.Index(
                fields=["agent_did", "-leased_at"],
                name="lease_agent_prefix",
                opclasses=["varchar_pattern_ops", "timestamptz_ops"],
            ),
        ),
        AddIndexConcurrently(
            model_name="lease",
            index=models.Index(
                fields=["environment_id", "-leased_at", "-id"],
                name="lease_environment_prefix",
                opclasses=["varchar_pattern_ops", "timestamptz_ops", "uuid_ops"],
            ),
        ),
    ]
