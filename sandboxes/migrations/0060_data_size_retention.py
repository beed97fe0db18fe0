"""Columns and index for the retention of sizes of agents' data, created while sizes are written."""

from django.db import migrations, models

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("sandboxes", "0059_run_stop_reason")]

    operations = [
        migrations.AddField(
            model_name="datasize",
            name="metered_until",
            field=models.DateTimeField(
                editable=False, help_text="Full hour up to which its time is in usage records, until it is superseded.", null=True
            ),
        ),
        AddIndexConcurrently(model_name="datasize", index=models.Index(fields=["at"], name="datasize_at")),
    ]
