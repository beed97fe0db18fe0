"""Indexes for the searches and filters of the console, created while the tables are written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently
from sandboxes.db.prefix_index import PrefixIndex


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("sandboxes", "0082_model_call_indexes")]

    operations = [
        AddIndexConcurrently(
            model_name="egressconnection",
            index=models.Index(fields=["agent_did"], name="egressconn_agent_prefix", opclasses=["varchar_pattern_ops"]),
        ),
        AddIndexConcurrently(
            model_name="egressconnection",
            index=models.Index(
                fields=["environment_id"],
                name="egressconn_environment_prefix",
                opclasses=["varchar_pattern_ops"],
            ),
        ),
        AddIndexConcurrently(
            model_name="egressconnection",
            index=models.Index(fields=["domain"], name="egressconn_domain_prefix", opclasses=["varchar_pattern_ops"]),
        ),
        AddIndexConcurrently(
            model_name="event",
            index=PrefixIndex(fields=["key"], name="event_key_prefix"),
        ),
        AddIndexConcurrently(
            model_name="llmcall",
            index=models.Index(
                fields=["agent_did", "-started_at"],
                name="llmcall_agent_prefix",
                opclasses=["varchar_pattern_ops", "timestamptz_ops"],
            ),
        ),
        AddIndexConcurrently(
            model_name="llmcall",
            index=models.Index(
                fields=["environment_id"],
                name="llmcall_environment_prefix",
                opclasses=["varchar_pattern_ops"],
            ),
        ),
        AddIndexConcurrently(
            model_name="llmcall",
            index=PrefixIndex(fields=["model"], name="llmcall_model_prefix"),
        ),
        AddIndexConcurrently(
            model_name="reading",
            index=models.Index(fields=["holder", "-at", "-id"], name="reading_holder"),
        ),
        AddIndexConcurrently(
            model_name="run",
            index=models.Index(
                condition=models.Q(("outcome__in", ["ok", "open", "failed"]), _negated=True),
                fields=["outcome", "-started_at", "-id"],
                name="run_rare_outcome",
            ),
        ),
        AddIndexConcurrently(
            model_name="run",
            index=models.Index(
                condition=models.Q(("stop_reason", ""), _negated=True),
                fields=["stop_reason", "-started_at", "-id"],
                name="run_stopped",
            ),
        ),
        AddIndexConcurrently(
            model_name="sandbox",
            index=models.Index(
                fields=["environment_id"],
                name="sandbox_environment_prefix",
                opclasses=["varchar_pattern_ops"],
            ),
        ),
    ]
