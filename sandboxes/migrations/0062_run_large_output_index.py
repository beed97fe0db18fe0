"""Index of the runs whose large output is in their row, created while runs are written."""

from django.db import migrations, models
from django.db.models import Q

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("sandboxes", "0061_run_outputs_in_store")]

    operations = [
        AddIndexConcurrently(
            model_name="run",
            index=models.Index(
                fields=["ended_at"],
                condition=Q(
                    Q(stdout_bytes__gt=8192) | Q(stderr_bytes__gt=8192), stdout__isnull=False, ended_at__isnull=False
                ),
                name="run_large_output",
            ),
        ),
    ]
