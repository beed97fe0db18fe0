"""Limit of the tokens of model calls."""

import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0054_operator_action_permissions"),
    ]

    operations = [
        migrations.AddField(
            model_name="environmenttype",
            name="llm_token_limit",
            field=models.BigIntegerField(
                blank=True,
                help_text="Input and output tokens of the model calls of each new lease. Empty: no limit.",
                null=True,
                validators=[django.core.validators.MinValueValidator(0)],
                verbose_name="token limit",
            ),
        ),
    ]
