"""Messages of agent runs as server-sent events."""

import json
import re
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema

from leases.agent_runs import lifecycle
from leases.agent_runs.models import AgentRun
from leases.agent_runs.ndjson import JsonLine, MalformedLine, NdjsonParser
from leases.api.agent_runs import serialize_agent_run
from leases.api.base import schema
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.api.streams import EVENT_STREAM, LAST_EVENT_PARAMETER, RECONNECT, EventStreamResponse, StreamEvents, find_run
from leases.errors import InvalidRequest
from leases.grants.issuers import Right
from sandboxes.models import Run
from sandboxes.streams import rows
from sandboxes.streams.reader import Ended, Gap, KeepAlive, Output, Position, RunReader, StreamItem
from sandboxes.streams.registry import OPEN_STREAMS, StreamSlot

EVENT_ID_PATTERN = r"([0-9]{1,15})-([0-9]{1,15})-([0-9]{1,9})(-end)?"  # bytes of stdout, of stderr, and messages so far
CLOSE_PAUSE_SECONDS = 0.1  # between two looks at the row of an agent run whose command has ended
STREAM_DESCRIPTION = """Events: `start` (run_id, cli), `message` (sequence, message: the JSON object that the CLI printed), \
`malformed` (sequence, reason, text, bytes: a line that is no JSON object), `stderr` (data), `gap` (stream, lost_bytes), and \
`end` (the agent run) once its end is recorded. A stream that ends without `end` was interrupted: continue it with \
`Last-Event-ID`. Messages of earlier runs are in the chat history."""


class AgentRunStreamView(LeaseApiView):
    @extend_schema(
        operation_id="leases_agent_runs_stream",
        summary="Stream the messages of an agent run",
        description=f"Join the stream of an agent run, continue it, or replay it after its end. {STREAM_DESCRIPTION} The "
        "answer is 204 if `Last-Event-ID` is the id of the last event.",
        parameters=[LAST_EVENT_PARAMETER],
        responses={(200, EVENT_STREAM): OpenApiTypes.STR} | schema.build_responses(None, 404, 429, ok=()) | {204: None},
    )
    def get(self, request: ApiRequest, pk: UUID, run_id: UUID) -> HttpResponseBase:
        row = lifecycle.find(pk, run_id)
        position, sequence, is_end = parse_event_id(request.headers.get("Last-Event-ID"))
        if is_end:
            return HttpResponse(status=204)
        run = find_run(pk, run_id)
        slot = OPEN_STREAMS.open(pk)
        return EventStreamResponse(AgentRunEvents(row, run, position, sequence, slot, self.right))


class AgentRunEvents(StreamEvents):
    """Events of an agent run."""

    def __init__(
        self, row: AgentRun, run: Run, position: Position | None, sequence: int, slot: StreamSlot, right: Right
    ) -> None:
        self._row, self._sequence = row, sequence
        self._position = position or Position()  # of the client: after the last event
        self._parser = NdjsonParser(self._position.stdout)
        self._reader = RunReader(run, self._position, slot, whole_characters=True)
        super().__init__(self._reader, slot, right, is_resumed=position is not None)

    def _encode_all(self, *, is_resumed: bool) -> Generator[bytes, None, None]:
        start = {"run_id": str(self._row.pk), "cli": self._row.cli}
        yield RECONNECT if is_resumed else RECONNECT + self._encode("start", start)
        for item in self._reader.read():
            yield from self._encode_item(item)

    def _encode_item(self, item: StreamItem) -> Generator[bytes, None, None]:
        match item:
            case Output("stdout", content, _):
                yield from self._encode_lines(self._parser.feed(content))
            case Output(_, content, position):
                self._position = self._position._replace(stderr=position.stderr)
                yield self._encode("stderr", {"data": content.decode(errors="replace")})
            case Gap(stream, lost_bytes, position):
                if stream == "stdout":
                    self._parser.skip(lost_bytes)
                self._position = self._position._replace(**{stream: getattr(position, stream)})
                yield self._encode("gap", {"stream": stream, "lost_bytes": lost_bytes})
            case KeepAlive():
                yield b": keep-alive\n\n"
            case Ended():
                yield from self._encode_lines(self._parser.end())
                while (row := rows.call(_find_ended, self._row.pk)) is None and not self._slot.must_end:
                    self._slot.pause(CLOSE_PAUSE_SECONDS)
                if row is not None:
                    yield self._encode("end", row, suffix="-end")

    def _encode_lines(self, lines: Iterator[JsonLine | MalformedLine]) -> Generator[bytes, None, None]:
        for line in lines:
            self._sequence += 1
            self._position = self._position._replace(stdout=line.end)
            if isinstance(line, JsonLine):
                yield self._encode("message", {"sequence": self._sequence, "message": line.document})
            else:
                data = {"sequence": self._sequence, "reason": line.reason, "text": line.text, "bytes": line.size}
                yield self._encode("malformed", data)

    def _encode(self, name: str, data: Mapping[str, Any], *, suffix: str = "") -> bytes:
        event_id = f"{self._position.stdout}-{self._position.stderr}-{self._sequence}{suffix}".encode()
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (event_id, name.encode(), json.dumps(data).encode())


def _find_ended(pk: UUID) -> dict[str, Any] | None:
    """Return the document of an agent run once it is closed."""
    row = AgentRun.objects.filter(pk=pk, ended_at__isnull=False).first()
    return serialize_agent_run(row) if row else None


def parse_event_id(value: str | None) -> tuple[Position | None, int, bool]:
    """Return the position after an event, its sequence number, and whether it was the last. (None, 0, False) without an id."""
    if not value:
        return None, 0, False
    match = re.fullmatch(EVENT_ID_PATTERN, value, re.ASCII)
    if match is None:
        raise InvalidRequest("Last-Event-ID", "Not the id of an event of a stream.")
    return Position(int(match[1]), int(match[2])), int(match[3]), match[4] is not None
