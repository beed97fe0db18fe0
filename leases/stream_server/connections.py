"""Open connections of the stream server: limits, and their end with their lease."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import Error as DatabaseError

from leases.stream_server import access
from sandboxes.egress.call_tracking import DatabaseThreads

CHECK_INTERVAL_SECONDS = 1.0  # upper bound on how long a connection outlives its lease
MAX_CONNECTIONS = 512  # of a host
MAX_CONNECTIONS_PER_LEASE = 64  # a page of a preview may load many files at once


class TooManyConnections(Exception):
    """The limit of connections of a lease or of this host is reached."""


@dataclass(eq=False)
class Connection:
    """One connection and the task that serves it."""

    lease: UUID
    process: UUID | None  # of a terminal
    task: asyncio.Task[Any] | None
    was_revoked: bool = False  # the lease or the process has ended
    has_response: bool = False  # the client has begun to receive it


class Connections:
    """Open connections of this host."""

    def __init__(self, database: DatabaseThreads, now: Callable[[], datetime]) -> None:
        self._database, self._now = database, now
        self._open = set[Connection]()
        self._counts = Counter[UUID]()

    @contextmanager
    def track(self, lease: UUID, process: UUID | None = None) -> Iterator[Connection]:
        """Register the connection that this task serves. Raise TooManyConnections.

        The task is cancelled when the lease or the process has ended."""
        if len(self._open) >= MAX_CONNECTIONS or self._counts[lease] >= MAX_CONNECTIONS_PER_LEASE:
            raise TooManyConnections()
        connection = Connection(lease, process, asyncio.current_task())
        self._open.add(connection)
        self._counts[lease] += 1
        try:
            yield connection
        finally:
            self._open.discard(connection)
            self._counts[lease] -= 1
            self._counts += Counter()  # drops leases without a connection

    async def watch(self) -> None:
        """Cancel connections whose lease or process has ended, until cancelled. After a database error they continue."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)
            with suppress(DatabaseError):
                await self.check()

    async def check(self) -> None:
        """Cancel connections whose lease or process has ended."""
        connections = [*self._open]
        if not connections:
            return
        leases = {connection.lease for connection in connections}
        active = await self._database.run(access.filter_active_leases, leases, now=self._now())
        terminals = {connection.process for connection in connections if connection.process}
        running = await self._database.run(access.filter_open_terminals, terminals) if terminals else set()
        for connection in connections:
            has_ended = connection.process is not None and connection.process not in running
            if (connection.lease not in active or has_ended) and connection.task:
                connection.was_revoked = True
                connection.task.cancel()
