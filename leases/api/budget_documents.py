"""Documents of budgets and top-ups: fields of requests and responses."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from rest_framework import serializers

from billing import budgets
from billing.api.views import format_day
from billing.budgets import Disclosure
from billing.forecast import BudgetForecast, forecast_budget
from billing.models import Budget, BudgetTopUp
from billing.models.budgets import MAX_WARN_PERCENTS, MIN_BUDGET_AMOUNT, Period, Scope, Unit
from billing.pricing import format_decimal
from leases.api.base.fields import (
    MAX_TTL_SECONDS,
    DecimalStringField,
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from sandboxes.db.clock import format_optional_timestamp, format_timestamp


class BudgetSerializer(serializers.Serializer):
    id = serializers.IntegerField()
    scope = serializers.ChoiceField(Scope.values)
    subject = serializers.CharField(
        help_text="DID, id of an API key, or name of an environment type or account; empty for the whole installation."
    )
    model = serializers.CharField(
        help_text="Pattern of the models whose calls the budget counts and refuses; empty: sandboxes and all model calls."
    )
    unit = serializers.ChoiceField(
        Unit.values, help_text="A budget in `tokens` counts and refuses model calls alone, like one with a `model`."
    )
    amount = serializers.CharField(
        allow_null=True,
        help_text="Decimal number in `unit`, without top-ups; null: not disclosed to this key, which shares the budget with "
        "others.",
    )
    topped_up = serializers.CharField(
        allow_null=True, help_text="Decimal number in `unit`: top-ups of this period; null: not disclosed to this key."
    )
    period = serializers.ChoiceField(Period.values, help_text="Calendar period in `time_zone`; hours are those of UTC.")
    time_zone = serializers.CharField(help_text="IANA name. The period begins with the full UTC hour of local midnight.")
    hard = serializers.BooleanField(
        help_text="true: an exhausted budget refuses requests (402) and ends leases; false: it only warns."
    )
    warn_percents = serializers.ListField(child=serializers.IntegerField(), help_text="Percentages at which warnings are sent.")
    warn_percent = serializers.IntegerField(
        allow_null=True, help_text="The lowest of `warn_percents`, for clients of earlier versions; null without."
    )
    grace_seconds = serializers.FloatField(help_text="Grace period of active leases after exhaustion.")
    active = serializers.BooleanField()
    spent = serializers.CharField(
        allow_null=True, help_text="Decimal number in `unit`: known spending in this period; null: not disclosed to this key."
    )
    estimated_usd = serializers.CharField(
        allow_null=True,
        help_text="Estimated part of `spent`, in USD; 0 for a budget in hours or tokens; null: not disclosed to this key.",
    )
    estimated_tokens = serializers.IntegerField(
        allow_null=True,
        help_text="Estimated part of `spent`, in tokens; 0 for a budget in USD or hours; null: not disclosed to this key.",
    )
    unpriced_calls = serializers.IntegerField(
        allow_null=True,
        help_text="Number of model calls in this period without a price, which `spent` does not include; 0 for a budget in "
        "hours or tokens; null: not disclosed to this key.",
    )
    reserved = serializers.CharField(
        allow_null=True,
        help_text="Decimal number in `unit`: price of the running sandboxes until they could be stopped, usage that is not "
        "metered yet included. Derived at the time of the request; 0 for a soft budget; null: not disclosed to this key.",
    )
    remaining = serializers.CharField(
        allow_null=True,
        help_text="Decimal number in `unit`: amount and top-ups without `spent` and `reserved`, at least 0; null: not "
        "disclosed to this key.",
    )
    spent_at = serializers.DateTimeField(
        allow_null=True, help_text="Time of the last computation of `spent`; null: not computed yet."
    )
    exhausted = serializers.BooleanField(help_text="true: `amount` is spent, or `spent` and `reserved` together exceed it.")
    runs_out = serializers.DateField(
        allow_null=True,
        help_text="Day (UTC) of exhaustion: observed, or predicted from the average daily spending of the last days; "
        "null: not within this period, the budget is not active, or not disclosed to this key.",
    )
    expected = serializers.CharField(
        allow_null=True,
        help_text="Decimal number in `unit`: spending expected at the end of the period, by the same average; null: no full "
        "day of usage yet, exhausted, not active, a lifetime, or not disclosed to this key.",
    )
    resets_at = serializers.DateTimeField(allow_null=True, help_text="Start of the next period; null for a lifetime budget.")
    created_at = serializers.DateTimeField()


class AmountField(DecimalStringField):
    def __init__(self, **options: Any) -> None:
        super().__init__(max_digits=18, decimal_places=6, min_value=MIN_BUDGET_AMOUNT, **options)


class BudgetChangeSerializer(StrictSerializer):
    amount = AmountField(required=False, help_text="Decimal number in the budget's unit. A raise takes effect at once.")
    hard = StrictBooleanField(required=False)
    active = StrictBooleanField(required=False, help_text="false: disable the budget without deleting it.")
    warn_percents = serializers.ListField(
        child=StrictIntegerField(min_value=1, max_value=100), max_length=MAX_WARN_PERCENTS, required=False,
        help_text="Percentages at which warnings are sent. Default: 50, 80, 100.",
    )  # fmt: skip
    grace_seconds = StrictIntegerField(
        min_value=0, max_value=MAX_TTL_SECONDS, required=False, help_text="Grace period of active leases. Default: 300."
    )
    time_zone = StrictCharField(max_length=63, required=False, help_text="IANA name, such as Europe/Berlin. Default: UTC.")


class NewBudgetSerializer(BudgetChangeSerializer):
    scope = serializers.ChoiceField(Scope.values)
    subject = StrictCharField(
        max_length=255, allow_blank=True, default="",
        help_text="DID, id of an API key, or name of an environment type, account or project; empty with the scope `all`.",
    )  # fmt: skip
    model = StrictCharField(
        max_length=200, allow_blank=True, default="",
        help_text="Only calls of this model or pattern, such as `claude-opus*`. The budget is in USD or tokens, and refuses "
        "calls alone.",
    )  # fmt: skip
    unit = serializers.ChoiceField(Unit.values)
    amount = AmountField(help_text="Decimal number in `unit`; of `tokens` a whole number.")
    period = serializers.ChoiceField(Period.values)


class NewTopUpSerializer(StrictSerializer):
    amount = AmountField(help_text="Decimal number in the budget's unit.")
    note = StrictCharField(max_length=300, allow_blank=True, default="", help_text="Reason, shown with the top-up.")


class TopUpSerializer(serializers.Serializer):
    id = serializers.UUIDField()
    amount = serializers.CharField(help_text="Decimal number in the budget's unit.")
    period_began = serializers.DateTimeField(help_text="Start of the period that the amount was added to, and expires with.")
    note = serializers.CharField()
    actor = serializers.CharField(help_text="Name of the API key, or `command line`.")
    created_at = serializers.DateTimeField()


class ToppedUpBudgetSerializer(serializers.Serializer):
    top_up = TopUpSerializer()
    budget = BudgetSerializer()


def serialize_top_up(row: BudgetTopUp) -> dict[str, Any]:
    return {
        "id": str(row.pk),
        "amount": format_decimal(row.amount),
        "period_began": format_timestamp(row.period_began),
        "note": row.note,
        "actor": row.actor,
        "created_at": format_timestamp(row.created_at),
    }


def serialize_budget(
    budget: Budget, disclosure: Disclosure, basis: budgets.ReservationBasis, *, now: datetime
) -> dict[str, Any]:
    """Return the document of a budget with the figures that `disclosure` permits."""
    spends, amounts = disclosure == Disclosure.SPENDING, disclosure != Disclosure.NOTHING
    spent, uncertainty = budgets.get_spent(budget, now), budgets.get_uncertainty(budget, now)
    reserved = budgets.compute_reservation(budget, now=now, basis=basis)
    remaining = max(budgets.get_limit(budget, now) - spent - reserved, Decimal(0))
    forecast = forecast_budget(budget, now) if spends else BudgetForecast(None, None)
    expected = forecast.at_end
    return {
        "id": budget.pk,
        "scope": budget.scope,
        "subject": budget.subject,
        "model": budget.model,
        "unit": budget.unit,
        "amount": format_decimal(budget.amount) if amounts else None,
        "topped_up": format_decimal(budgets.get_topped_up(budget, now)) if amounts else None,
        "period": budget.period,
        "time_zone": budget.time_zone,
        "hard": budget.hard,
        "warn_percents": budget.warn_percents,
        "warn_percent": min(budget.warn_percents, default=None),
        "grace_seconds": budget.grace.total_seconds(),
        "active": budget.active,
        "spent": format_decimal(spent) if spends else None,
        "estimated_usd": format_decimal(uncertainty.estimated_usd) if spends else None,
        "estimated_tokens": uncertainty.estimated_tokens if spends else None,
        "unpriced_calls": uncertainty.unpriced if spends else None,
        "reserved": format_decimal(reserved) if spends else None,
        "remaining": format_decimal(remaining) if spends else None,
        "spent_at": format_optional_timestamp(budget.spent_at),
        "exhausted": budgets.is_over(budget, spent, reserved, now=now),
        "runs_out": format_day(forecast.runs_out),
        "expected": format_decimal(expected) if expected is not None else None,
        "resets_at": format_optional_timestamp(budgets.get_period_bounds(budget, now)[1]),
        "created_at": format_timestamp(budget.created_at),
    }
