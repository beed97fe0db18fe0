"""Cost estimate and forecast."""

from decimal import Decimal
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from billing import pricing
from billing.api.views import (
    CostFilterSerializer,
    authorize_agents,
    build_responses,
    format_day,
    get_metered_at,
    validate_query,
)
from billing.estimate import FORECAST_WINDOW_DAYS, Estimate, EstimateError, Forecast, Scenario, estimate, forecast
from billing.instance_types import list_instance_types
from billing.models import BillableItem, Rate


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


class EstimateView(APIView):
    http_method_names = ["get", "head"]

    @extend_schema(
        operation_id="estimate_get",
        parameters=[EstimateQuerySerializer],
        responses=build_responses(EstimateSerializer),
    )
    def get(self, request: Request) -> HttpResponse:
        """What so many agents would cost in a month, by the rates that are valid now."""
        said = validate_query(EstimateQuerySerializer, request)
        try:
            found = estimate(Scenario(**said), Rate.objects.all(), now=timezone.now())
        except EstimateError as wrong:
            raise ValidationError({wrong.field: str(wrong)}) from None
        return Response(render_estimate(found))


class ForecastView(APIView):
    http_method_names = ["get", "head"]

    @extend_schema(
        operation_id="forecast_get",
        parameters=[ForecastQuerySerializer],
        responses=build_responses(ForecastSerializer),
    )
    def get(self, request: Request) -> HttpResponse:
        """What this month will cost if the days to come cost what the last ones have, and when a budget is spent: of this
        key's agents, with an operator's key of all."""
        said = validate_query(ForecastQuerySerializer, request)
        found = forecast(now=timezone.now(), agents=authorize_agents(request, said), **said)
        return Response({"metered_at": get_metered_at(), **render_forecast(found)})


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
