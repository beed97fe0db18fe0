"""Connections of a lease's sandbox to the domains of its policy's allow list."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, LeaseApiView
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.models import EgressConnection


class ConnectionSerializer(serializers.Serializer):
    connection_id = serializers.CharField()
    run_id = serializers.UUIDField(allow_null=True)
    domain = serializers.CharField(help_text="Name that the sandbox requested.")
    port = serializers.IntegerField()
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    outcome = serializers.ChoiceField(EgressConnection.Outcome.values)
    code = serializers.CharField(help_text="Reason of a refusal, a failure or an interruption; otherwise empty.")
    sent_bytes = serializers.IntegerField(help_text="From the sandbox, including TLS. Of an open connection: about 20 s old.")
    received_bytes = serializers.IntegerField()


class ConnectionPageSerializer(serializers.Serializer):
    results = ConnectionSerializer(many=True)
    next = serializers.CharField(allow_null=True)


class ConnectionListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_connections_list",
        summary="List network connections",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(ConnectionPageSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the lease's connections to domains of the allow list, and the refused ones, newest first."""
        page, next_url = paginate(EgressConnection.objects.filter(holder=pk), "started_at", request)
        return Response({"results": [serialize_connection(row) for row in page], "next": next_url})


def serialize_connection(row: EgressConnection) -> dict[str, Any]:
    return {
        "connection_id": row.connection_id,
        "run_id": str(row.run_id) if row.run_id else None,
        "domain": row.domain,
        "port": row.port,
        "started_at": format_timestamp(row.started_at),
        "ended_at": format_optional_timestamp(row.ended_at),
        "outcome": row.outcome,
        "code": row.code,
        "sent_bytes": row.sent_bytes,
        "received_bytes": row.received_bytes,
    }
