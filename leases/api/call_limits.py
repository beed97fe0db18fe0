"""Limits on the model calls of a lease, set by operators."""

from decimal import Decimal
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import call_limits
from leases.api.base import schema
from leases.api.base.fields import DecimalStringField, StrictIntegerField, StrictSerializer
from leases.api.base.permissions import CanAccessLease, HasKey, OperatorWrites
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.api.llm_calls import format_usd
from leases.models import Lease
from sandboxes.call_limits import MAX_TOKENS

USD_COLUMN = Lease._meta.get_field("llm_limit")


class CallLimitsChangeSerializer(StrictSerializer):
    limit = DecimalStringField(
        max_digits=USD_COLUMN.max_digits, decimal_places=USD_COLUMN.decimal_places, min_value=Decimal(0), required=False,
        allow_null=True, help_text="USD for all model calls of the lease, past ones included. Null: no limit.",
    )  # fmt: skip
    token_limit = StrictIntegerField(
        min_value=0, max_value=MAX_TOKENS, required=False, allow_null=True,
        help_text="Input and output tokens of all model calls of the lease, past ones included. Null: no limit.",
    )  # fmt: skip

    def validate(self, data: dict[str, Any]) -> dict[str, Any]:
        if not data:
            raise serializers.ValidationError({"limit": "State limit, token_limit or both."})
        return data


class CallLimitsSerializer(serializers.Serializer):
    limit = serializers.CharField(allow_null=True, help_text="Spending limit in USD, a decimal number; null: no limit.")
    token_limit = serializers.IntegerField(allow_null=True, help_text="Limit of input and output tokens; null: no limit.")


CHANGE_SERIALIZER = CallLimitsChangeSerializer()


class CallLimitsView(LeaseApiView):
    permission_classes = [HasKey, CanAccessLease, OperatorWrites]

    @extend_schema(
        operation_id="leases_calls_limits_update",
        summary="Set the limits on model calls",
        request=CallLimitsChangeSerializer,
        responses=schema.build_responses(CallLimitsSerializer, 403, 404, 410, 413, 415),
    )
    def patch(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Set or remove the limits on the cost and the tokens of a lease's model calls, from the next call on. Idempotent.

        A limit that the request does not name stays. The lease's events have the change. Operator keys only."""
        data = self.validate_body(CHANGE_SERIALIZER)
        changes = {call_limits.REQUEST_FIELDS[name]: value for name, value in data.items()}
        call_limits.change_call_limits(pk, changes, now=self.now, actor=self.actor)
        return Response(serialize_call_limits(Lease.objects.only("llm_limit", "llm_token_limit").get(pk=pk)))


def serialize_call_limits(lease: Lease) -> dict[str, Any]:
    limit = None if lease.llm_limit is None else format_usd(lease.llm_limit)
    return {"limit": limit, "token_limit": lease.llm_token_limit}
