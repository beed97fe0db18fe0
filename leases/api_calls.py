"""The door to what a lease's sandboxes asked their models, and what that took."""

from typing import Any
from uuid import UUID

from django.db.models import Count, Q, Sum
from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers

from leases import schema
from leases.api import Door
from leases.paging import page
from leases.serializers import stamp
from sandboxes.models import LlmCall


class CallShown(serializers.Serializer):
    call_id = serializers.CharField()
    run_id = serializers.UUIDField(allow_null=True)
    model = serializers.CharField()
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    outcome = serializers.ChoiceField(LlmCall.Outcome.values)
    status = serializers.IntegerField(allow_null=True, help_text="HTTP status that the sandbox was answered.")
    input_tokens = serializers.IntegerField(allow_null=True, help_text="As the upstream counted; null: it did not say.")
    cached_tokens = serializers.IntegerField(allow_null=True)
    output_tokens = serializers.IntegerField(allow_null=True)
    cost_usd = serializers.CharField(allow_null=True, help_text="A decimal number; null: not known.")


class CallsTotal(serializers.Serializer):
    """Over all calls of the lease, not only those of this page."""

    calls = serializers.IntegerField()
    unpriced = serializers.IntegerField(help_text="Calls that have ended and of which it is not known what they cost.")
    input_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    cost_usd = serializers.CharField(help_text="Of those that are priced.")


class CallsShown(serializers.Serializer):
    total = CallsTotal()
    results = CallShown(many=True)
    next = serializers.CharField(allow_null=True)


class Calls(Door):
    @extend_schema(operation_id="leases_calls_list", parameters=schema.PAGE, responses=schema.answers(CallsShown, 404))
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What this lease's sandboxes asked their model, newest first, and the totals."""
        calls = LlmCall.objects.filter(holder=self.caller.lease(pk).pk)
        found, following = page(calls, "started_at", request)
        total = calls.aggregate(
            calls=Count("pk"),
            unpriced=Count("pk", filter=Q(cost__isnull=True, ended_at__isnull=False)),
            input_tokens=Sum("input_tokens", default=0),
            output_tokens=Sum("output_tokens", default=0),
            cost=Sum("cost", default=0),
        )
        said = total | {"cost_usd": amount(total.pop("cost"))}
        return JsonResponse({"total": said, "results": [call_shown(call) for call in found], "next": following})


def call_shown(call: LlmCall) -> dict[str, Any]:
    return {
        "call_id": call.call_id,
        "run_id": str(call.run_id) if call.run_id else None,
        "model": call.model,
        "started_at": stamp(call.started_at),
        "ended_at": stamp(call.ended_at) if call.ended_at else None,
        "outcome": call.outcome,
        "status": call.status,
        "input_tokens": call.input_tokens,
        "cached_tokens": call.cached_tokens,
        "output_tokens": call.output_tokens,
        "cost_usd": None if call.cost is None else amount(call.cost),
    }


def amount(cost: Any) -> str:
    """USD without exponent and without the zeros that a column fills up with."""
    return f"{cost.normalize():f}" if cost else "0"
