"""Chat history and audit log of a lease."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response
from rest_framework.serializers import Serializer

from leases.api import schema
from leases.api.fields import JsonField, JsonObjectField, StrictCharField
from leases.api.idempotency import StatusAndBody
from leases.api.stores.base import CURSOR_PARAMETER, LIMIT_PARAMETER, ORDER_PARAMETER, SORT_ORDERS, StoreApiView, parse_limit
from leases.api.views import ApiRequest
from leases.errors import InvalidRequest
from sandboxes.db.clock import format_timestamp
from sandboxes.stores.events import Event, EventStore, parse_stamp
from sandboxes.stores.lease_stores import LeaseStores
from sandboxes.stores.limits import DEFAULT_LIMITS


class OpenDocumentSerializer(serializers.Serializer):
    """A document with some fields that are checked; what else is in it is kept as it is."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        super().to_internal_value(data)
        return dict(data)


class ChatMessageSerializer(OpenDocumentSerializer):
    """Whatever else is in it is kept, too."""

    role = StrictCharField(max_length=64, help_text="Who speaks: user, assistant, tool, …")
    content = JsonField(help_text="Any JSON value.")


class AuditEntrySerializer(OpenDocumentSerializer):
    """Whatever else is in it is kept, too."""

    action = StrictCharField(max_length=200, help_text="What was done.")


class EventSerializer(serializers.Serializer):
    id = serializers.CharField()
    at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="Whose key wrote it.")


class ChatEventSerializer(EventSerializer):
    message = JsonObjectField(help_text="As it was sent.")


class AuditEventSerializer(EventSerializer):
    entry = JsonObjectField(help_text="As it was sent.")


CHAT_MESSAGE_SERIALIZER = ChatMessageSerializer()


AUDIT_ENTRY_SERIALIZER = AuditEntrySerializer()


class EventLogApiView(StoreApiView):
    """What chat history and audit log have in common."""

    max_body_bytes = DEFAULT_LIMITS.max_event_bytes
    form: Serializer

    def log(self, of: LeaseStores) -> EventStore:
        raise NotImplementedError

    def serialize_event(self, event: Event) -> dict[str, Any]:
        raise NotImplementedError

    def some(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        order, cursor = request.GET.get("order", SORT_ORDERS[0]), request.GET.get("cursor")
        if order not in SORT_ORDERS:
            raise InvalidRequest("order", f"One of {', '.join(SORT_ORDERS)}.")
        behind = parse_stamp(cursor) if cursor else None
        if cursor and not behind:
            raise InvalidRequest("cursor", "Not the id of an event.")
        events = self.log(self.of(pk))
        found, more = events.page(behind=behind, newest_first=order == "newest", limit=parse_limit(request))
        return self.listed(request, found, more, self.serialize_event, "id")

    def one(self, pk: UUID, event_id: str) -> HttpResponse:
        event = self.log(self.of(pk)).read(event_id)
        if event is None:
            raise NotFound("There is no such event.")
        return Response(self.serialize_event(event))

    def append(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        said = self.validate_body(self.form)

        def act(run_id: UUID) -> StatusAndBody:
            return 201, self.serialize_event(self.log(self.writable(pk)).append(said, now=self.now, actor=self.actor))

        return self.execute_once(act)


class ChatApiView(EventLogApiView):
    form = CHAT_MESSAGE_SERIALIZER

    def log(self, of: LeaseStores) -> EventStore:
        return of.chat

    def serialize_event(self, event: Event) -> dict[str, Any]:
        return serialize_chat_event(event)


class AuditApiView(EventLogApiView):
    form = AUDIT_ENTRY_SERIALIZER

    def log(self, of: LeaseStores) -> EventStore:
        return of.audit

    def serialize_event(self, event: Event) -> dict[str, Any]:
        return serialize_audit_event(event)


class ChatListView(ChatApiView):
    @extend_schema(
        operation_id="leases_chat_list",
        parameters=[ORDER_PARAMETER, CURSOR_PARAMETER, LIMIT_PARAMETER],
        responses=schema.build_responses(schema.build_page_serializer(ChatEventSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """The chat history of a lease. The last 10000 messages stay, as far as they fit into 64 MiB."""
        return self.some(request, pk)

    @extend_schema(
        operation_id="leases_chat_append",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=ChatMessageSerializer,
        responses=schema.build_responses(ChatEventSerializer, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Append a message to the chat history; at most 256 KiB."""
        return self.append(request, pk)


class ChatMessageView(ChatApiView):
    @extend_schema(operation_id="leases_chat_get", responses=schema.build_responses(ChatEventSerializer, 404))
    def get(self, request: ApiRequest, pk: UUID, event_id: str) -> HttpResponse:
        return self.one(pk, event_id)


class AuditListView(AuditApiView):
    @extend_schema(
        operation_id="leases_audit_list",
        parameters=[ORDER_PARAMETER, CURSOR_PARAMETER, LIMIT_PARAMETER],
        responses=schema.build_responses(schema.build_page_serializer(AuditEventSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """The audit log of a lease. The last 10000 entries stay, as far as they fit into 64 MiB."""
        return self.some(request, pk)

    @extend_schema(
        operation_id="leases_audit_append",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=AuditEntrySerializer,
        responses=schema.build_responses(AuditEventSerializer, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Append an entry to the audit log; at most 256 KiB. Entries are never changed."""
        return self.append(request, pk)


class AuditEntryView(AuditApiView):
    @extend_schema(operation_id="leases_audit_get", responses=schema.build_responses(AuditEventSerializer, 404))
    def get(self, request: ApiRequest, pk: UUID, event_id: str) -> HttpResponse:
        return self.one(pk, event_id)


def serialize_chat_event(event: Event) -> dict[str, Any]:
    return {"id": event.id, "at": format_timestamp(event.at), "actor": event.actor, "message": event.said}


def serialize_audit_event(event: Event) -> dict[str, Any]:
    return {"id": event.id, "at": format_timestamp(event.at), "actor": event.actor, "entry": event.said}
