"""Add the marks of orders to operator actions: actions recorded before their effect, and their results."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("sandboxes", "0092_call_token_limit"),
    ]

    operations = [
        migrations.AddField(
            model_name="operatoraction",
            name="is_order",
            field=models.BooleanField(
                db_default=False,
                default=False,
                help_text="Recorded before its effect, which is not one transaction.",
                verbose_name="order",
            ),
        ),
        migrations.AddField(
            model_name="operatoraction",
            name="result",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="Of an order. Empty: not known, its process ended first.",
                max_length=1000,
            ),
        ),
    ]
