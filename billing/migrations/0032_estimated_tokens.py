"""Tokens of model calls that the upstream did not report, beside the reported ones."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [("billing", "0031_top_ups_in_tokens")]

    operations = [
        migrations.AddField(
            model_name="usagerecord",
            name="estimated_tokens",
            field=models.BigIntegerField(db_default=0, default=0, help_text="Estimated tokens of model calls, beside those that the upstream reported."),
        ),
    ]
