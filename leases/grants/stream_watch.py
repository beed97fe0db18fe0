"""Watch of the open event streams of this process: each ends soon after the right of its API key.

A stream may wait for output for a long time, so it does not check the key itself. One thread checks the keys of all streams
with one query a second, which runs in the thread of the streams' rows. Without a response of the database the streams go on."""

import threading
import time
from datetime import datetime

import structlog
from django.db import Error as DatabaseError

from leases.grants import issuers
from leases.grants.issuers import Right
from sandboxes.background import OnDemandThread
from sandboxes.db import database_time
from sandboxes.db.clock import Clock
from sandboxes.streams import rows
from sandboxes.streams.registry import StreamSlot

log = structlog.get_logger(__name__)
CHECK_INTERVAL_SECONDS = 1.0  # upper bound on how long a stream outlives the right of its key


class StreamWatch:
    """Open streams and the rights that they use. Its thread runs while there are any."""

    def __init__(self, now: Clock = database_time.now_without_query) -> None:
        self._now, self._lock = now, threading.Lock()
        self._rights = dict[StreamSlot, Right]()
        self._thread = OnDemandThread("stream-watch", self._run)

    def add(self, slot: StreamSlot, right: Right) -> None:
        """Watch a stream."""
        with self._lock:
            self._rights[slot] = right
            self._thread.start()

    def remove(self, slot: StreamSlot) -> None:
        """Stop watching a stream. Idempotent."""
        with self._lock:
            self._rights.pop(slot, None)

    def check(self) -> None:
        """End the streams whose API keys have lost the right. Raise DatabaseError."""
        for slot in rows.call(self._find_ended, self._now()):
            slot.interrupt()

    def _find_ended(self, now: datetime) -> list[StreamSlot]:
        """Return the streams that have to end. The last stream closes the connection of this thread: none makes no query."""
        with self._lock:
            rights = dict(self._rights)
        alive = issuers.find_alive({*rights.values()}, now=now) if rights else set()
        return [slot for slot, right in rights.items() if right not in alive]

    def _run(self) -> None:
        while True:
            time.sleep(CHECK_INTERVAL_SECONDS)
            with self._lock:
                if not self._rights:
                    self._thread.release()
                    return
            try:
                self.check()
            except DatabaseError as error:
                log.warning("keys of open streams not checked", error=str(error))
            except Exception:  # the next check must not be lost with this one
                log.exception("keys of open streams not checked")


STREAM_WATCH = StreamWatch()
