"""Failures of a webhook's receiver, after which its deliveries wait together."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0062_run_large_output_index")]

    operations = [
        migrations.AddField(
            model_name="webhook",
            name="failing_since",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="webhook",
            name="failures",
            field=models.PositiveIntegerField(
                db_default=0, default=0, editable=False, help_text="Failed attempts since the last delivery."
            ),
        ),
        migrations.AddField(
            model_name="webhook",
            name="retry_at",
            field=models.DateTimeField(
                blank=True, editable=False, help_text="No attempt before: the last one failed. Empty: at once.", null=True
            ),
        ),
    ]
