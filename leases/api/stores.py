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
from leases.api.idempotency import Answer
from leases.api.leases import Door
from leases.api.pagination import LONGEST, USUAL
from leases.errors import Invalid
from sandboxes.stores import lease_stores
from sandboxes.stores.events import Event, Events, stamp_of
from sandboxes.stores.lease_stores import Stores
from sandboxes.stores.limits import LIMITS, MEDIA_TYPE, NAME, NAME_ACCEPTS

CHAT, AUDIT = show.ChatMessage(), show.AuditEntry()
ORDERS = ("newest", "oldest")
IN_MEMORY = 1 << 20  # bytes of an artifact on its way; more is in a temporary file
ANY = "*/*"

ORDER = OpenApiParameter(
    "order", str, OpenApiParameter.QUERY, enum=ORDERS, description="What comes first; newest if it is not given."
)
BEHIND = OpenApiParameter(
    "cursor",
    str,
    OpenApiParameter.QUERY,
    description="The id of an event: the page starts behind it. Follow `next`, or read on from the last event you have seen.",
)
LIMIT = schema.PAGE[1]

T = TypeVar("T")


class StoreDoor(Door):
    def of(self, pk: UUID) -> Stores:
        """The stores of a lease that the caller may see, for reading."""
        return lease_stores.of(self.caller.lease(pk).agent_did, pk)

    def writable(self, pk: UUID) -> Stores:
        """The same for writing: LeaseEnded when the lease is over."""
        return lease_stores.of(leasing.require(pk, now=self.now).agent_did, pk)

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


