"""Indexes for further searches of the console, created while the tables are written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently
from sandboxes.db.prefix_index import PrefixIndex


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("sandboxes", "0087_host_clock_offset")]

    operations = [
        AddIndexConcurrently(
            model_name="dataevent",
            index=PrefixIndex(fields=["path"], name="dataevent_path_prefix"),
        ),
        AddIndexConcurrently(
            model_name="mintedtoken",
            index=models.Index(fields=["agent_did", "-at"], name="mintedtoken_agent_prefix", opclasses=["varchar_pattern_ops", "timestamptz_ops"]),
        ),
        AddIndexConcurrently(
            model_name="mintedtoken",
            index=PrefixIndex(fields=["aud"], name="mintedtoken_aud_prefix"),
        ),
        AddIndexConcurrently(
            model_name="mintedtoken",
            index=PrefixIndex(fields=["lxm"], name="mintedtoken_lxm_prefix"),
        ),
    ]
