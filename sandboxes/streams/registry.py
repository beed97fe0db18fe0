"""Open output streams of this process: their limits, and their end at its shutdown."""

import threading
from collections import Counter
from typing import Protocol
from uuid import UUID

from django.conf import settings

from sandboxes.errors import TooManyStreams


class Interruptible(Protocol):
    """Reader that another thread can wake up."""

    def interrupt(self) -> None: ...


class StreamSlot:
    """Place of one open stream. `follows_command`: the stream ends with its command also when the process is shutting down."""

    def __init__(self, streams: "OpenStreams", holder: UUID, *, follows_command: bool) -> None:
        self.holder, self.follows_command = holder, follows_command
        self.reader: Interruptible | None = None
        self._streams, self._wakeup = streams, threading.Event()

    @property
    def must_end(self) -> bool:
        return self._wakeup.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, at most until the stream has to end."""
        self._wakeup.wait(seconds)

    def interrupt(self) -> None:
        """Make the stream end."""
        self._wakeup.set()
        if (reader := self.reader) is not None:
            reader.interrupt()

    def release(self) -> None:
        """Give the place back. Idempotent."""
        self._streams.remove(self)


class OpenStreams:
    """Slots of the open streams.

    `occupy_threads`: each stream occupies one of WEB_THREADS. controlplane.stream_threads changes that."""

    def __init__(self) -> None:
        self.occupy_threads = True
        self._lock, self._slots, self._is_stopping = threading.Lock(), set[StreamSlot](), False

    def open(self, holder: UUID, *, owner: str = "This lease", follows_command: bool = False) -> StreamSlot:
        """Take a slot for a stream of a lease, or of another `owner` with an id. Raise TooManyStreams."""
        with self._lock:
            own = Counter(slot.holder for slot in self._slots)[holder]
            _require_below(owner, own, settings.MAX_STREAMS_PER_LEASE, "LEASEHOLD_MAX_STREAMS_PER_LEASE")
            _require_below("The web process", len(self._slots), self._get_maximum(), "LEASEHOLD_MAX_STREAMS")
            slot = StreamSlot(self, holder, follows_command=follows_command)
            self._slots.add(slot)
            if self._is_stopping and not follows_command:
                slot.interrupt()
            return slot

    def _get_maximum(self) -> int:
        if self.occupy_threads:
            return min(settings.MAX_STREAMS, max(1, settings.WEB_THREADS // 8))
        return int(settings.MAX_STREAMS)

    def remove(self, slot: StreamSlot) -> None:
        with self._lock:
            self._slots.discard(slot)

    def count(self) -> int:
        return len(self._slots)

    def stop(self) -> None:
        """End all streams but those that follow a command of this process."""
        with self._lock:
            self._is_stopping = True
            ending = [slot for slot in self._slots if not slot.follows_command]
        for slot in ending:
            slot.interrupt()


def _require_below(owner: str, count: int, limit: int, variable: str) -> None:
    if count >= limit:
        raise TooManyStreams(f"{owner} has {count} open streams, and the limit is {limit} ({variable}).", limit=limit)


OPEN_STREAMS = OpenStreams()
