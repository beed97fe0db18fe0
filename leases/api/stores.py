"""The stores of a lease, through its door: chat history, artifacts, audit log, session index.

They are written while the lease is active (410 afterwards), and read as long as they are kept: until LEASEHOLD_KEEP_STATE
after its end. Writing renews nothing."""

import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.exceptions import NotFound
from rest_framework.serializers import Serializer

from leases import leasing
from leases.api import request_body, schema
from leases.api import serializers_stores as show
from leases.api.idempotency import StatusAndBody
from leases.api.leases import AgentApiView
from leases.api.pagination import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE
from leases.errors import InvalidRequest
from sandboxes.stores import lease_stores
from sandboxes.stores.events import Event, EventStore, parse_stamp
from sandboxes.stores.lease_stores import LeaseStores
from sandboxes.stores.limits import DEFAULT_LIMITS, MEDIA_TYPE_PATTERN, NAME_PATTERN, NAME_RULES

CHAT_MESSAGE_SERIALIZER, AUDIT_ENTRY_SERIALIZER = show.ChatMessageSerializer(), show.AuditEntrySerializer()
SORT_ORDERS = ("newest", "oldest")
MAX_IN_MEMORY_BYTES = 1 << 20  # bytes of an artifact on its way; more is in a temporary file
ANY_MEDIA_TYPE = "*/*"

ORDER_PARAMETER = OpenApiParameter(
    "order", str, OpenApiParameter.QUERY, enum=SORT_ORDERS, description="What comes first; newest if it is not given."
)
CURSOR_PARAMETER = OpenApiParameter(
    "cursor",
    str,
    OpenApiParameter.QUERY,
    description="The id of an event: the page starts behind it. Follow `next`, or read on from the last event you have seen.",
)
LIMIT_PARAMETER = schema.PAGE_PARAMETERS[1]

T = TypeVar("T")


class StoreApiView(AgentApiView):
    def of(self, pk: UUID) -> LeaseStores:
        """The stores of a lease that the caller may see, for reading."""
        return lease_stores.open_stores(self.caller.lease(pk).agent_did, pk)

    def writable(self, pk: UUID) -> LeaseStores:
        """The same for writing: LeaseEnded when the lease is over."""
        return lease_stores.open_stores(leasing.require_active(pk, now=self.now).agent_did, pk)

    def listed(
        self, request: HttpRequest, found: Sequence[T], more: bool, shown: Callable[[T], dict[str, Any]], name: str
    ) -> HttpResponse:
        """One page; `name` is the field of what is shown that the next page starts behind."""
        results = [shown(one) for one in found]
        following = None
        if more and results:
            following = f"{request.path}?{urlencode({**request.GET.dict(), 'cursor': results[-1][name]})}"
        return JsonResponse({"results": results, "next": following})


# --- events -------------------------------------------------------------------------------------------------------


