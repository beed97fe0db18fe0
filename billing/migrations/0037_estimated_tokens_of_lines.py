"""Estimated tokens of model calls in the lines of statements."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("billing", "0036_outdated_totals_index")]

    operations = [
        migrations.AddField(
            model_name="statementline",
            name="estimated_tokens",
            field=models.BigIntegerField(
                blank=True, null=True,
                help_text="Estimated tokens, beside those that the upstreams reported. Empty: on statements of earlier versions.",
            ),
        ),
    ]
