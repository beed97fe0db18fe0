"""Cost estimate of a scenario and forecast of the current month."""

from decimal import Decimal
from typing import Any

from django.http import HttpResponse
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
from billing.estimate import (
    Estimate,
    EstimateError,
    ProviderEstimate,
    Scenario,
    compare,
    estimate,
    list_priced_providers,
)
from billing.forecast import FORECAST_WINDOW_DAYS, Forecast, forecast
from billing.instance_types import list_instance_types
from billing.models import BillableItem, Rate
from sandboxes.db import database_time
from sandboxes.formatting import suggest_match
from sandboxes.models.resource_limits import GPU_TYPE_PATTERN
from sandboxes.providers.registry import PROVIDERS

PROVIDER_PATTERN = r"[-a-z0-9_]{1,32}"
ALL_PROVIDERS = "all"
MAX_COMPARED_PROVIDERS = 20


class ScenarioSerializer(serializers.Serializer):
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
    suspended_hours_per_day = serializers.DecimalField(
        8,
        4,
        min_value=0,
        max_value=24,
        default=Decimal(0),
        help_text="Further hours per day in which each agent's sandbox is suspended.",
    )
    disk_mib = serializers.IntegerField(
        min_value=1,
        max_value=1 << 30,
        required=False,
        help_text="MiB of disk of each sandbox. Default: that of the type.",
    )
    gpus = serializers.IntegerField(min_value=0, max_value=1000, default=0, help_text="Number of GPUs of each sandbox.")
    gpu_type = serializers.RegexField(
        rf"\A{GPU_TYPE_PATTERN}\Z", default="", help_text="Type of the GPUs, such as `H100`. Default: the rate of any type."
    )

    def validate_gpu_type(self, value: str) -> str:
        return value.upper()

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if attrs["hours_per_day"] + attrs["suspended_hours_per_day"] > 24:
            raise ValidationError({"suspended_hours_per_day": "A day has 24 hours, hours_per_day included."})
        return attrs


class EstimateQuerySerializer(ScenarioSerializer):
    provider = serializers.RegexField(rf"\A{PROVIDER_PATTERN}\Z", default="cloudflare", help_text="Provider whose rates apply.")


class ComparisonQuerySerializer(ScenarioSerializer):
    providers = serializers.RegexField(
        rf"\A{PROVIDER_PATTERN}(,{PROVIDER_PATTERN}){{0,{MAX_COMPARED_PROVIDERS - 1}}}\Z",
        default=ALL_PROVIDERS,
        help_text=f"Names of providers, separated by commas, or {ALL_PROVIDERS}: every provider with a rate.",
    )


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
    unpriced_items = serializers.ListField(
        child=serializers.CharField(), help_text="Items that the usage needs and that have no rate: not part of the total."
    )


class ProviderEstimateSerializer(serializers.Serializer):
    provider = serializers.CharField()
    estimate = EstimateSerializer(allow_null=True, help_text="null: no rate is known for this provider.")
    excluded = serializers.CharField(help_text="Further costs at this provider that no rate covers; may be empty.")


class ComparisonSerializer(serializers.Serializer):
    results = ProviderEstimateSerializer(many=True)


class ForecastSerializer(serializers.Serializer):
    metered_at = serializers.DateTimeField(allow_null=True, help_text="Usage up to this time is included.")
    spent_usd = serializers.CharField(help_text="Costs of this month (UTC) so far.")
    estimated_usd = serializers.CharField(help_text="Estimated part of `spent_usd`, of model calls whose usage is unknown.")
    unpriced_calls = serializers.IntegerField(
        help_text="Number of this month's model calls without a price, which no amount includes."
    )
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
            result = estimate(Scenario(**query), Rate.objects.all(), now=database_time.now())
        except EstimateError as error:
            raise ValidationError({error.field: str(error)}) from None
        return Response(render_estimate(result))


class ComparisonView(APIView):
    key_scope = COSTS_SCOPE
    http_method_names = ["get", "head"]

    @extend_schema(
        operation_id="estimate_comparison_get",
        summary="Compare monthly costs at several providers",
        parameters=[ComparisonQuerySerializer],
        responses=build_responses(ComparisonSerializer),
    )
    def get(self, request: Request) -> HttpResponse:
        """Return the monthly cost of the same usage at each provider, at the current rates, in the order of the request.

        Every provider prices the same CPU, memory and disk: those of the instance type, unless a disk is stated."""
        query = validate_query(ComparisonQuerySerializer, request)
        try:
            results = compare_providers(query, query.pop("providers").split(","))
        except EstimateError as error:
            raise ValidationError({error.field: str(error)}) from None
        return Response(render_comparison(results))


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
        result = forecast(now=database_time.now(), agents=authorize_agents(request, query), **query)
        return Response({"metered_at": get_metered_at(), **render_forecast(result)})


def compare_providers(scenario: dict[str, Any], providers: list[str]) -> list[ProviderEstimate]:
    """Compare the named providers, or all of them, at the current rates. `scenario` are the fields of a Scenario.

    Raise EstimateError for a name that is neither a provider nor one of a rate."""
    rates = [*Rate.objects.all()]
    rated = list_priced_providers(rates)
    if ALL_PROVIDERS in providers:
        providers = rated
    known = {*PROVIDERS, *rated}
    if unknown := [name for name in providers if name not in known]:
        raise EstimateError("providers", f"There is no provider {unknown[0]}.{suggest_match(unknown[0], sorted(known))}")
    fields = {name: value for name, value in scenario.items() if name not in ("provider", "providers")}
    return compare(Scenario(provider="", **fields), [*dict.fromkeys(providers)], rates, now=database_time.now())


def render_comparison(results: list[ProviderEstimate]) -> dict[str, Any]:
    return {
        "results": [
            {
                "provider": each.provider,
                "estimate": render_estimate(each.estimate) if each.estimate else None,
                "excluded": each.excluded,
            }
            for each in results
        ]
    }


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
    return {
        "lines": lines,
        "total_usd": str(result.total),
        "per_agent_usd": str(result.per_agent),
        "unpriced_items": result.unpriced,
    }


def render_forecast(result: Forecast) -> dict[str, Any]:
    return {
        "spent_usd": pricing.format_decimal(result.spent),
        "estimated_usd": pricing.format_decimal(result.uncertainty.estimated_usd),
        "unpriced_calls": result.uncertainty.unpriced,
        "a_day_usd": None if result.a_day is None else pricing.format_decimal(result.a_day),
        "days": result.days,
        "month_usd": pricing.format_decimal(result.month),
        "budget_usd": None if result.budget is None else pricing.format_decimal(result.budget),
        "runs_out": format_day(result.runs_out),
    }
