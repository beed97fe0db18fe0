"""Cost report, as JSON or CSV."""

import csv
from collections.abc import Collection, Iterable
from decimal import Decimal
from io import StringIO
from typing import Any

from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from billing import pricing
from billing.api.views import (
    COSTS_SCOPE,
    CSV_MEDIA_TYPE,
    MAX_RESULTS,
    CostFilterSerializer,
    CsvRenderer,
    authorize_agents,
    build_responses,
    format_day,
    get_metered_at,
    validate_query,
)
from billing.grouping import GROUP_BY_COLUMNS
from billing.intervals import MICROSECOND
from billing.model_sums import TokenCounts
from billing.models import BillableItem
from billing.pricing import format_decimal
from billing.totals import CostTotal, sum_costs
from billing.uncertainty import Uncertainty

ZERO_USD = Decimal(0)
ITEM_NAMES = [str(item) for item in BillableItem.values]


class CostQuerySerializer(CostFilterSerializer):
    by = serializers.ChoiceField([*GROUP_BY_COLUMNS], default="agent", help_text="Attribute by which the results are grouped.")
    since = serializers.DateField(required=False, help_text="First day, UTC.")
    until = serializers.DateField(required=False, help_text="Day after the last day, UTC.")
    lease = serializers.UUIDField(required=False, help_text="Only costs of this lease.")
    project = serializers.CharField(
        required=False, max_length=63, help_text="Only costs of the leases of this project. A lease keeps its project."
    )
    model = serializers.CharField(
        required=False, max_length=200, help_text="Only costs of the calls to this model, by its full name."
    )
    limit = serializers.IntegerField(default=1000, min_value=1, max_value=MAX_RESULTS, help_text="Maximum number of results.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if "since" in attrs and "until" in attrs and attrs["until"] <= attrs["since"]:
            raise serializers.ValidationError({"until": "Must be later than since: the day itself is excluded."})
        return attrs


class TokenCountsSerializer(serializers.Serializer):
    """Tokens of model calls, as reported by the upstreams, and an estimate of those that they did not report."""

    input = serializers.IntegerField(help_text="Includes `cached` and `cache_written`.")
    cached = serializers.IntegerField(help_text="Part of the input that was read from the cache.")
    cache_written = serializers.IntegerField(help_text="Part of the input that was written to the cache.")
    output = serializers.IntegerField(help_text="Includes reasoning.")
    estimated = serializers.IntegerField(
        help_text="Estimated tokens of calls whose usage is unknown or incomplete, which `input` and `output` do not include."
    )


class CostTotalSerializer(serializers.Serializer):
    key = serializers.CharField(
        help_text="Value of the attribute in `by`; empty for a plan, for a sandbox that no lease held, by model for all other "
        "items than model calls, and by model_provider also for models of an unknown vendor."
    )
    usd = serializers.CharField(help_text="Decimal number.")
    estimated_usd = serializers.CharField(help_text="Estimated part of `usd`, of model calls whose usage is unknown.")
    unpriced_calls = serializers.IntegerField(help_text="Number of model calls without a price, which `usd` does not include.")
    hours = serializers.CharField(allow_null=True, help_text="Sandbox hours; null if grouped by item or model.")
    quantities = serializers.DictField(child=serializers.CharField(), help_text="Quantity of each item, in its unit.")
    free = serializers.DictField(child=serializers.CharField(), help_text="Part of each quantity that an allowance covers.")
    tokens = TokenCountsSerializer(allow_null=True, help_text="null: not derived yet, in the first minute after an upgrade.")


class CostReportSerializer(serializers.Serializer):
    by = serializers.CharField()
    since = serializers.DateField(allow_null=True)
    until = serializers.DateField(allow_null=True)
    metered_at = serializers.DateTimeField(allow_null=True, help_text="Usage up to this time is included.")
    total_usd = serializers.CharField(help_text="Total of all results, including results beyond the limit.")
    total_estimated_usd = serializers.CharField(help_text="Estimated part of `total_usd`.")
    total_unpriced_calls = serializers.IntegerField(
        help_text="Number of model calls without a price, which `total_usd` does not include."
    )
    total_tokens = TokenCountsSerializer(allow_null=True)
    left_out = serializers.IntegerField(help_text="Number of results beyond the limit.")
    results = CostTotalSerializer(many=True)


class CostsView(APIView):
    key_scope = COSTS_SCOPE
    http_method_names = ["get", "head"]
    renderer_classes = [*APIView.renderer_classes, CsvRenderer]

    @extend_schema(
        operation_id="costs_get",
        summary="Get costs",
        parameters=[CostQuerySerializer],
        responses=build_responses(CostReportSerializer) | {(200, CSV_MEDIA_TYPE): OpenApiTypes.STR},
    )
    def get(self, request: Request) -> HttpResponse:
        """Return usage, costs and tokens of this key's agents; with an operator's key, of all agents.

        The costs are those known now, also of closed months: late usage and corrected prices change them, and are
        corrections on the next statement. Statements and their exports never change.

        `by=model` and `model=` have the costs of model calls by the model's name. `by=model_provider` sums them by vendor,
        which follows from the name: `claude-opus-4-5` is of `anthropic`.

        `Accept: text/csv` or `format=csv` returns all results as a table."""
        query = validate_query(CostQuerySerializer, request)
        agents = authorize_agents(request, query)
        by, limit, since, until = query.pop("by"), query.pop("limit"), query.pop("since", None), query.pop("until", None)
        totals = sum_costs(by, since=since, until=until, agents=agents, **query)
        if request.accepted_renderer.format == "csv":
            return Response(render_costs_csv(by, totals))
        return Response(
            {
                "by": by,
                "since": format_day(since),
                "until": format_day(until),
                "metered_at": get_metered_at(),
                **render_sums(totals),
                "left_out": max(len(totals) - limit, 0),
                "results": [render_cost_total(total) for total in totals[:limit]],
            }
        )


def render_sums(totals: Collection[CostTotal]) -> dict[str, Any]:
    """Serialize the total of all groups."""
    uncertainty, tokens = Uncertainty.sum(totals), [total.tokens for total in totals]
    return {
        "total_usd": format_decimal(sum((total.usd for total in totals), ZERO_USD)),
        "total_estimated_usd": format_decimal(uncertainty.estimated_usd),
        "total_unpriced_calls": uncertainty.unpriced,
        "total_tokens": render_tokens(None if None in tokens else TokenCounts.sum(filter(None, tokens))),
    }


def render_tokens(tokens: TokenCounts | None) -> dict[str, int] | None:
    return None if tokens is None else tokens._asdict()


def render_cost_total(total: CostTotal) -> dict[str, Any]:
    return {
        "key": total.key,
        "usd": pricing.format_decimal(total.usd),
        "estimated_usd": format_decimal(total.estimated_usd),
        "unpriced_calls": total.unpriced,
        "hours": format_hours(total),
        "quantities": {item: pricing.format_decimal(amount) for item, amount in sorted(total.quantities.items())},
        "free": {item: pricing.format_decimal(amount) for item, amount in sorted(total.free.items())},
        "tokens": render_tokens(total.tokens),
    }


def format_hours(total: CostTotal) -> str | None:
    if total.sandbox_time is None:
        return None
    return pricing.format_decimal(pricing.round_half_up(pricing.to_units("time", total.sandbox_time // MICROSECOND)))


def render_costs_csv(by: str, totals: Iterable[CostTotal]) -> str:
    """Return a table with one line per group: cost, sandbox hours, and quantities by item, empty where there are none.

    The last columns are the estimated part of the cost, the number of model calls without a price, and tokens by kind. Tokens
    are empty while they are not derived."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    tokens = [f"{kind}_tokens" for kind in TokenCounts._fields]
    writer.writerow([by, "usd", "hours", *ITEM_NAMES, "estimated_usd", "unpriced_calls", *tokens])
    for total in totals:
        quantities = [pricing.format_decimal(total.quantities[item]) if item in total.quantities else "" for item in ITEM_NAMES]
        uncertainty = [format_decimal(total.estimated_usd), total.unpriced]
        counts = total.tokens or [""] * len(tokens)
        writer.writerow([total.key, format_decimal(total.usd), format_hours(total) or "", *quantities, *uncertainty, *counts])
    return text.getvalue()
