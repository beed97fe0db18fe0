"""Timeline of a lease: its grant, its end, and the pools that were passed over for its sandboxes."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.models import LeaseEvent
from sandboxes.db.clock import format_timestamp
from sandboxes.models import SkipReason
from sandboxes.redaction.texts import omit_answers


class LeaseEventSerializer(serializers.Serializer):
    at = serializers.DateTimeField()
    kind = serializers.CharField(help_text="Such as granted, ended, destroyed, snapshot, restored, forked or pool_skipped.")
    detail = serializers.CharField(help_text="Text, or empty.")
    pool = serializers.CharField(allow_null=True, help_text="pool_skipped: pool in which no sandbox was started.")
    skip_reason = serializers.ChoiceField(
        SkipReason.choices, allow_null=True, help_text="pool_skipped: reason for which none was started."
    )


class LeaseEventPageSerializer(serializers.Serializer):
    results = LeaseEventSerializer(many=True)
    next = serializers.CharField(allow_null=True)


class LeaseTimelineView(LeaseApiView):
    @extend_schema(
        operation_id="leases_timeline_list",
        summary="List the timeline of a lease",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(LeaseEventPageSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the events of the lease, newest first. They are kept after its end."""
        events = LeaseEvent.objects.filter(lease=pk).select_related("pool")
        page, next_url = paginate(events, "at", request)
        return Response({"results": [serialize_event(row) for row in page], "next": next_url})


def serialize_event(row: LeaseEvent) -> dict[str, Any]:
    return {
        "at": format_timestamp(row.at),
        "kind": row.kind,
        "detail": omit_answers(row.reason),
        "pool": row.pool.name if row.pool else None,
        "skip_reason": row.skip_reason or None,
    }
