"""Output of commands as server-sent events (text/event-stream)."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, Protocol, Self
from uuid import UUID

from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.exceptions import NotFound

from leases.api.base import schema
from leases.api.base.fields import encode_output, parse_encoding
from leases.api.base.renderers import encode_json
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.api.command_threads import CommandThread
from leases.api.runs import EXEC_SERIALIZER, ExecSerializer, ExecView
from leases.errors import InvalidRequest, RunFailed
from leases.grants.issuers import Right
from leases.grants.stream_watch import STREAM_WATCH
from sandboxes.failed_by import classify_run
from sandboxes.models import Run
from sandboxes.providers import get_provider
from sandboxes.redaction.texts import omit_answers
from sandboxes.streams import rows
from sandboxes.streams.reader import Ended, Gap, KeepAlive, Output, Position, RunReader, StreamItem
from sandboxes.streams.registry import OPEN_STREAMS, StreamSlot

EVENT_STREAM = "text/event-stream"
EVENT_ID_PATTERN = r"([0-9]{1,15})-([0-9]{1,15})(-end)?"  # bytes of stdout and stderr up to and including the event
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx would collect events in a buffer
RECONNECT = b"retry: 1000\n\n"  # milliseconds
LAST_EVENT_PARAMETER = OpenApiParameter(
    "Last-Event-ID",
    str,
    OpenApiParameter.HEADER,
    description="Id of the last event received: the stream continues after it. Default: from the beginning.",
)
DESCRIPTION = """Events: `start` (run_id, encoding, live), `stdout` and `stderr` (data, offset), `gap` (stream, lost_bytes: \
output that is not available any more), and at the end `exit` (run_id, exit_code, timed_out, oom, truncated, duration_seconds, \
outcome, failed_by, note) once the result is recorded, or `error` (a problem document). A stream that ends without `exit` or \
`error` was interrupted: continue it with GET /leases/{id}/runs/{run_id}/stream and `Last-Event-ID`. A stream is also \
interrupted when its API key is revoked, expires, or loses the scope or the agent."""


class EventStreamResponse(StreamingHttpResponse):
    """Response with the events of a stream. The web server sends it from a thread of its own (controlplane.webserver)."""

    def __init__(self, events: "EventIterator") -> None:
        super().__init__(events, content_type=EVENT_STREAM, headers=HEADERS)


class Closable(Protocol):
    """Reader that holds resources until it is closed."""

    def close(self) -> None: ...


class EventIterator:
    """Iterator over the encoded events of a stream, which ends with the right that the stream uses.

    `close` releases its slot, also if nothing was read."""

    def __init__(self, slot: StreamSlot, right: Right, events: Generator[bytes, None, None]) -> None:
        self._slot, self._events = slot, events
        STREAM_WATCH.add(slot, right)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        return next(self._events)

    def close(self) -> None:
        self._events.close()
        STREAM_WATCH.remove(self._slot)
        self._slot.release()
        rows.close_if_idle()


class StreamEvents(EventIterator, ABC):
    """Events from a reader, which is closed with them."""

    def __init__(self, reader: Closable, slot: StreamSlot, right: Right, *, is_resumed: bool) -> None:
        self._closable = reader
        super().__init__(slot, right, self._encode_all(is_resumed=is_resumed))

    @abstractmethod
    def _encode_all(self, *, is_resumed: bool) -> Generator[bytes, None, None]:
        """Encode the events: from the beginning, or those after the client's position."""

    def close(self) -> None:
        self._events.close()
        self._closable.close()
        super().close()


class RunEvents(StreamEvents):
    """Events of a run."""

    def __init__(self, view: LeaseApiView, run: Run, position: Position | None, slot: StreamSlot, encoding: str) -> None:
        self._view, self._run, self._encoding = view, run, encoding
        self._reader = RunReader(run, position or Position(), slot, whole_characters=encoding == "utf-8")
        super().__init__(self._reader, slot, view.right, is_resumed=position is not None)

    def _encode_all(self, *, is_resumed: bool) -> Generator[bytes, None, None]:
        start = {
            "run_id": str(self._run.pk),
            "encoding": self._encoding,
            "live": get_provider(self._run.sandbox.provider).streams_output,
        }
        yield RECONNECT if is_resumed else RECONNECT + encode_event("start", Position(), start)
        for item in self._reader.read():
            yield self._encode(item)

    def _encode(self, item: StreamItem) -> bytes:
        match item:
            case Output(stream, content, position):
                offset = getattr(position, stream) - len(content)
                return encode_event(stream, position, {"offset": offset, "data": encode_output(content, self._encoding)})
            case Gap(stream, lost_bytes, position):
                return encode_event("gap", position, {"stream": stream, "lost_bytes": lost_bytes})
            case Ended(run, position) if run.exit_code is not None:
                return encode_event("exit", position, serialize_exit(run), suffix="-end")
            case Ended(run, position):
                return encode_event("error", position, self._build_problem(run), suffix="-end")
            case KeepAlive():
                return b": keep-alive\n\n"
        raise AssertionError(item)

    def _build_problem(self, run: Run) -> dict[str, Any]:
        failed = RunFailed(run.note, run_id=str(run.pk), outcome=run.outcome, failed_by=classify_run(run))
        problem: dict[str, Any] = json.loads(self._view.handle_exception(failed).content)
        return problem


