"""Tokens of model calls as budgets count them: reserved at the start, replaced at the end, and the part that is metered."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [("sandboxes", "0089_replaced_list_index")]

    operations = [
        migrations.AddField(
            model_name="llmcall",
            name="reserved_tokens",
            field=models.BigIntegerField(blank=True, help_text="Estimated tokens of the call, reserved until the call is settled.", null=True),
        ),
        migrations.AddField(
            model_name="llmcall",
            name="tokens",
            field=models.BigIntegerField(blank=True, help_text="Input and output. The part that the upstream did not report is an estimate.", null=True),
        ),
        migrations.AddField(
            model_name="llmcall",
            name="metered_tokens",
            field=models.BigIntegerField(blank=True, editable=False, help_text="Part of the tokens that is included in a usage record.", null=True),
        ),
    ]