class EventLogApiView(StoreApiView):
    """What chat history and audit log have in common."""

    form: Serializer

    def log(self, of: LeaseStores) -> EventStore:
        raise NotImplementedError

    def serialize_event(self, event: Event) -> dict[str, Any]:
        raise NotImplementedError

    def some(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        order, cursor = request.GET.get("order", SORT_ORDERS[0]), request.GET.get("cursor")
        if order not in SORT_ORDERS:
            raise InvalidRequest("order", f"One of {', '.join(SORT_ORDERS)}.")
        behind = parse_stamp(cursor) if cursor else None
        if cursor and not behind:
            raise InvalidRequest("cursor", "Not the id of an event.")
        events = self.log(self.of(pk))
        found, more = events.page(after=behind, newest_first=order == "newest", limit=parse_limit(request))
        return self.listed(request, found, more, self.serialize_event, "id")

    def one(self, pk: UUID, event_id: str) -> HttpResponse:
        event = self.log(self.of(pk)).read(event_id)
        if event is None:
            raise NotFound("There is no such event.")
        return JsonResponse(self.serialize_event(event))

    def append(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        self.caller.lease(pk)
        body, said = self.read(request, self.form, DEFAULT_LIMITS.max_event_bytes)

        def act(run_id: UUID) -> StatusAndBody:
            return 201, self.serialize_event(self.log(self.writable(pk)).append(said, now=self.now, actor=self.actor))

        return self.once(request, act, body=body)


class ChatApiView(EventLogApiView):
    form = CHAT_MESSAGE_SERIALIZER

    def log(self, of: LeaseStores) -> EventStore:
        return of.chat

    def serialize_event(self, event: Event) -> dict[str, Any]:
        return show.serialize_chat_event(event)


class AuditApiView(EventLogApiView):
    form = AUDIT_ENTRY_SERIALIZER

    def log(self, of: LeaseStores) -> EventStore:
        return of.audit

    def serialize_event(self, event: Event) -> dict[str, Any]:
        return show.serialize_audit_event(event)


class ChatListView(ChatApiView):
    @extend_schema(
        operation_id="leases_chat_list",
        parameters=[ORDER_PARAMETER, CURSOR_PARAMETER, LIMIT_PARAMETER],
        responses=schema.build_responses(schema.build_page_serializer(show.ChatEventSerializer), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The chat history of a lease. The last 10000 messages stay, as far as they fit into 64 MiB."""
        return self.some(request, pk)

    @extend_schema(
        operation_id="leases_chat_append",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=show.ChatMessageSerializer,
        responses=schema.build_responses(show.ChatEventSerializer, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Append a message to the chat history; at most 256 KiB."""
        return self.append(request, pk)


class ChatMessageView(ChatApiView):
    @extend_schema(operation_id="leases_chat_get", responses=schema.build_responses(show.ChatEventSerializer, 404))
    def get(self, request: HttpRequest, pk: UUID, event_id: str) -> HttpResponse:
        return self.one(pk, event_id)


class AuditListView(AuditApiView):
    @extend_schema(
        operation_id="leases_audit_list",
        parameters=[ORDER_PARAMETER, CURSOR_PARAMETER, LIMIT_PARAMETER],
        responses=schema.build_responses(schema.build_page_serializer(show.AuditEventSerializer), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The audit log of a lease. The last 10000 entries stay, as far as they fit into 64 MiB."""
        return self.some(request, pk)

    @extend_schema(
        operation_id="leases_audit_append",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=show.AuditEntrySerializer,
        responses=schema.build_responses(show.AuditEventSerializer, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Append an entry to the audit log; at most 256 KiB. Entries are never changed."""
        return self.append(request, pk)


class AuditEntryView(AuditApiView):
    @extend_schema(operation_id="leases_audit_get", responses=schema.build_responses(show.AuditEventSerializer, 404))
    def get(self, request: HttpRequest, pk: UUID, event_id: str) -> HttpResponse:
        return self.one(pk, event_id)


# --- artifacts ----------------------------------------------------------------------------------------------------


class ArtifactListView(StoreApiView):
    @extend_schema(
        operation_id="leases_artifacts_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(show.ArtifactSerializer), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The artifacts of a lease by name. The 1000 newest stay, as far as they fit into 1 GiB."""
        found, more = self.of(pk).artifacts.page(after=parse_name_cursor(request), limit=parse_limit(request))
        return self.listed(request, found, more, show.serialize_artifact, "name")


class ArtifactView(StoreApiView):
    @extend_schema(
        operation_id="leases_artifacts_get",
        responses={(200, ANY_MEDIA_TYPE): OpenApiTypes.BINARY} | schema.build_responses(None, 404, ok=()),
    )
    def get(self, request: HttpRequest, pk: UUID, name: str) -> FileResponse:
        """The content of one artifact, with the media type that it was stored with. Its SHA-256 is the ETag."""
        content = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY_BYTES)  # noqa: SIM115 - the response closes it
        try:
            artifact = self.of(pk).artifacts.fetch(validate_name(name), content)  # type: ignore[arg-type]
            if artifact is None:
                raise NotFound("There is no such artifact.")
        except BaseException:
            content.close()
            raise
        headers = {"X-Content-Type-Options": "nosniff", "ETag": f'"{artifact.sha256}"'}
        return FileResponse(content, as_attachment=True, filename=name, content_type=artifact.media_type, headers=headers)

    @extend_schema(
        operation_id="leases_artifacts_put",
        request={ANY_MEDIA_TYPE: OpenApiTypes.BINARY},
        responses=schema.build_responses(show.ArtifactSerializer, 404, 410, 411, 413, ok=(200, 201)),
    )
    def put(self, request: HttpRequest, pk: UUID, name: str) -> HttpResponse:
        """Store one artifact (201), or replace the one of that name (200). At most 64 MiB."""
        self.caller.lease(pk)
        of, kind = self.writable(pk), request.META.get("CONTENT_TYPE") or schema.OCTET_STREAM
        if not re.fullmatch(MEDIA_TYPE_PATTERN, kind, re.ASCII):
            raise InvalidRequest("Content-Type", "Not a media type.")
        with tempfile.SpooledTemporaryFile(MAX_IN_MEMORY_BYTES) as content:
            for chunk in request_body.iter_body(request, DEFAULT_LIMITS.max_artifact_bytes):
                content.write(chunk)
            content.seek(0)
            stored, replaced = of.artifacts.put(
                validate_name(name),
                content,  # type: ignore[arg-type]
                media_type=kind,
                now=self.now,
                actor=self.actor,
            )
        return JsonResponse(show.serialize_artifact(stored), status=200 if replaced else 201)

    @extend_schema(operation_id="leases_artifacts_delete", responses=schema.build_responses(None, 404, 410, ok=(204,)))
    def delete(self, request: HttpRequest, pk: UUID, name: str) -> HttpResponse:
        """Remove one artifact."""
        self.caller.lease(pk)
        if not self.writable(pk).artifacts.remove(validate_name(name), now=self.now):
            raise NotFound("There is no such artifact.")
        return HttpResponse(status=204)


# --- sessions -----------------------------------------------------------------------------------------------------


class SessionListView(StoreApiView):
    @extend_schema(
        operation_id="leases_sessions_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(show.SessionSerializer), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The session index of a lease by id. The 1000 that were written last stay."""
        found, more = self.of(pk).sessions.page(after=parse_name_cursor(request), limit=parse_limit(request))
        return self.listed(request, found, more, show.serialize_session, "session_id")


class SessionView(StoreApiView):
    @extend_schema(operation_id="leases_sessions_get", responses=schema.build_responses(show.SessionSerializer, 404))
    def get(self, request: HttpRequest, pk: UUID, session_id: str) -> HttpResponse:
        session = self.of(pk).sessions.read(validate_name(session_id, "session_id"))
        if session is None:
            raise NotFound("There is no such session.")
        return JsonResponse(show.serialize_session(session))

    @extend_schema(
        operation_id="leases_sessions_put",
        request={"application/json": OpenApiTypes.OBJECT},
        responses=schema.build_responses(show.SessionSerializer, 404, 410, 413, 415),
    )
    def put(self, request: HttpRequest, pk: UUID, session_id: str) -> HttpResponse:
        """Make or replace the document of one session; at most 64 KiB."""
        self.caller.lease(pk)
        said = request_body.parse_json_object(request, request_body.read_body(request, DEFAULT_LIMITS.max_session_bytes))
        sessions = self.writable(pk).sessions
        session = sessions.put(validate_name(session_id, "session_id"), said, now=self.now, actor=self.actor)
        return JsonResponse(show.serialize_session(session))


# --- what requests say --------------------------------------------------------------------------------------------


def validate_name(name: str, field: str = "name") -> str:
    if not re.fullmatch(NAME_PATTERN, name, re.ASCII):
        raise InvalidRequest(field, f"Not {NAME_RULES}.")
    return name


def parse_name_cursor(request: HttpRequest) -> str:
    cursor = request.GET.get("cursor", "")
    if cursor and not re.fullmatch(NAME_PATTERN, cursor, re.ASCII):
        raise InvalidRequest("cursor", "Not a cursor that this server gave out.")
    return cursor


def parse_limit(request: HttpRequest) -> int:
    asked = request.GET.get("limit", str(DEFAULT_PAGE_SIZE))
    limit = int(asked) if re.fullmatch("[0-9]{1,3}", asked) else 0
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise InvalidRequest("limit", f"1 to {MAX_PAGE_SIZE}.")
    return limit
