"""Events of the key's agents as server-sent events."""

from collections.abc import Collection, Generator
from uuid import UUID

from django.db import Error as DatabaseError
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema

from billing.budgets.disclosure import Disclosure, get_disclosure
from leases.api.base import schema
from leases.api.base.renderers import encode_json
from leases.api.base.views import ApiRequest, ApiView
from leases.api.streams import EVENT_STREAM, LAST_EVENT_PARAMETER, RECONNECT, EventStreamResponse, StreamEvents
from leases.errors import EventNotFound, InvalidRequest
from leases.grants import issuers
from leases.grants.issuers import Right
from leases.models import AgentKey, KeyScope
from sandboxes.db import database_time
from sandboxes.models.webhooks import SUBSCRIBABLE_EVENT_TYPES, Event, EventType
from sandboxes.streams import rows
from sandboxes.streams.events import EventReader
from sandboxes.streams.reader import KeepAlive
from sandboxes.streams.registry import OPEN_STREAMS, StreamSlot
from sandboxes.webhooks import delivery, outbox

FIRST_EVENT_ID = "0"  # position before the oldest event
TYPE_PARAMETER = OpenApiParameter(
    "type",
    str,
    OpenApiParameter.QUERY,
    description=f"Event types, separated by commas. Default: all. Types: {', '.join(SUBSCRIBABLE_EVENT_TYPES)}.",
)
DESCRIPTION = """Events of the agents of the key in an order that never changes; with an operator's key of all agents. The \
first event is `start`. Each further one has the type of the event as its name, and the body that webhooks receive. Without \
`Last-Event-ID` the stream begins with the next event; with `0` at the oldest event that is retained. An id that is not \
retained any more is answered with 410. The stream ends when the key is revoked, expires or loses the scope."""


class EventStreamView(ApiView):
    @extend_schema(
        operation_id="events_stream",
        summary="Stream events",
        description=DESCRIPTION,
        parameters=[TYPE_PARAMETER, LAST_EVENT_PARAMETER],
        responses={(200, EVENT_STREAM): OpenApiTypes.STR} | schema.build_responses(None, 410, 429, ok=()),
    )
    def get(self, request: ApiRequest) -> HttpResponseBase:
        types = parse_types(request.GET.get("type", ""))
        last_id = request.headers.get("Last-Event-ID", "")
        newest = outbox.assign_positions(now=self.now)
        position = find_position(last_id) if last_id else newest
        slot = OPEN_STREAMS.open(UUID(int=self.caller.key.pk), owner="This API key")
        return EventStreamResponse(EventStream(self.caller.key, self.right, types, last_id, position, slot))


class EventStream(StreamEvents):
    """Events that a key may read, after a position. The key is read again before each event and keep-alive."""

    def __init__(
        self, key: AgentKey, right: Right, types: Collection[str], last_id: str, position: int, slot: StreamSlot
    ) -> None:
        self._key, self._right, self._types = key, right, types
        self._position, self._events_reader = position, EventReader(position, slot)
        self._id = last_id  # of the last event that was looked at, also if the key may not read it
        super().__init__(self._events_reader, slot, right, is_resumed=bool(last_id))

    def _encode_all(self, *, is_resumed: bool) -> Generator[bytes, None, None]:
        if is_resumed:
            yield RECONNECT
        else:
            self._id = rows.call(_find_id, self._position)
            yield RECONNECT + self._encode("start", encode_json({"types": [*self._types]}))
        for item in self._events_reader.read():
            key = self._load_key()
            if key is None:
                return
            if isinstance(item, KeepAlive):
                yield b"id: %s\n: keep-alive\n\n" % self._id.encode()
                continue
            for event in item:
                self._id = str(event.pk)
                if event.kind in self._types and is_visible(event, key):
                    yield self._encode(event.kind, delivery.build_body(event))

    def _encode(self, name: str, body: bytes) -> bytes:
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (self._id.encode(), name.encode(), body)

    def _load_key(self) -> AgentKey | None:
        """Return the present row of the key, None if it is not valid any more; the last known one without the database."""
        try:
            key = rows.call(_find_key, self._right)
        except DatabaseError:
            return self._key
        self._key = key or self._key
        return key


def parse_types(text: str) -> list[str]:
    """Return the event types of a filter, all if it is empty. Raise InvalidRequest."""
    types = list(dict.fromkeys(text.split(","))) if text else SUBSCRIBABLE_EVENT_TYPES
    for name in types:
        if name not in SUBSCRIBABLE_EVENT_TYPES:
            raise InvalidRequest("type", f"{name[:80]!r} is not one of {', '.join(SUBSCRIBABLE_EVENT_TYPES)}.")
    return types


def find_position(event_id: str) -> int:
    """Return the position of an event. Raise InvalidRequest for a malformed id, EventNotFound if the event is not retained."""
    if event_id == FIRST_EVENT_ID:
        return 0
    try:
        pk = UUID(event_id)
    except ValueError:
        raise InvalidRequest("Last-Event-ID", "Not the id of an event of a stream.") from None
    position = Event.objects.filter(pk=pk).values_list("position", flat=True).first()
    if position is None:
        raise EventNotFound()
    return position


def is_visible(event: Event, key: AgentKey) -> bool:
    """Return whether a key may read an event: as in the HTTP API, those of its agents, and figures of budgets of its own."""
    payload = event.payload
    if event.kind in (EventType.BUDGET_WARNING, EventType.BUDGET_EXHAUSTED):
        access = {"operator": key.operator, "dids": key.dids, "key_id": str(key.pk)}
        disclosure = get_disclosure(payload["scope"], payload["subject"], **access)
        return KeyScope.COSTS in key.scopes and disclosure == Disclosure.SPENDING
    if event.kind in (EventType.SANDBOX_QUARANTINED, EventType.TEST):
        return key.operator and event.kind != EventType.TEST
    return key.operator or payload.get("agent_did") in key.dids


def _find_id(position: int) -> str:
    pk = Event.objects.filter(position=position).values_list("pk", flat=True).first()
    return str(pk) if pk else FIRST_EVENT_ID


def _find_key(right: Right) -> AgentKey | None:
    return issuers.find_key(right, now=database_time.now())
