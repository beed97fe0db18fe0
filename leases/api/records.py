"""AT Protocol records of a lease."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.atproto.models import AtprotoRecord, RecordStatus
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.redaction.texts import omit_answers


class RecordSerializer(serializers.Serializer):
    record_id = serializers.UUIDField()
    turn = serializers.IntegerField(allow_null=True, help_text="Number of the turn. Null: created by the agent itself.")
    collection = serializers.CharField()
    key = serializers.CharField(help_text="Record key.")
    value = serializers.DictField(help_text="The record.")
    status = serializers.ChoiceField(
        RecordStatus.choices, help_text="pending: the request is repeated until the repository's server has the record."
    )
    uri = serializers.CharField(help_text="at:// URI of the record. Empty until it is created.")
    cid = serializers.CharField(help_text="Content identifier. Empty until the record is created.")
    created_at = serializers.DateTimeField(help_text="Time at which the record was stored here.")
    ended_at = serializers.DateTimeField(allow_null=True, help_text="Time at which it was created there, or given up.")
    attempts = serializers.IntegerField()
    error = serializers.CharField(help_text="Error of the last attempt, or empty.")


class RecordPageSerializer(serializers.Serializer):
    results = RecordSerializer(many=True)
    next = serializers.CharField(allow_null=True)


class RecordListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_records_list",
        summary="List AT Protocol records",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(RecordPageSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the records of the lease's turns, and those that its agent created, newest first."""
        page, next_url = paginate(AtprotoRecord.objects.filter(lease=pk), "created_at", request)
        return Response({"results": [serialize_record(row) for row in page], "next": next_url})


def serialize_record(row: AtprotoRecord) -> dict[str, Any]:
    return {
        "record_id": str(row.pk),
        "turn": row.turn_number,
        "collection": row.collection,
        "key": row.record_key,
        "value": row.value,
        "status": row.status,
        "uri": row.uri,
        "cid": row.cid,
        "created_at": format_timestamp(row.created_at),
        "ended_at": format_optional_timestamp(row.ended_at),
        "attempts": row.attempts,
        "error": omit_answers(row.error),
    }
