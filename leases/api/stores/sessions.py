"""Session index of a lease."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.fields import JsonObjectField
from leases.api.base.pagination import parse_limit
from leases.api.base.views import ApiRequest
from leases.api.stores.base import StoreApiView, parse_name_cursor, validate_name
from sandboxes.db.clock import format_timestamp
from sandboxes.stores.lease_stores import Session
from sandboxes.stores.limits import DEFAULT_LIMITS


class SessionSerializer(serializers.Serializer):
    session_id = serializers.CharField()
    updated_at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="API key that last wrote the session.")
    session = JsonObjectField(help_text="The document as sent.")


class SessionListView(StoreApiView):
    @extend_schema(
        operation_id="leases_sessions_list",
        summary="List sessions",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(SessionSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the session index of a lease, by id. The 1000 most recently written sessions are kept."""
        sessions, more = self.open_for_reading().sessions.page(after=parse_name_cursor(request), limit=parse_limit(request))
        return self.build_page(sessions, more, serialize_session, "session_id")


class SessionView(StoreApiView):
    max_body_bytes = DEFAULT_LIMITS.max_session_bytes

    @extend_schema(
        operation_id="leases_sessions_get", summary="Get a session", responses=schema.build_responses(SessionSerializer, 404)
    )
    def get(self, request: ApiRequest, pk: UUID, session_id: str) -> HttpResponse:
        """Return one session."""
        session = self.open_for_reading().sessions.read(validate_name(session_id, "session_id"))
        if session is None:
            raise NotFound("There is no such session.")
        return Response(serialize_session(session))

    @extend_schema(
        operation_id="leases_sessions_put",
        summary="Store a session",
        request={"application/json": OpenApiTypes.OBJECT},
        responses=schema.build_responses(SessionSerializer, 404, 410, 413, 415),
    )
    def put(self, request: ApiRequest, pk: UUID, session_id: str) -> HttpResponse:
        """Create or replace one session, a JSON object of at most 64 KiB."""
        self.require_active()
        document = self.read_body()
        sessions = self.open_for_writing().sessions
        session = sessions.put(validate_name(session_id, "session_id"), document, now=self.now, actor=self.actor)
        return Response(serialize_session(session))


def serialize_session(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "updated_at": format_timestamp(session.at),
        "actor": session.actor,
        "session": session.document,
    }
