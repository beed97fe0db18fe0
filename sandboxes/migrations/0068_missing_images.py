"""Images of pools that an engine does not have."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("sandboxes", "0067_start_failures")]

    operations = [
        migrations.AddField(
            model_name="host",
            name="missing_images",
            field=models.JSONField(
                blank=True,
                editable=False,
                help_text="Missing image of each pool, by the pool's name. Empty: not asked yet.",
                null=True,
            ),
        ),
    ]
