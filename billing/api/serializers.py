"""What requests about money say, and what answers show. Amounts are decimal numbers in strings."""

import csv
from collections.abc import Iterable
from datetime import date
from decimal import Decimal
from io import StringIO
from typing import Any

from rest_framework import serializers

from billing import pricing
from billing.estimate import Estimate
from billing.forecast import FORECAST_WINDOW_DAYS, Forecast
from billing.instance_types import list_instance_types
from billing.intervals import MICROSECOND
from billing.models import BillableItem
from billing.totals import GROUP_BY_COLUMNS, CostTotal

MAX_RESULTS = 10_000
ZERO_USD = Decimal(0)
ITEM_NAMES = [str(item) for item in BillableItem.values]


class CostFilterSerializer(serializers.Serializer):
    """Whose costs, of those that the caller may see."""

    agent = serializers.CharField(required=False, max_length=255, help_text="Of this agent only: its DID.")
    account = serializers.CharField(required=False, max_length=63, help_text="Of this account only.")
    environment = serializers.CharField(required=False, max_length=200, help_text="In this environment only.")
    provider = serializers.CharField(required=False, max_length=32, help_text="At this provider only.")


class CostQuerySerializer(CostFilterSerializer):
    by = serializers.ChoiceField([*GROUP_BY_COLUMNS], default="agent", help_text="What costs are added up by.")
    since = serializers.DateField(required=False, help_text="The first day, UTC.")
    until = serializers.DateField(required=False, help_text="The day after the last one.")
    lease = serializers.UUIDField(required=False, help_text="Of this lease only.")
    limit = serializers.IntegerField(default=1000, min_value=1, max_value=MAX_RESULTS, help_text="Results that are shown.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if "since" in attrs and "until" in attrs and attrs["until"] <= attrs["since"]:
            raise serializers.ValidationError({"until": "Later than since: it is the day after the last one."})
        return attrs


class CostTotalSerializer(serializers.Serializer):
    key = serializers.CharField(help_text="Empty: of no agent or lease, such as a plan, or a sandbox that nobody held yet.")
    usd = serializers.CharField(help_text="A decimal number.")
    hours = serializers.CharField(allow_null=True, help_text="For which sandboxes were there and ready. Null by item.")
    quantities = serializers.DictField(child=serializers.CharField(), help_text="In the units of the items.")
    free = serializers.DictField(child=serializers.CharField(), help_text="How much of that was within an allowance.")


class CostReportSerializer(serializers.Serializer):
    by = serializers.CharField()
    since = serializers.DateField(allow_null=True)
    until = serializers.DateField(allow_null=True)
    metered_at = serializers.DateTimeField(allow_null=True, help_text="What was used until then is in it.")
    total_usd = serializers.CharField(help_text="Of all results, those that are left out as well.")
    left_out = serializers.IntegerField(help_text="Results past the limit.")
    results = CostTotalSerializer(many=True)


class EstimateQuerySerializer(serializers.Serializer):
    agents = serializers.IntegerField(min_value=1, max_value=1_000_000)
    hours_per_day = serializers.DecimalField(
        8, 4, min_value=0, max_value=24, default=Decimal(24), help_text="That each agent's sandbox is there."
    )
    days = serializers.IntegerField(min_value=1, max_value=31, default=30, help_text="Of one month.")
    instance = serializers.ChoiceField(list_instance_types(), default="basic")
    cpu_utilisation = serializers.DecimalField(
        8,
        6,
        min_value=0,
        max_value=1,
        default=Decimal(1),
        help_text="The part of its CPU that a sandbox uses, 0 to 1, where CPU is priced by use.",
    )
    provider = serializers.RegexField(r"\A[-a-z0-9_]{1,32}\Z", default="cloudflare")


class ForecastQuerySerializer(CostFilterSerializer):
    last = serializers.IntegerField(
        min_value=1,
        max_value=366,
        default=FORECAST_WINDOW_DAYS,
        help_text="From how many days, those that are over, it is made.",
    )
    budget = serializers.DecimalField(
        18, 9, min_value=Decimal("1e-9"), required=False, help_text="USD, from the 1st on: when are they spent?"
    )


class EstimateLineSerializer(serializers.Serializer):
    item = serializers.CharField()
    unit = serializers.CharField()
    quantity = serializers.CharField()
    free = serializers.CharField()
    rate_usd = serializers.CharField()
    usd = serializers.CharField(help_text="Rounded to cents.")


class EstimateSerializer(serializers.Serializer):
    lines = EstimateLineSerializer(many=True)
    total_usd = serializers.CharField(help_text="The sum of the lines.")
    per_agent_usd = serializers.CharField()


class ForecastSerializer(serializers.Serializer):
    metered_at = serializers.DateTimeField(allow_null=True, help_text="What was used until then is in it.")
    spent_usd = serializers.CharField(help_text="This month (UTC) so far.")
    a_day_usd = serializers.CharField(
        allow_null=True, help_text="What one of the last days has cost on average, plans apart; null: none is over yet."
    )
    days = serializers.IntegerField(help_text="Over how many days that is the average: from the first with any usage on.")
    month_usd = serializers.CharField(help_text="What all of this month will cost if the days to come cost that.")
    budget_usd = serializers.CharField(allow_null=True, help_text="As it was asked.")
    runs_out = serializers.DateField(
        allow_null=True, help_text="The day (UTC) at whose end that is spent; null: never at this pace, or none was asked."
    )


def render_cost_total(total: CostTotal) -> dict[str, Any]:
    return {
        "key": total.key,
        "usd": pricing.format_decimal(total.usd),
        "hours": format_hours(total),
        "quantities": {item: pricing.format_decimal(amount) for item, amount in sorted(total.quantities.items())},
        "free": {item: pricing.format_decimal(amount) for item, amount in sorted(total.free.items())},
    }


def format_hours(total: CostTotal) -> str | None:
    if total.sandbox_time is None:
        return None
    return pricing.format_decimal(pricing.round_half_up(pricing.to_units("time", total.sandbox_time // MICROSECOND)))


def render_estimate(found: Estimate) -> dict[str, Any]:
    lines = [
        {
            "item": line.item,
            "unit": BillableItem(line.item).label,
            "quantity": pricing.format_decimal(line.quantity),
            "free": pricing.format_decimal(line.free),
            "rate_usd": pricing.format_decimal(line.rate),
            "usd": str(line.usd),
        }
        for line in found.lines
    ]
    return {"lines": lines, "total_usd": str(found.total), "per_agent_usd": str(found.per_agent)}


def render_forecast(found: Forecast) -> dict[str, Any]:
    return {
        "spent_usd": pricing.format_decimal(found.spent),
        "a_day_usd": None if found.a_day is None else pricing.format_decimal(found.a_day),
        "days": found.days,
        "month_usd": pricing.format_decimal(found.month),
        "budget_usd": None if found.budget is None else pricing.format_decimal(found.budget),
        "runs_out": format_day(found.runs_out),
    }


def format_day(day: date | None) -> str | None:
    return day.isoformat() if day else None


def render_costs_csv(by: str, totals: Iterable[CostTotal]) -> str:
    """A line for each key: what it cost, for how long it had sandboxes, and quantities by item, empty where there are none."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([by, "usd", "hours", *ITEM_NAMES])
    for total in totals:
        quantities = [pricing.format_decimal(total.quantities[item]) if item in total.quantities else "" for item in ITEM_NAMES]
        writer.writerow([total.key, pricing.format_decimal(total.usd), format_hours(total) or "", *quantities])
    return text.getvalue()
