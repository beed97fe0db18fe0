"""LLM calls and relay connections of a lease."""

from decimal import Decimal
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import OpenApiExample, extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from billing.api.views import validate_query
from leases.api.base import schema
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.call_totals import GROUP_COLUMNS, list_call_totals
from leases.models import Lease
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.egress.totals import CallTotals, calculate_totals
from sandboxes.models import LlmCall

ESTIMATED_TOKENS_HELP = (
    "Estimated tokens of calls that have ended with unknown or incomplete usage, beside `input_tokens` and `output_tokens`."
)
EXAMPLE_TOTALS = {
    "calls": 3, "refused": 0, "unpriced": 0, "input_tokens": 41200, "cached_tokens": 38000, "cache_written_tokens": 2100,
    "output_tokens": 960, "estimated_tokens": 0, "cost_usd": "0.0623", "estimated_usd": "0",
}  # fmt: skip
GROUPED_CALLS_EXAMPLE = OpenApiExample(
    "By model", response_only=True, status_codes=["200"],
    value={
        "by": "model", "total": EXAMPLE_TOTALS, "left_out": 0, "results": [{"key": "claude-opus-4-5", **EXAMPLE_TOTALS}],
    },
)  # fmt: skip


class CallSerializer(serializers.Serializer):
    call_id = serializers.CharField()
    run_id = serializers.UUIDField(allow_null=True)
    kind = serializers.ChoiceField(LlmCall.Kind.values, help_text="llm: request to a model; relay: relay connection.")
    model = serializers.CharField()
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    outcome = serializers.ChoiceField(LlmCall.Outcome.values)
    status = serializers.IntegerField(allow_null=True, help_text="HTTP status returned to the sandbox.")
    code = serializers.CharField(help_text="Reason of a refusal or failure; otherwise empty.")
    input_tokens = serializers.IntegerField(allow_null=True, help_text="As reported by the upstream; null: not reported.")
    cached_tokens = serializers.IntegerField(allow_null=True)
    output_tokens = serializers.IntegerField(allow_null=True)
    cost_usd = serializers.CharField(allow_null=True, help_text="Decimal number; null if unknown.")


class CallTotalsSerializer(serializers.Serializer):
    """Totals of all LLM calls of the lease, not only of this page. Relay connections are excluded."""

    calls = serializers.IntegerField()
    refused = serializers.IntegerField(help_text="Calls refused by the egress proxy.")
    unpriced = serializers.IntegerField(help_text="Forwarded calls that have ended, of unknown cost.")
    input_tokens = serializers.IntegerField(help_text="Includes tokens read from and written to the cache.")
    cached_tokens = serializers.IntegerField(help_text="Part of the input that was read from the cache.")
    cache_written_tokens = serializers.IntegerField(help_text="Part of the input that was written to the cache.")
    output_tokens = serializers.IntegerField()
    estimated_tokens = serializers.IntegerField(help_text=ESTIMATED_TOKENS_HELP)
    cost_usd = serializers.CharField(help_text="Cost of the calls of known price.")
    estimated_usd = serializers.CharField(help_text="Estimated part of `cost_usd`.")


class CallPageSerializer(serializers.Serializer):
    total = CallTotalsSerializer()
    results = CallSerializer(many=True)
    next = serializers.CharField(allow_null=True)


class CallGroupQuerySerializer(serializers.Serializer):
    by = serializers.ChoiceField([*GROUP_COLUMNS], default="run", help_text="Attribute by which the calls are grouped.")
    limit = serializers.IntegerField(default=100, min_value=1, max_value=1000, help_text="Maximum number of results.")


class CallGroupSerializer(CallTotalsSerializer):
    """Totals of the LLM calls of one run, turn or model."""

    key = serializers.CharField(
        help_text="Id of the run, number of the turn or name of the model; empty for calls without one, such as those of "
        "background programs."
    )


class GroupedCallsSerializer(serializers.Serializer):
    by = serializers.ChoiceField([*GROUP_COLUMNS])
    total = CallTotalsSerializer()
    left_out = serializers.IntegerField(help_text="Number of results beyond the limit.")
    results = CallGroupSerializer(many=True)


