"""Chat history and audit log of a lease."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response
from rest_framework.serializers import Serializer

from leases.api.base import schema
from leases.api.base.fields import JsonField, JsonObjectField, StrictCharField
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import parse_limit
from leases.api.base.views import ApiRequest
from leases.api.stores.base import CURSOR_PARAMETER, LIMIT_PARAMETER, ORDER_PARAMETER, SORT_ORDERS, StoreApiView
from leases.errors import InvalidRequest
from sandboxes.db.clock import format_timestamp
from sandboxes.stores.events import Event, EventStore, parse_stamp
from sandboxes.stores.lease_stores import LeaseStores
from sandboxes.stores.limits import DEFAULT_LIMITS


class OpenDocumentSerializer(serializers.Serializer):
    """JSON object with some validated fields. Other fields are stored unchanged."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        super().to_internal_value(data)
        return dict(data)


class ChatMessageSerializer(OpenDocumentSerializer):
    """Further fields are stored unchanged."""

    role = StrictCharField(max_length=64, help_text="Role of the author, such as user, assistant or tool.")
    content = JsonField(help_text="Any JSON value.")


class AuditEntrySerializer(OpenDocumentSerializer):
    """Further fields are stored unchanged."""

    action = StrictCharField(max_length=200, help_text="Name of the action.")


class EventSerializer(serializers.Serializer):
    id = serializers.CharField()
    at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="API key that wrote the event.")


class ChatEventSerializer(EventSerializer):
    message = JsonObjectField(help_text="The document as sent.")


class AuditEventSerializer(EventSerializer):
    entry = JsonObjectField(help_text="The document as sent.")


CHAT_MESSAGE_SERIALIZER = ChatMessageSerializer()
AUDIT_ENTRY_SERIALIZER = AuditEntrySerializer()


class EventLogApiView(StoreApiView):
    """Base view of chat history and audit log."""

    max_body_bytes = DEFAULT_LIMITS.max_event_bytes
    request_serializer: Serializer

    def get_store(self, stores: LeaseStores) -> EventStore:
        raise NotImplementedError

    def serialize_event(self, event: Event) -> dict[str, Any]:
        raise NotImplementedError

    def list_events(self, request: ApiRequest) -> HttpResponse:
        order, cursor = request.GET.get("order", SORT_ORDERS[0]), request.GET.get("cursor")
        if order not in SORT_ORDERS:
            raise InvalidRequest("order", f"Must be one of {', '.join(SORT_ORDERS)}.")
        after = parse_stamp(cursor) if cursor else None
        if cursor and not after:
            raise InvalidRequest("cursor", "Not the id of an event.")
        store = self.get_store(self.open_for_reading())
        events, more = store.page(after=after, newest_first=order == "newest", limit=parse_limit(request))
        return self.build_page(events, more, self.serialize_event, "id")

    def get_event(self, event_id: str) -> HttpResponse:
        event = self.get_store(self.open_for_reading()).read(event_id)
        if event is None:
            raise NotFound("There is no such event.")
        return Response(self.serialize_event(event))

    def append_event(self) -> HttpResponse:
        document = self.validate_body(self.request_serializer)

        def act(run_id: UUID) -> StatusAndBody:
            store = self.get_store(self.open_for_writing())
            return 201, self.serialize_event(store.append(document, now=self.now, actor=self.actor))

        return self.execute_once(act)


class ChatApiView(EventLogApiView):
    request_serializer = CHAT_MESSAGE_SERIALIZER

    def get_store(self, stores: LeaseStores) -> EventStore:
        return stores.chat

    def serialize_event(self, event: Event) -> dict[str, Any]:
        return serialize_chat_event(event)


class AuditApiView(EventLogApiView):
    request_serializer = AUDIT_ENTRY_SERIALIZER

    def get_store(self, stores: LeaseStores) -> EventStore:
        return stores.audit

    def serialize_event(self, event: Event) -> dict[str, Any]:
        return serialize_audit_event(event)


class ChatListView(ChatApiView):
    @extend_schema(
        operation_id="leases_chat_list",
        summary="List chat messages",
        parameters=[ORDER_PARAMETER, CURSOR_PARAMETER, LIMIT_PARAMETER],
        responses=schema.build_responses(schema.build_page_serializer(ChatEventSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the chat history of a lease. The last 10000 messages are kept, at most 64 MiB."""
        return self.list_events(request)

    @extend_schema(
        operation_id="leases_chat_append",
        summary="Append a chat message",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=ChatMessageSerializer,
        responses=schema.build_responses(ChatEventSerializer, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Append a message of at most 256 KiB to the chat history."""
        return self.append_event()


class ChatMessageView(ChatApiView):
    @extend_schema(
        operation_id="leases_chat_get",
        summary="Get a chat message",
        responses=schema.build_responses(ChatEventSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID, event_id: str) -> HttpResponse:
        """Return one chat message."""
        return self.get_event(event_id)


class AuditListView(AuditApiView):
    @extend_schema(
        operation_id="leases_audit_list",
        summary="List audit entries",
        parameters=[ORDER_PARAMETER, CURSOR_PARAMETER, LIMIT_PARAMETER],
        responses=schema.build_responses(schema.build_page_serializer(AuditEventSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the audit log of a lease. The last 10000 entries are kept, at most 64 MiB."""
        return self.list_events(request)

    @extend_schema(
        operation_id="leases_audit_append",
        summary="Append an audit entry",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=AuditEntrySerializer,
        responses=schema.build_responses(AuditEventSerializer, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Append an entry of at most 256 KiB to the audit log. Entries cannot be changed."""
        return self.append_event()


class AuditEntryView(AuditApiView):
    @extend_schema(
        operation_id="leases_audit_get",
        summary="Get an audit entry",
        responses=schema.build_responses(AuditEventSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID, event_id: str) -> HttpResponse:
        """Return one audit entry."""
        return self.get_event(event_id)


def serialize_chat_event(event: Event) -> dict[str, Any]:
    return {"id": event.id, "at": format_timestamp(event.at), "actor": event.actor, "message": event.document}


def serialize_audit_event(event: Event) -> dict[str, Any]:
    return {"id": event.id, "at": format_timestamp(event.at), "actor": event.actor, "entry": event.document}
