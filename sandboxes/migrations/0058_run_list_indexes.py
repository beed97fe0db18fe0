"""Indexes for the lists of runs by outcome and by kind, created while runs are written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("sandboxes", "0057_object_uploads")]

    operations = [
        AddIndexConcurrently(
            model_name="run",
            index=models.Index(
                fields=["-started_at", "-id"],
                condition=models.Q(("outcome__in", ["ok", "open"]), _negated=True),
                name="run_not_ok",
            ),
        ),
        AddIndexConcurrently(
            model_name="run",
            index=models.Index(
                fields=["kind", "-started_at", "-id"], condition=models.Q(("kind", "exec"), _negated=True), name="run_not_exec"
            ),
        ),
    ]
