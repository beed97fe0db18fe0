"""Indexes for sweeps over ended processes and stored snapshots, created while the tables are written."""

from django.db import migrations, models
from django.db.models import Q

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("sandboxes", "0069_found_snapshots")]

    operations = [
        AddIndexConcurrently(
            model_name="process",
            index=models.Index(
                fields=["holder"],
                condition=Q(
                    Q(restart_at__isnull=False) | Q(wake_pending=True) | Q(sealed_env__isnull=False), ended_at__isnull=False
                ),
                name="process_may_restart",
            ),
        ),
        AddIndexConcurrently(
            model_name="snapshot",
            index=models.Index(fields=["at"], condition=Q(forgotten_at__isnull=True), name="snapshot_stored"),
        ),
    ]