class LeaseCallsSerializer(serializers.Serializer):
    limit = serializers.CharField(allow_null=True, help_text="Spending limit in USD, a decimal number; null: no limit.")
    token_limit = serializers.IntegerField(allow_null=True, help_text="Limit of input and output tokens; null: no limit.")
    spent = serializers.CharField(help_text="Cost in USD of the calls of known price.")
    estimated_usd = serializers.CharField(help_text="Estimated part of `spent`.")
    unpriced_calls = serializers.IntegerField(help_text="Forwarded calls that have ended, of unknown cost.")
    calls = serializers.IntegerField()
    refused = serializers.IntegerField(help_text="Calls refused by the egress proxy.")
    input_tokens = serializers.IntegerField(help_text="As reported by the upstreams.")
    output_tokens = serializers.IntegerField()
    estimated_tokens = serializers.IntegerField(help_text=ESTIMATED_TOKENS_HELP)


class CallListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_calls_list",
        summary="List LLM calls",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(CallPageSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the LLM calls and relay connections of a lease, newest first, with totals."""
        calls = LlmCall.objects.filter(holder=pk)
        page, next_url = paginate(calls, "started_at", request)
        results = [serialize_call(call) for call in page]
        return Response({"total": serialize_call_totals(calculate_totals(calls)), "results": results, "next": next_url})


class CallTotalsView(LeaseApiView):
    @extend_schema(
        operation_id="leases_calls_totals",
        summary="Get the LLM calls by run, turn or model",
        parameters=[CallGroupQuerySerializer],
        responses=schema.build_responses(GroupedCallsSerializer, 404),
        examples=[GROUPED_CALLS_EXAMPLE],
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return calls, tokens and cost of a lease's LLM calls by run, turn or model, the most expensive first.

        Includes calls that are not metered yet, and none whose rows are past their retention: `/costs?lease=` has those."""
        query = validate_query(CallGroupQuerySerializer, request)
        return Response(render_grouped_calls(pk, query["by"], limit=query["limit"]))


def render_grouped_calls(lease: UUID, by: str, *, limit: int) -> dict[str, Any]:
    total, groups, left_out = list_call_totals(lease, by, limit=limit)
    results = [{"key": each.key, **serialize_call_totals(each.totals)} for each in groups]
    return {"by": by, "total": serialize_call_totals(total), "left_out": left_out, "results": results}


def serialize_call(call: LlmCall) -> dict[str, Any]:
    return {
        "call_id": call.call_id,
        "run_id": str(call.run_id) if call.run_id else None,
        "kind": call.kind,
        "model": call.model,
        "started_at": format_timestamp(call.started_at),
        "ended_at": format_optional_timestamp(call.ended_at),
        "outcome": call.outcome,
        "status": call.status,
        "code": call.code,
        "input_tokens": call.input_tokens,
        "cached_tokens": call.cached_tokens,
        "output_tokens": call.output_tokens,
        "cost_usd": None if call.cost is None else format_usd(call.cost),
    }


def serialize_call_totals(total: CallTotals) -> dict[str, Any]:
    return {
        "calls": total.calls,
        "refused": total.refused,
        "unpriced": total.unpriced,
        "input_tokens": total.input_tokens,
        "cached_tokens": total.cached_tokens,
        "cache_written_tokens": total.cache_written_tokens,
        "output_tokens": total.output_tokens,
        "estimated_tokens": total.estimated_tokens,
        "cost_usd": format_usd(total.spent),
        "estimated_usd": format_usd(total.estimated),
    }


def serialize_lease_calls(lease: Lease, total: CallTotals) -> dict[str, Any]:
    return {
        "limit": None if lease.llm_limit is None else format_usd(lease.llm_limit),
        "token_limit": lease.llm_token_limit,
        "spent": format_usd(total.spent),
        "estimated_usd": format_usd(total.estimated),
        "unpriced_calls": total.unpriced,
        "calls": total.calls,
        "refused": total.refused,
        "input_tokens": total.input_tokens,
        "output_tokens": total.output_tokens,
        "estimated_tokens": total.estimated_tokens,
    }


def format_usd(cost: Decimal) -> str:
    """Format USD without exponent and trailing zeros."""
    return f"{cost.normalize():f}" if cost else "0"
