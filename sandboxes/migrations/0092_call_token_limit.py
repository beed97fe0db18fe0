"""Limit of the tokens of model calls."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("sandboxes", "0091_operator_actions"),
    ]

    operations = [
        migrations.AddField(
            model_name="sandbox",
            name="llm_token_limit",
            field=models.BigIntegerField(
                blank=True, help_text="Token limit of the lease's model calls. Empty: no limit.", null=True
            ),
        ),
    ]
