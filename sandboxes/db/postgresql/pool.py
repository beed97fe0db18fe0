"""Connections of this process to PostgreSQL: bounded, and lent only while a thread uses one.

A thread returns its connection at the end of a request or task. The next thread takes the one returned last, with its prepared
statements. A connection without use for some seconds is closed; after a burst most of them earlier, because the processes of a
host would fill a small server with idle connections, and no other client could connect."""

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from sandboxes.background import OnDemandThread
from sandboxes.db.connection_errors import NoFreeConnection

KEPT_CONNECTIONS, SURPLUS_SECONDS = 2, 1.5  # number kept for the whole `idle_seconds`, and time after which others are closed
RETRY_SECONDS = 0.1  # between two tries while the server has no free connection
# libpq states no SQLSTATE of a refused connection: texts of 53300, https://www.postgresql.org/docs/current/errcodes-appendix.html
FULL_SERVER_TEXTS = ("too many clients", "too many connections", "connection slots are reserved")


class ConnectionPool:
    """At most `max_connections` (0: any number), each closed after `idle_seconds` without use, or earlier. Thread-safe.

    `take` waits up to `wait_seconds` for a connection."""

    def __init__(
        self, *, max_connections: int, idle_seconds: float, wait_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_connections, self.idle_seconds, self.wait_seconds = max_connections, idle_seconds, wait_seconds
        self._clock = clock
        self._reset()
        os.register_at_fork(before=self.clear, after_in_child=self._reset)  # a child must not use its parent's connections

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[tuple[float, Any]] = []  # (time of the return, connection), the last returned at the end
        self._used = weakref.WeakSet[Any]()  # a thread may end without returning its connection
        self._opening, self._closing = 0, OnDemandThread("idle-database-connections", self._run)

    def take(self, open_connection: Callable[[], Any]) -> Any:
        """Return an idle connection, or a new one. Raise NoFreeConnection, and the errors of `open_connection`."""
        deadline = self._clock() + self.wait_seconds
        while True:
            connection = self._take_idle_or_place(deadline)
            if connection is not None:
                return connection
            try:
                connection = open_connection()
            except psycopg.OperationalError as failed:
                if not any(text in str(failed) for text in FULL_SERVER_TEXTS):
                    raise
                if self._clock() >= deadline:
                    raise NoFreeConnection("The server has no free connection.") from failed
            finally:
                with self._changed:
                    self._opening -= 1
                    if connection is not None:
                        self._used.add(connection)
                    self._changed.notify()
            if connection is not None:
                return connection
            with self._changed:
                self._changed.wait(RETRY_SECONDS)

    def _take_idle_or_place(self, deadline: float) -> Any:
        """Return an idle connection, or None with a place for a new one. Raise NoFreeConnection."""
        with self._changed:
            while True:
                while self._idle:
                    _, connection = self._idle.pop()
                    if is_idle(connection):
                        self._used.add(connection)
                        return connection
                    connection.close()
                if not self.max_connections or len(self._used) + self._opening < self.max_connections:
                    self._opening += 1
                    return None
                if not self._changed.wait(deadline - self._clock()) and self._clock() >= deadline:
                    raise NoFreeConnection(f"All {self.max_connections} connections of this process are in use.")

    def put(self, connection: Any, *, is_reusable: bool) -> None:
        """Return a connection, to be used again or to be closed."""
        with self._changed:
            is_kept = connection in self._used and is_reusable and self.idle_seconds > 0 and is_idle(connection)
            self._used.discard(connection)
            if is_kept:
                self._idle.append((self._clock(), connection))
                self._closing.start()
            self._changed.notify()
        if not is_kept:
            connection.close()

    def close_unused(self) -> float | None:
        """Close the connections that are due, and return the seconds until the next look; None if none is left."""
        with self._changed:
            now, surplus_seconds = self._clock(), min(SURPLUS_SECONDS, self.idle_seconds)
            surplus, kept = self._idle[:-KEPT_CONNECTIONS], self._idle[-KEPT_CONNECTIONS:]
            ends = [since + surplus_seconds for since, _ in surplus] + [since + self.idle_seconds for since, _ in kept]
            due = [connection for end, (_, connection) in zip(ends, self._idle, strict=True) if end <= now]
            self._idle = [entry for end, entry in zip(ends, self._idle, strict=True) if end > now]
            # Connections that are returned meanwhile make others surplus.
            pause = min(surplus_seconds, *(end - now for end in ends if end > now)) if self._idle else None
            if pause is None:
                self._closing.release()
        for connection in due:
            connection.close()
        return pause

    def clear(self) -> None:
        """Close all idle connections."""
        with self._changed:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _run(self) -> None:
        while (pause := self.close_unused()) is not None:
            time.sleep(pause)


def is_idle(connection: Any) -> bool:
    """Return whether a connection works, as far as is known without a statement, and no transaction is open.

    The server sends data to an idle connection only as a notice, or when it ends the connection."""
    if connection.closed or connection.info.transaction_status != TransactionStatus.IDLE:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)
