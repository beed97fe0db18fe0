"""Indexes for the searches and filters of the console, created while the tables are written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("billing", "0014_statementline_defaults")]

    operations = [
        AddIndexConcurrently(
            model_name="costrecord",
            index=models.Index(
                fields=["agent_did", "day"],
                name="cost_agent_prefix",
                opclasses=["varchar_pattern_ops", "date_ops"],
            ),
        ),
        AddIndexConcurrently(
            model_name="costrecord",
            index=models.Index(
                fields=["environment_id"],
                name="cost_environment_prefix",
                opclasses=["varchar_pattern_ops"],
            ),
        ),
        AddIndexConcurrently(
            model_name="usagerecord",
            index=models.Index(condition=models.Q(("unpriced__gt", 0)), fields=["-day", "-id"], name="usage_unpriced"),
        ),
        AddIndexConcurrently(
            model_name="usagerecord",
            index=models.Index(
                fields=["agent_did", "day"],
                name="usage_agent_prefix",
                opclasses=["varchar_pattern_ops", "date_ops"],
            ),
        ),
        AddIndexConcurrently(
            model_name="usagerecord",
            index=models.Index(
                fields=["environment_id"],
                name="usage_environment_prefix",
                opclasses=["varchar_pattern_ops"],
            ),
        ),
    ]
