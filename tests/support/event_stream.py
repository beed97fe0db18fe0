"""Client of server-sent events."""

import http.client
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event. `data` is parsed JSON."""

    id: str
    name: str
    data: dict[str, Any]


def parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events of a stream as their last lines arrive. Comments and fields without an event are skipped."""
    fields: dict[str, str] = {}
    for line in lines:
        text = line.decode().rstrip("\n")
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Event(fields.get("id", ""), fields["event"], json.loads(fields["data"]))
            fields = {}
        else:
            fields = {}


def open_stream(
    port: int, key: str, method: str, path: str, body: Any = None, timeout: float = 60.0, **headers: str
) -> http.client.HTTPResponse:
    """Send a request to /api/v1 and return its response, to be iterated by `parse_events`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    fields |= {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request(method, f"/api/v1{path}", json.dumps(body) if body else None, fields)
    return connection.getresponse()


def join_output(events: Iterable[Event], stream: str) -> str:
    return "".join(event.data["data"] for event in events if event.name == stream)
