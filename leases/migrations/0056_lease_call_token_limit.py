"""Limit of the tokens of model calls."""

import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("leases", "0055_call_token_limit"),
    ]

    operations = [
        migrations.AddField(
            model_name="lease",
            name="llm_token_limit",
            field=models.BigIntegerField(
                blank=True,
                help_text="Input and output tokens of this lease's model calls. Empty: no limit.",
                null=True,
                verbose_name="token limit",
            ),
        ),
    ]
