"""LLM calls and relay connections of a lease."""

from decimal import Decimal
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.models import Lease
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.egress.totals import CallTotals, calculate_totals
from sandboxes.models import LlmCall


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
    input_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    cost_usd = serializers.CharField(help_text="Cost of the calls of known price.")


class CallPageSerializer(serializers.Serializer):
    total = CallTotalsSerializer()
    results = CallSerializer(many=True)
    next = serializers.CharField(allow_null=True)


class LeaseCallsSerializer(serializers.Serializer):
    limit = serializers.CharField(allow_null=True, help_text="Spending limit in USD, a decimal number; null: no limit.")
    spent = serializers.CharField(help_text="Cost in USD of the calls of known price.")
    unpriced_calls = serializers.IntegerField(help_text="Forwarded calls that have ended, of unknown cost.")
    calls = serializers.IntegerField()
    refused = serializers.IntegerField(help_text="Calls refused by the egress proxy.")
    input_tokens = serializers.IntegerField(help_text="As reported by the upstreams.")
    output_tokens = serializers.IntegerField()


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
        "output_tokens": total.output_tokens,
        "cost_usd": format_usd(total.spent),
    }


def serialize_lease_calls(lease: Lease, total: CallTotals) -> dict[str, Any]:
    return {
        "limit": None if lease.llm_limit is None else format_usd(lease.llm_limit),
        "spent": format_usd(total.spent),
        "unpriced_calls": total.unpriced,
        "calls": total.calls,
        "refused": total.refused,
        "input_tokens": total.input_tokens,
        "output_tokens": total.output_tokens,
    }


def format_usd(cost: Decimal) -> str:
    """Format USD without exponent and trailing zeros."""
    return f"{cost.normalize():f}" if cost else "0"
