"""Budgets in tokens. Their numbers are larger than those of budgets in USD."""

from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [("billing", "0029_budget_top_ups")]
    reasons = {
        "check": "A few rows, and wider than the conditions before.",
        "type": "A few rows. Numbers of more digits and longer texts: no version before writes another value.",
    }

    operations = [
        migrations.RemoveConstraint(model_name="budget", name="budget_known"),
        migrations.RemoveConstraint(model_name="budget", name="budget_of_model_in_usd"),
        migrations.AlterField(
            model_name="budget",
            name="unit",
            field=models.CharField(choices=[("usd", "USD"), ("hours", "sandbox-hours"), ("tokens", "model tokens")], max_length=8),
        ),
        migrations.AlterField(
            model_name="budget",
            name="amount",
            field=models.DecimalField(decimal_places=6, max_digits=18, validators=[MinValueValidator(Decimal("0.000001"))]),
        ),
        migrations.AlterField(
            model_name="budget",
            name="topped_up",
            field=models.DecimalField(db_default=Decimal("0"), decimal_places=6, default=Decimal("0"), editable=False, help_text="Sum of the top-ups of the period that began at `topped_up_for`.", max_digits=18),
        ),
        migrations.AlterField(
            model_name="budget",
            name="spent",
            field=models.DecimalField(decimal_places=9, default=Decimal("0"), editable=False, max_digits=24),
        ),
        migrations.AlterField(
            model_name="budget",
            name="calls_spent",
            field=models.DecimalField(db_default=Decimal("0"), decimal_places=9, default=Decimal("0"), editable=False, help_text="Part of the amount spent that is model calls.", max_digits=24),
        ),
        migrations.AlterField(
            model_name="budget",
            name="calls_before",
            field=models.DecimalField(db_default=Decimal("0"), decimal_places=9, default=Decimal("0"), editable=False, help_text="Cost or tokens of the model calls of the period before the day `calls_day`.", max_digits=24),
        ),
        migrations.AlterField(
            model_name="budget",
            name="reserved",
            field=models.DecimalField(db_default=Decimal("0"), decimal_places=9, default=Decimal("0"), editable=False, help_text="Reservation of the running sandboxes at the last update.", max_digits=24),
        ),
        migrations.AlterField(
            model_name="budget",
            name="estimated_usd",
            field=models.DecimalField(db_default=Decimal("0"), decimal_places=9, default=Decimal("0"), editable=False, help_text="Estimated part of the amount spent, of a budget in USD.", max_digits=18),
        ),
        migrations.AddField(
            model_name="budget",
            name="estimated_tokens",
            field=models.BigIntegerField(db_default=0, default=0, editable=False, help_text="Estimated part of the amount spent, of a budget in tokens."),
        ),
        migrations.AddConstraint(
            model_name="budget",
            constraint=models.CheckConstraint(condition=models.Q(("period__in", ["hour", "day", "week", "month", "ever"]), ("scope__in", ["all", "agent", "key", "environment_type", "account", "project"]), ("unit__in", ["usd", "hours", "tokens"])), name="budget_known"),
        ),
        migrations.AddConstraint(
            model_name="budget",
            constraint=models.CheckConstraint(condition=models.Q(("model", ""), ("unit__in", ["usd", "tokens"]), _connector="OR"), name="budget_of_model_counts_calls", violation_error_message="A budget for a model is in USD or tokens: model calls have no sandbox-hours."),
        ),
    ]