class EventsDoor(StoreDoor):
    """What chat history and audit log have in common."""

    form: Serializer

    def log(self, of: Stores) -> Events:
        raise NotImplementedError

    def displayed(self, event: Event) -> dict[str, Any]:
        raise NotImplementedError

    def some(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        order, cursor = request.GET.get("order", ORDERS[0]), request.GET.get("cursor")
        if order not in ORDERS:
            raise Invalid("order", f"One of {', '.join(ORDERS)}.")
        behind = stamp_of(cursor) if cursor else None
        if cursor and not behind:
            raise Invalid("cursor", "Not the id of an event.")
        events = self.log(self.of(pk))
        found, more = events.page(behind=behind, newest_first=order == "newest", limit=limit_of(request))
        return self.listed(request, found, more, self.displayed, "id")

    def one(self, pk: UUID, event_id: str) -> HttpResponse:
        event = self.log(self.of(pk)).read(event_id)
        if event is None:
            raise NotFound("There is no such event.")
        return JsonResponse(self.displayed(event))

    def append(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        self.caller.lease(pk)
        body, said = self.read(request, self.form, LIMITS.event_bytes)

        def act(run_id: UUID) -> Answer:
            return 201, self.displayed(self.log(self.writable(pk)).append(said, now=self.now, actor=self.actor))

        return self.once(request, act, body=body)


class ChatDoor(EventsDoor):
    form = CHAT

    def log(self, of: Stores) -> Events:
        return of.chat

    def displayed(self, event: Event) -> dict[str, Any]:
        return show.chat_shown(event)


class AuditDoor(EventsDoor):
    form = AUDIT

    def log(self, of: Stores) -> Events:
        return of.audit

    def displayed(self, event: Event) -> dict[str, Any]:
        return show.audit_shown(event)


class Chat(ChatDoor):
    @extend_schema(
        operation_id="leases_chat_list",
        parameters=[ORDER, BEHIND, LIMIT],
        responses=schema.answers(schema.page_of(show.ChatShown), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The chat history of a lease. The last 10000 messages stay, as far as they fit into 64 MiB."""
        return self.some(request, pk)

    @extend_schema(
        operation_id="leases_chat_append",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=show.ChatMessage,
        responses=schema.answers(show.ChatShown, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Append a message to the chat history; at most 256 KiB."""
        return self.append(request, pk)


class OneMessage(ChatDoor):
    @extend_schema(operation_id="leases_chat_get", responses=schema.answers(show.ChatShown, 404))
    def get(self, request: HttpRequest, pk: UUID, event_id: str) -> HttpResponse:
        return self.one(pk, event_id)


class Audit(AuditDoor):
    @extend_schema(
        operation_id="leases_audit_list",
        parameters=[ORDER, BEHIND, LIMIT],
        responses=schema.answers(schema.page_of(show.AuditShown), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The audit log of a lease. The last 10000 entries stay, as far as they fit into 64 MiB."""
        return self.some(request, pk)

    @extend_schema(
        operation_id="leases_audit_append",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=show.AuditEntry,
        responses=schema.answers(show.AuditShown, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Append an entry to the audit log; at most 256 KiB. Entries are never changed."""
        return self.append(request, pk)


class OneEntry(AuditDoor):
    @extend_schema(operation_id="leases_audit_get", responses=schema.answers(show.AuditShown, 404))
    def get(self, request: HttpRequest, pk: UUID, event_id: str) -> HttpResponse:
        return self.one(pk, event_id)


# --- artifacts ----------------------------------------------------------------------------------------------------


class ArtifactList(StoreDoor):
    @extend_schema(
        operation_id="leases_artifacts_list",
        parameters=schema.PAGE,
        responses=schema.answers(schema.page_of(show.ArtifactShown), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The artifacts of a lease by name. The 1000 newest stay, as far as they fit into 1 GiB."""
        found, more = self.of(pk).artifacts.page(behind=name_in_cursor(request), limit=limit_of(request))
        return self.listed(request, found, more, show.artifact_shown, "name")


class OneArtifact(StoreDoor):
    @extend_schema(
        operation_id="leases_artifacts_get",
        responses={(200, ANY): OpenApiTypes.BINARY} | schema.answers(None, 404, ok=()),
    )
    def get(self, request: HttpRequest, pk: UUID, name: str) -> FileResponse:
        """The content of one artifact, with the media type that it was stored with. Its SHA-256 is the ETag."""
        content = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 - the response closes it
        try:
            artifact = self.of(pk).artifacts.fetch(named(name), content)  # type: ignore[arg-type]
            if artifact is None:
                raise NotFound("There is no such artifact.")
        except BaseException:
            content.close()
            raise
        headers = {"X-Content-Type-Options": "nosniff", "ETag": f'"{artifact.sha256}"'}
        return FileResponse(content, as_attachment=True, filename=name, content_type=artifact.media_type, headers=headers)

    @extend_schema(
        operation_id="leases_artifacts_put",
        request={ANY: OpenApiTypes.BINARY},
        responses=schema.answers(show.ArtifactShown, 404, 410, 411, 413, ok=(200, 201)),
    )
    def put(self, request: HttpRequest, pk: UUID, name: str) -> HttpResponse:
        """Store one artifact (201), or replace the one of that name (200). At most 64 MiB."""
        self.caller.lease(pk)
        of, kind = self.writable(pk), request.META.get("CONTENT_TYPE") or schema.OCTETS
        if not re.fullmatch(MEDIA_TYPE, kind, re.ASCII):
            raise Invalid("Content-Type", "Not a media type.")
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as content:
            for chunk in request_body.chunks(request, LIMITS.artifact_bytes):
                content.write(chunk)
            content.seek(0)
            stored, replaced = of.artifacts.put(
                named(name),
                content,  # type: ignore[arg-type]
                media_type=kind,
                now=self.now,
                actor=self.actor,
            )
        return JsonResponse(show.artifact_shown(stored), status=200 if replaced else 201)

    @extend_schema(operation_id="leases_artifacts_delete", responses=schema.answers(None, 404, 410, ok=(204,)))
    def delete(self, request: HttpRequest, pk: UUID, name: str) -> HttpResponse:
        """Remove one artifact."""
        self.caller.lease(pk)
        if not self.writable(pk).artifacts.remove(named(name), now=self.now):
            raise NotFound("There is no such artifact.")
        return HttpResponse(status=204)


# --- sessions -----------------------------------------------------------------------------------------------------


class SessionList(StoreDoor):
    @extend_schema(
        operation_id="leases_sessions_list",
        parameters=schema.PAGE,
        responses=schema.answers(schema.page_of(show.SessionShown), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The session index of a lease by id. The 1000 that were written last stay."""
        found, more = self.of(pk).sessions.page(behind=name_in_cursor(request), limit=limit_of(request))
        return self.listed(request, found, more, show.session_shown, "session_id")


class OneSession(StoreDoor):
    @extend_schema(operation_id="leases_sessions_get", responses=schema.answers(show.SessionShown, 404))
    def get(self, request: HttpRequest, pk: UUID, session_id: str) -> HttpResponse:
        session = self.of(pk).sessions.read(named(session_id, "session_id"))
        if session is None:
            raise NotFound("There is no such session.")
        return JsonResponse(show.session_shown(session))

    @extend_schema(
        operation_id="leases_sessions_put",
        request={"application/json": OpenApiTypes.OBJECT},
        responses=schema.answers(show.SessionShown, 404, 410, 413, 415),
    )
    def put(self, request: HttpRequest, pk: UUID, session_id: str) -> HttpResponse:
        """Make or replace the document of one session; at most 64 KiB."""
        self.caller.lease(pk)
        said = request_body.parse(request, request_body.read(request, LIMITS.session_bytes))
        sessions = self.writable(pk).sessions
        session = sessions.put(named(session_id, "session_id"), said, now=self.now, actor=self.actor)
        return JsonResponse(show.session_shown(session))


# --- what requests say --------------------------------------------------------------------------------------------


def named(name: str, field: str = "name") -> str:
    if not re.fullmatch(NAME, name, re.ASCII):
        raise Invalid(field, f"Not {NAME_ACCEPTS}.")
    return name


def name_in_cursor(request: HttpRequest) -> str:
    cursor = request.GET.get("cursor", "")
    if cursor and not re.fullmatch(NAME, cursor, re.ASCII):
        raise Invalid("cursor", "Not a cursor that this server gave out.")
    return cursor


def limit_of(request: HttpRequest) -> int:
    asked = request.GET.get("limit", str(USUAL))
    limit = int(asked) if re.fullmatch("[0-9]{1,3}", asked) else 0
    if not 1 <= limit <= LONGEST:
        raise Invalid("limit", f"1 to {LONGEST}.")
    return limit
