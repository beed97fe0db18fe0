"""Events of the outbox from a position on, for the event streams of this process."""

import threading
import time
from collections.abc import Iterator, Sequence

import structlog
from django.db import Error as DatabaseError

from sandboxes.db import database_time
from sandboxes.models.webhooks import Event
from sandboxes.streams import rows
from sandboxes.streams.reader import KEEP_ALIVE_SECONDS, KeepAlive
from sandboxes.streams.registry import StreamSlot
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
POLL_SECONDS = 1.0  # between two looks at the outbox, of all streams of this process together
BATCH_SIZE = 200


class NewestPosition:
    """Position of the newest event, read at most once per POLL_SECONDS for all streams of this process."""

    def __init__(self) -> None:
        self._lock, self._position, self._next_read = threading.Lock(), 0, 0.0

    def read(self) -> int:
        """Return the position. Raise DatabaseError."""
        with self._lock:
            if time.monotonic() >= self._next_read:
                self._next_read = time.monotonic() + POLL_SECONDS
                self._position = rows.call(_assign_positions)
            return self._position


NEWEST_POSITION = NewestPosition()


class EventReader:
    """Iterator over the events after a position, until the stream has to end (`slot`)."""

    def __init__(self, position: int, slot: StreamSlot) -> None:
        self._position, self._slot = position, slot

    def read(self) -> Iterator[Sequence[Event] | KeepAlive]:
        """Yield the events in the order of their positions, and KeepAlive after KEEP_ALIVE_SECONDS without one.

        While the database does not respond there are no events."""
        last_item = time.monotonic()
        while not self._slot.must_end:
            try:
                events = self._read_batch()
            except DatabaseError as error:
                log.warning("events not read", error=str(error))
                events = []
            if events:
                self._position = events[-1].position or self._position
                yield events
            elif time.monotonic() >= last_item + KEEP_ALIVE_SECONDS:
                yield KeepAlive()
            else:
                self._slot.pause(POLL_SECONDS)
                continue
            last_item = time.monotonic()

    def close(self) -> None:
        """Do nothing: between two batches the reader holds no resources."""

    def _read_batch(self) -> list[Event]:
        return rows.call(_fetch_after, self._position) if NEWEST_POSITION.read() > self._position else []


def _assign_positions() -> int:
    return outbox.assign_positions(now=database_time.now())


def _fetch_after(position: int) -> list[Event]:
    return list(Event.objects.filter(position__gt=position).order_by("position")[:BATCH_SIZE])
