"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event. `data` is parsed JSON."""

    id: str
    name: str
    data: dict[str, Any]


class EventParser:
    """Incremental parser. An event of which the end is missing is not returned; comments are skipped."""

    def __init__(self) -> None:
        self._rest, self._fields = b"", dict[str, str]()

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that the chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r").decode()
            if text:
                name, _, value = text.partition(":")
                self._fields[name] = value.removeprefix(" ")
                continue
            fields, self._fields = self._fields, {}
            if "data" in fields:
                yield Event(fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"]))
