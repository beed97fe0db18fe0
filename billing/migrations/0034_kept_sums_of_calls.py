"""Sum of the metered model calls of a budget, kept until a usage record changes."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("billing", "0033_newest_tokens_index")]

    operations = [
        migrations.AddField(
            model_name="budget",
            name="calls_metered",
            field=models.BigIntegerField(
                db_default=0, default=0, editable=False,
                help_text="Metered model calls of the day `calls_day` and later, in billionths of USD or in tokens.",
            ),
        ),
        migrations.AddField(
            model_name="budget",
            name="calls_metered_mark",
            field=models.BigIntegerField(
                blank=True, editable=False, null=True,
                help_text="Id of the newest usage record of model calls in `calls_metered`. Empty: to be summed again.",
            ),
        ),
    ]
