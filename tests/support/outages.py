"""Outages of the database that begin at a chosen statement or commit of the code under test.

Simulated ones raise the error of a lost connection. Those of a PostgreSQL server are real: another connection ends the backend
or locks tables, or the server refuses writes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, connections
from psycopg.pq import TransactionStatus

from tests.support.search import SEARCH


class Outage:
    """Counts statements and commits, and lets those from the `begin`-th one on fail: `lasts` of them, or until `end` is called.

    With `loses_answer` the first of them takes effect before it fails."""

    def __init__(self, begin: int, *, loses_answer: bool = False, lasts: int | None = None) -> None:
        self.begin, self.steps, self.loses_answer, self.lasts, self.has_ended = begin, 0, loses_answer, lasts, False

    @property
    def has_begun(self) -> bool:
        return self.steps > self.begin

    def end(self) -> None:
        self.has_ended = True

    def call(self, act: Callable[..., Any], *args: Any) -> Any:
        self.steps += 1
        self.has_ended |= self.lasts is not None and self.steps > self.begin + self.lasts
        if self.has_ended or self.steps <= self.begin:
            return act(*args)
        if self.loses_answer and self.steps == self.begin + 1:
            act(*args)
        connections["default"].connection.rollback()  # type: ignore[union-attr]  # as the end of the connection does
        raise OperationalError("terminating connection due to administrator command")


class LostAnswer(Outage):
    """Loses the answer of the first statement or commit after which `has_happened` returns true, and no other."""

    def __init__(self, has_happened: Callable[[], bool]) -> None:
        super().__init__(0)
        self.has_happened, self.is_looking = has_happened, False

    def call(self, act: Callable[..., Any], *args: Any) -> Any:
        answer = act(*args)
        if self.has_begun or self.is_looking or connections["default"].in_atomic_block:
            return answer
        self.is_looking = True
        try:
            if not self.has_happened():
                return answer
        finally:
            self.is_looking = False
            connections["default"].connection.rollback()  # type: ignore[union-attr]  # after a commit, the look begins a transaction
        self.steps = 1
        raise OperationalError("terminating connection due to administrator command")


@contextmanager
def injected(outage: Outage) -> Iterator[Outage]:
    """Apply an outage to the connection of this thread."""
    connection: Any = connections["default"]
    commit = connection._commit

    def execute(act: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        return outage.call(act, sql, params, many, context)

    with pytest.MonkeyPatch.context() as patch, connection.execute_wrapper(execute):
        patch.setattr(connection, "_commit", lambda: outage.call(commit))
        yield outage


class ServerOutage(Outage):
    """Outage of a PostgreSQL server for `lasts` statements and commits, or until `end`. It affects this thread's connection."""

    def __init__(self, begin: int, *, lasts: int = 4) -> None:
        super().__init__(begin, lasts=lasts)
        self._other: psycopg.Connection[Any] | None = None

    def call(self, act: Callable[..., Any], *args: Any) -> Any:
        self.steps += 1
        assert self.lasts is not None
        if self.steps == self.begin + 1:
            parameters = connection.get_connection_params()
            names = {name: parameters[name] for name in ("dbname", "user", "host", "port", "password") if name in parameters}
            self._other = psycopg.connect(**names)
            self._begin(self._other)
        elif self.steps > self.begin + self.lasts:
            self._end_fault()
        if self._other:
            connection.ensure_connection()  # one that was replaced is affected, too
            self._affect(True)
        return act(*args)

    def end(self) -> None:
        super().end()
        self._end_fault()
        connection.close_if_unusable_or_obsolete()  # as after each request and task

    def _end_fault(self) -> None:
        if self._other:
            self._other.close()
            self._other = None
        self._affect(False)

    def _begin(self, other: "psycopg.Connection[Any]") -> None:
        pass

    def _affect(self, is_active: bool) -> None:
        """Called before each statement and commit during the outage, and after it."""

    def _set(self, in_session: str, in_transaction: str = "") -> None:
        """Execute a statement outside of a transaction, or another one in a transaction that has not failed."""
        driver: Any = connection.connection
        if driver is None or driver.closed:
            return
        status = driver.info.transaction_status
        with suppress(psycopg.OperationalError):  # this connection has ended, which its next statement reports
            if driver.autocommit and status == TransactionStatus.IDLE:
                driver.execute(in_session)
            elif in_transaction and status in (TransactionStatus.IDLE, TransactionStatus.INTRANS):
                driver.execute(in_transaction)


class TerminatedBackend(ServerOutage):
    """The server ends the backend of the connection, as a restart or an operator does."""

    def _begin(self, other: "psycopg.Connection[Any]") -> None:
        connection.ensure_connection()
        assert connection.connection is not None
        other.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])


class ReadOnlyServer(ServerOutage):
    """The server begins transactions as read-only, as a standby or one with a full disk does. Open ones go on."""

    def _affect(self, is_active: bool) -> None:
        driver: Any = connection.connection
        begins = driver is not None and driver.info.transaction_status == TransactionStatus.IDLE
        value = "on" if is_active else "off"
        self._set(f"SET default_transaction_read_only = {value}", "SET TRANSACTION READ ONLY" if is_active and begins else "")


class LockedTables(ServerOutage):
    """Another session locks tables for longer than the server lets a statement wait for them (lock_timeout)."""

    TABLES = (
        "sandboxes_sandbox",
        "sandboxes_run",
        "leases_lease",
        "sandboxes_snapshot",
        "leases_agentrun",
        "billing_usagerecord",
    )

    def _begin(self, other: "psycopg.Connection[Any]") -> None:
        for table in self.TABLES:
            with suppress(psycopg.errors.LockNotAvailable), other.transaction():  # this connection's transaction uses it
                other.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE NOWAIT")

    def _affect(self, is_active: bool) -> None:
        value = "1ms" if is_active else "0"
        self._set(f"SET lock_timeout = '{value}'", f"SET LOCAL lock_timeout = '{value}'")


@dataclass(frozen=True)
class Weather:
    """Kind of outage: `begin` builds one that begins after a number of statements and commits."""

    name: str
    order: int
    begin: Callable[[int], Outage]

    stride: int = 8

    def list_steps(self) -> Iterator[int]:
        """Count the steps at which an outage begins: in the fast suite those of a stride, others for each kind of outage."""
        return count() if SEARCH != "fast" else count(self.order, self.stride)

    def __str__(self) -> str:
        return self.name


SIMULATED = [
    Weather("short", 0, lambda step: Outage(step, lasts=1)),
    Weather("long", 1, Outage),
    Weather("short, answer lost", 2, lambda step: Outage(step, loses_answer=True, lasts=1)),
    Weather("long, answer lost", 3, lambda step: Outage(step, loses_answer=True)),
]
SERVER = [
    Weather("backend terminated", 4, TerminatedBackend, stride=48),
    Weather("read-only", 7, ReadOnlyServer, stride=48),
    Weather("locked", 2, LockedTables, stride=48),
]
ON_SERVER = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="a server that refuses statements, or ends connections"
)
any_outage = pytest.mark.parametrize("weather", SIMULATED, ids=str)
any_outage_of_server_too = pytest.mark.parametrize(
    "weather", [*SIMULATED, *(pytest.param(each, marks=ON_SERVER) for each in SERVER)], ids=str
)
