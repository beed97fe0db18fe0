"""Estimated tokens of model calls in the totals by model."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("billing", "0034_kept_sums_of_calls")]

    operations = [
        migrations.AddField(
            model_name="modeltotal",
            name="estimated_tokens",
            field=models.BigIntegerField(
                help_text="Estimated tokens, beside those that the upstreams reported. Empty: written by a version before.", null=True
            ),
        ),
    ]