def encode_event(name: str, position: Position, data: Mapping[str, Any], *, suffix: str = "") -> bytes:
    """Encode one server-sent event. JSON in ASCII has no line breaks."""
    return b"id: %d-%d%s\nevent: %s\ndata: %s\n\n" % (*position, suffix.encode(), name.encode(), encode_json(data))


def serialize_exit(run: Run) -> dict[str, Any]:
    return {
        "run_id": str(run.pk),
        "exit_code": run.exit_code,
        "timed_out": run.timed_out,
        "oom": run.oom,
        "truncated": run.truncated,
        "duration_seconds": run.duration.total_seconds() if run.duration is not None else None,
        "outcome": run.outcome,
        "failed_by": classify_run(run),
        "note": omit_answers(run.note),
    }


def build_stream_responses(*errors: int) -> dict[Any, Any]:
    return {(200, EVENT_STREAM): OpenApiTypes.STR} | schema.build_responses(None, *errors, ok=())


def find_run(lease_id: UUID, run_id: UUID) -> Run:
    run = Run.objects.select_related("sandbox__host", "stored_output__stored_in").filter(pk=run_id, holder=lease_id).first()
    if run is None:
        raise NotFound("The lease has no such run.")
    return run


class ExecStreamView(ExecView):
    @extend_schema(
        operation_id="leases_exec_stream",
        summary="Execute a command and stream its output",
        description=f"Like `exec`, with the output as server-sent events. {DESCRIPTION} An error before the command starts is "
        "a problem document with its own status. A client that goes away does not end the command.",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=ExecSerializer,
        responses=build_stream_responses(402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponseBase:  # type: ignore[override]
        encoding = parse_encoding(request)
        data = self.validate_body(EXEC_SERIALIZER)
        slot = OPEN_STREAMS.open(pk, follows_command=True)
        try:
            thread = CommandThread(lambda started: self._execute(pk, data, encoding, streamed=True, on_start=started.set))
            thread.start_and_wait()
            if thread.response is not None and thread.response.status_code != 200:
                slot.release()
                return thread.response
            run_id = self.run_id or UUID(json.loads(thread.response.content)["run_id"])  # type: ignore[union-attr]
            return EventStreamResponse(RunEvents(self, find_run(pk, run_id), None, slot, encoding))
        except BaseException:
            slot.release()
            raise

    def _execute(self, pk: UUID, data: dict[str, Any], encoding: str, **options: Any) -> HttpResponse:
        """Execute the command in the thread of the command. Errors become problem documents."""
        try:
            return self.execute(pk, data, encoding, **options)
        except Exception as error:
            return self.handle_exception(error)


class RunStreamView(LeaseApiView):
    @extend_schema(
        operation_id="leases_runs_stream",
        summary="Stream the output of a run",
        description=f"Join the stream of a run, continue it, or replay it after its end. {DESCRIPTION} The answer is 204 if "
        "`Last-Event-ID` is the id of the last event.",
        parameters=[schema.ENCODING_PARAMETER, LAST_EVENT_PARAMETER],
        responses=build_stream_responses(404, 429) | {204: None},
    )
    def get(self, request: ApiRequest, pk: UUID, run_id: UUID) -> HttpResponseBase:
        encoding, run = parse_encoding(request), find_run(pk, run_id)
        position, is_end = parse_event_id(request.headers.get("Last-Event-ID"))
        if is_end:
            return HttpResponse(status=204)
        slot = OPEN_STREAMS.open(pk)
        return EventStreamResponse(RunEvents(self, run, position, slot, encoding))


def parse_event_id(value: str | None) -> tuple[Position | None, bool]:
    """Return the position after an event, and whether it was the last event. (None, False) without an id."""
    if not value:
        return None, False
    match = re.fullmatch(EVENT_ID_PATTERN, value, re.ASCII)
    if match is None:
        raise InvalidRequest("Last-Event-ID", "Not the id of an event of a stream.")
    return Position(int(match[1]), int(match[2])), match[3] is not None
