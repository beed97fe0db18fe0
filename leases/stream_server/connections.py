"""Open connections of the stream server: limits, and their end with their grant: its lease, its issuer or its URL."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from leases.errors import GrantEnded
from leases.stream_server import access
from leases.stream_server.grants import EXPIRED, PreviewGrant, TerminalGrant, has_expired
from sandboxes.background import repeat
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.errors import SandboxError

CHECK_INTERVAL_SECONDS = 1.0  # upper bound on how long a connection outlives its grant
MAX_CONNECTIONS = 512  # of a host
MAX_CONNECTIONS_PER_LEASE = 64  # a page of a preview may load many files at once


class TooManyConnections(Exception):
    """The limit of connections of a lease or of this host is reached."""


@dataclass(eq=False)
class Connection:
    """One connection and the task that serves it."""

    grant: TerminalGrant | PreviewGrant
    task: asyncio.Task[Any] | None
    ended: SandboxError | None = None  # reason for which the task was cancelled
    has_response: bool = False  # the client has begun to receive it

    def end(self, reason: SandboxError) -> None:
        """Cancel the task that serves the connection."""
        if self.task:
            self.ended = reason
            self.task.cancel()


class Connections:
    """Open connections of this host."""

    def __init__(self, database: DatabaseThreads, now: Callable[[], datetime]) -> None:
        self._database, self._now = database, now
        self._open = set[Connection]()
        self._counts = Counter[UUID]()

    @contextmanager
    def track(self, grant: TerminalGrant | PreviewGrant) -> Iterator[Connection]:
        """Register the connection that this task serves. Raise TooManyConnections.

        The task is cancelled when the grant has ended. A grant that ends meanwhile must not be missed: the caller checks the
        grant after this call."""
        lease = grant.lease
        if len(self._open) >= MAX_CONNECTIONS or self._counts[lease] >= MAX_CONNECTIONS_PER_LEASE:
            raise TooManyConnections()
        connection = Connection(grant, asyncio.current_task())
        self._open.add(connection)
        self._counts[lease] += 1
        try:
            yield connection
        finally:
            self._open.discard(connection)
            self._counts[lease] -= 1
            self._counts += Counter()  # drops leases without a connection

    async def watch(self) -> None:
        """Cancel connections whose grant has ended, until cancelled.

        After a database error they continue, up to the expiry of their URL."""
        await repeat(self.check, "grants of connections not checked", seconds=CHECK_INTERVAL_SECONDS)

    async def check(self) -> None:
        """Cancel connections whose grant has ended."""
        now, connections = self._now(), list[Connection]()
        for connection in self._open:
            if has_expired(connection.grant, now=now):
                connection.end(GrantEnded(EXPIRED))
            else:
                connections.append(connection)
        if not connections:
            return
        ended = await self._database.run(access.find_ended, {connection.grant for connection in connections}, now=now)
        for connection in connections:
            if connection.grant in ended and connection in self._open:
                connection.end(ended[connection.grant])
