"""Cost estimate of a scenario and forecast of the current month."""

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
    COSTS_SCOPE,
    CostFilterSerializer,
    authorize_agents,
    build_responses,
    format_day,
    get_metered_at,
    validate_query,
)
from billing.estimate import Estimate, EstimateError, Scenario, estimate
from billing.forecast import FORECAST_WINDOW_DAYS, Forecast, forecast
from billing.instance_types import list_instance_types
from billing.models import BillableItem, Rate


class EstimateQuerySerializer(serializers.Serializer):
    agents = serializers.IntegerField(min_value=1, max_value=1_000_000, help_text="Number of agents.")
    hours_per_day = serializers.DecimalField(
        8, 4, min_value=0, max_value=24, default=Decimal(24), help_text="Hours per day in which each agent has a sandbox."
    )
    days = serializers.IntegerField(min_value=1, max_value=31, default=30, help_text="Days in one month.")
    instance = serializers.ChoiceField(list_instance_types(), default="basic", help_text="Instance type of each sandbox.")
    cpu_utilisation = serializers.DecimalField(
        8,
        6,
        min_value=0,
        max_value=1,
        default=Decimal(1),
        help_text="Fraction of its CPU that a sandbox uses, 0 to 1. Has an effect if the provider prices CPU by use.",
    )
    provider = serializers.RegexField(r"\A[-a-z0-9_]{1,32}\Z", default="cloudflare", help_text="Provider whose rates apply.")


class ForecastQuerySerializer(CostFilterSerializer):
    last = serializers.IntegerField(
        min_value=1,
        max_value=366,
        default=FORECAST_WINDOW_DAYS,
        help_text="Number of past days from which the average is computed.",
    )
    budget = serializers.DecimalField(
        18,
        9,
        min_value=Decimal("1e-9"),
        required=False,
        help_text="Monthly budget in USD whose day of exhaustion is predicted.",
    )


class EstimateLineSerializer(serializers.Serializer):
    item = serializers.CharField()
    unit = serializers.CharField()
    quantity = serializers.CharField()
    free = serializers.CharField(help_text="Part of the quantity that an allowance covers.")
    rate_usd = serializers.CharField(help_text="Price of one unit.")
    usd = serializers.CharField(help_text="Rounded to cents.")


class EstimateSerializer(serializers.Serializer):
    lines = EstimateLineSerializer(many=True)
    total_usd = serializers.CharField(help_text="Sum of the lines.")
    per_agent_usd = serializers.CharField()


class ForecastSerializer(serializers.Serializer):
    metered_at = serializers.DateTimeField(allow_null=True, help_text="Usage up to this time is included.")
    spent_usd = serializers.CharField(help_text="Costs of this month (UTC) so far.")
    a_day_usd = serializers.CharField(
        allow_null=True, help_text="Average daily cost without plans; null: no day with usage has passed yet."
    )
    days = serializers.IntegerField(help_text="Number of days in the average, from the first day with usage.")
    month_usd = serializers.CharField(help_text="Predicted cost of the whole month at this average.")
    budget_usd = serializers.CharField(allow_null=True, help_text="Budget as requested.")
    runs_out = serializers.DateField(
        allow_null=True,
        help_text="Day (UTC) of exhaustion of the budget; null: never at this rate, or no budget requested.",
    )


class EstimateView(APIView):
    key_scope = COSTS_SCOPE
    http_method_names = ["get", "head"]

    @extend_schema(
        operation_id="estimate_get",
        summary="Estimate monthly costs",
        parameters=[EstimateQuerySerializer],
        responses=build_responses(EstimateSerializer),
    )
    def get(self, request: Request) -> HttpResponse:
        """Return the monthly cost of the described usage at the current rates."""
        query = validate_query(EstimateQuerySerializer, request)
        try:
            result = estimate(Scenario(**query), Rate.objects.all(), now=timezone.now())
        except EstimateError as error:
            raise ValidationError({error.field: str(error)}) from None
        return Response(render_estimate(result))


class ForecastView(APIView):
    key_scope = COSTS_SCOPE
    http_method_names = ["get", "head"]

    @extend_schema(
        operation_id="forecast_get",
        summary="Forecast this month's costs",
        parameters=[ForecastQuerySerializer],
        responses=build_responses(ForecastSerializer),
    )
    def get(self, request: Request) -> HttpResponse:
        """Return the predicted cost of this month and the predicted day of exhaustion of a budget.

        The forecast covers this key's agents; with an operator's key, all agents."""
        query = validate_query(ForecastQuerySerializer, request)
        result = forecast(now=timezone.now(), agents=authorize_agents(request, query), **query)
        return Response({"metered_at": get_metered_at(), **render_forecast(result)})


def render_estimate(result: Estimate) -> dict[str, Any]:
    lines = [
        {
            "item": line.item,
            "unit": BillableItem(line.item).label,
            "quantity": pricing.format_decimal(line.quantity),
            "free": pricing.format_decimal(line.free),
            "rate_usd": pricing.format_decimal(line.rate),
            "usd": str(line.usd),
        }
        for line in result.lines
    ]
    return {"lines": lines, "total_usd": str(result.total), "per_agent_usd": str(result.per_agent)}


def render_forecast(result: Forecast) -> dict[str, Any]:
    return {
        "spent_usd": pricing.format_decimal(result.spent),
        "a_day_usd": None if result.a_day is None else pricing.format_decimal(result.a_day),
        "days": result.days,
        "month_usd": pricing.format_decimal(result.month),
        "budget_usd": None if result.budget is None else pricing.format_decimal(result.budget),
        "runs_out": format_day(result.runs_out),
    }
