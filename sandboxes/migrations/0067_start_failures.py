"""Failed starts of a pool."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0066_snapshot_defaults")]

    operations = [
        migrations.AddField(
            model_name="pool",
            name="starts_failing_since",
            field=models.DateTimeField(
                blank=True, editable=False, help_text="First failed start since the last one that succeeded.", null=True
            ),
        ),
        migrations.AddField(
            model_name="pool",
            name="start_error",
            field=models.TextField(blank=True, db_default="", default="", editable=False),
        ),
        migrations.AddField(
            model_name="pool",
            name="start_error_code",
            field=models.CharField(blank=True, db_default="", default="", editable=False, max_length=64),
        ),
    ]
