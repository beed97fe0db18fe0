"""Indexes for further searches of the console, created while the tables are written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently
from sandboxes.db.prefix_index import PrefixIndex


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("leases", "0051_replaced_indexes")]

    operations = [
        AddIndexConcurrently(
            model_name="atprotorecord",
            index=PrefixIndex(fields=["agent_did"], name="atprotorecord_agent_prefix"),
        ),
        AddIndexConcurrently(
            model_name="atprotorecord",
            index=PrefixIndex(fields=["record_key"], name="atprotorecord_key_prefix"),
        ),
        AddIndexConcurrently(
            model_name="codingtask",
            index=PrefixIndex(fields=["title"], name="codingtask_title_prefix"),
        ),
        AddIndexConcurrently(
            model_name="codingtask",
            index=PrefixIndex(fields=["branch"], name="codingtask_branch_prefix"),
        ),
        AddIndexConcurrently(
            model_name="queuedrun",
            index=models.Index(fields=["agent_did", "-queued_at", "-id"], name="queuedrun_agent_prefix", opclasses=["varchar_pattern_ops", "timestamptz_ops", "uuid_ops"]),
        ),
    ]
