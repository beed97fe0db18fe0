"""What answers show of a lease's calls to models, and of what they cost."""

from decimal import Decimal
from typing import Any

from rest_framework import serializers

from leases.api.serializers import LeaseShown
from leases.models import Lease
from sandboxes.db.clock import iso
from sandboxes.egress.totals import Totals
from sandboxes.models import LlmCall


class CallShown(serializers.Serializer):
    call_id = serializers.CharField()
    run_id = serializers.UUIDField(allow_null=True)
    kind = serializers.ChoiceField(LlmCall.Kind.values, help_text="llm: a request to a model; relay: a connection.")
    model = serializers.CharField()
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    outcome = serializers.ChoiceField(LlmCall.Outcome.values)
    status = serializers.IntegerField(allow_null=True, help_text="HTTP status that the sandbox was answered.")
    code = serializers.CharField(help_text="Why it was refused or failed; else empty.")
    input_tokens = serializers.IntegerField(allow_null=True, help_text="As the upstream counted; null: it did not say.")
    cached_tokens = serializers.IntegerField(allow_null=True)
    output_tokens = serializers.IntegerField(allow_null=True)
    cost_usd = serializers.CharField(allow_null=True, help_text="A decimal number; null: not known.")


class CallsTotal(serializers.Serializer):
    """Over all calls of the lease to models, not only those of this page. What the relay was used for is not in it."""

    calls = serializers.IntegerField()
    refused = serializers.IntegerField(help_text="Those of them that did not leave.")
    unpriced = serializers.IntegerField(help_text="Calls that left and have ended, and whose cost is not known.")
    input_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    cost_usd = serializers.CharField(help_text="Of those that are priced.")


class CallsShown(serializers.Serializer):
    total = CallsTotal()
    results = CallShown(many=True)
    next = serializers.CharField(allow_null=True)


class LeaseCalls(serializers.Serializer):
    limit = serializers.CharField(allow_null=True, help_text="USD that the calls may cost, a decimal number; null: any.")
    spent = serializers.CharField(help_text="USD, of the calls that are priced.")
    unpriced_calls = serializers.IntegerField(help_text="Calls that left and have ended, and whose cost is not known.")
    calls = serializers.IntegerField()
    refused = serializers.IntegerField(help_text="Those of them that did not leave.")
    input_tokens = serializers.IntegerField(help_text="As far as upstreams have said.")
    output_tokens = serializers.IntegerField()


class LeaseDetail(LeaseShown):
    seconds_alive = serializers.FloatField(help_text="How long its sandboxes have had a process, all together.")
    llm = LeaseCalls(help_text="What its sandboxes asked their models, and what that cost.")


def call_shown(call: LlmCall) -> dict[str, Any]:
    return {
        "call_id": call.call_id,
        "run_id": str(call.run_id) if call.run_id else None,
        "kind": call.kind,
        "model": call.model,
        "started_at": iso(call.started_at),
        "ended_at": iso(call.ended_at) if call.ended_at else None,
        "outcome": call.outcome,
        "status": call.status,
        "code": call.code,
        "input_tokens": call.input_tokens,
        "cached_tokens": call.cached_tokens,
        "output_tokens": call.output_tokens,
        "cost_usd": None if call.cost is None else amount(call.cost),
    }


def total_shown(total: Totals) -> dict[str, Any]:
    return {
        "calls": total.calls,
        "refused": total.refused,
        "unpriced": total.unpriced,
        "input_tokens": total.input_tokens,
        "output_tokens": total.output_tokens,
        "cost_usd": amount(total.spent),
    }


def lease_calls_shown(lease: Lease, total: Totals) -> dict[str, Any]:
    return {
        "limit": None if lease.llm_limit is None else amount(lease.llm_limit),
        "spent": amount(total.spent),
        "unpriced_calls": total.unpriced,
        "calls": total.calls,
        "refused": total.refused,
        "input_tokens": total.input_tokens,
        "output_tokens": total.output_tokens,
    }


def amount(cost: Decimal) -> str:
    """USD without exponent and without the zeros that a column fills up with."""
    return f"{cost.normalize():f}" if cost else "0"
