"""Requests of a sweep to servers outside, at different servers in parallel: one that does not answer delays its own rows only.

The thread of the sweep reads and writes the rows, and threads without a database connection wait for the answers. An attempt is
a generator: it claims its row, yields a request, is continued with the answer or the error, and returns its outcome. A server
has one request at a time, so that many rows for one server do not delay those for another."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID

import structlog
from django.db.models import F, Model, QuerySet, Window
from django.db.models.expressions import Combinable
from django.db.models.functions import RowNumber

from sandboxes.claims import note_progress
from sandboxes.db.clock import Clock
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
MAX_PARALLEL_REQUESTS = 64  # of one pass, at most one at each server
MAX_PROBES = 32  # of these, requests to servers whose last request failed slowly
SLOW_FAILURE = timedelta(seconds=5)  # after which a pass sends this server no further request
MEMORY = timedelta(hours=1)  # for which a server counts as slow without another request
T = TypeVar("T")
M = TypeVar("M", bound=Model)
Server = Hashable
Request = Callable[[], Any]
Attempt = Generator[Request, Any, T]


def run_here(attempt: Attempt[T]) -> T:
    """Run an attempt in this thread, and return its outcome."""
    try:
        request = next(attempt)
        while True:
            try:
                answer = request()
            except Exception as error:
                request = attempt.throw(error)
            else:
                request = attempt.send(answer)
    except StopIteration as ended:
        return ended.value


def list_due(rows: QuerySet[M], server: Combinable, due_column: str, *, limit: int) -> list[tuple[Server, UUID]]:
    """Return server and primary key of up to `limit` rows of each server, the longest overdue of all servers first."""
    place = Window(RowNumber(), partition_by=F("server"), order_by=[F(due_column), F("pk")])
    first = rows.annotate(server=server).annotate(place=place).filter(place__lte=limit).order_by(due_column, "pk")
    return [(name, pk) for name, pk in first.values_list("server", "pk")]


class SlowServers:
    """Servers at which this process has waited in vain. They are asked last: nothing else depends on this memory."""

    def __init__(self) -> None:
        self._since: dict[Server, datetime] = {}
        self._lock = threading.Lock()

    def note(self, server: Server, *, is_slow: bool, now: datetime) -> None:
        with self._lock:
            self._since = {each: since for each, since in self._since.items() if since > now - MEMORY and each != server}
            if is_slow:
                self._since[server] = now

    def __contains__(self, server: Server) -> bool:
        return server in self._since


@dataclass
class _Progress(Generic[T]):
    """An attempt whose request is in progress."""

    server: Server
    row: UUID
    attempt: Attempt[T]
    began: datetime


@dataclass
class ServerCalls:
    """Requests of one sweep.

    `begin` begins an attempt for a row. An attempt that returns `failure`, after SLOW_FAILURE or more, shows a server that does
    not answer: `postpone` makes its other rows due later, and returns their number."""

    begin: Callable[..., Attempt[str]]
    failure: str
    postpone: Callable[..., int]
    slow: SlowServers = field(default_factory=SlowServers)

    def run(self, due: Iterable[tuple[Server, UUID]], *, clock: Clock, result: SweepResult) -> None:
        """Attempt the rows, of the servers in turn, for up to PASS_TIME_LIMIT, and until the last attempt has ended.

        An error of one attempt is recorded in `result`: the claim of its row passes, and the others go on."""
        _Pass(self, due, clock=clock, result=result).run()


class _Pass:
    """One pass. Servers that answer come before those that have failed slowly."""

    def __init__(self, calls: ServerCalls, due: Iterable[tuple[Server, UUID]], *, clock: Clock, result: SweepResult) -> None:
        self._calls, self._clock, self._result, self._until = calls, clock, result, clock() + PASS_TIME_LIMIT
        self._rows: dict[Server, deque[UUID]] = {}
        for server, row in due:
            self._rows.setdefault(server, deque()).append(row)
        self._working = deque(server for server in self._rows if server not in calls.slow)
        self._probed = deque(server for server in self._rows if server in calls.slow)
        self._requests: dict[Future[Any], _Progress[str]] = {}

    def run(self) -> None:
        with ThreadPoolExecutor(MAX_PARALLEL_REQUESTS, thread_name_prefix="server-call") as threads:
            while True:
                while (server := self._choose()) is not None:
                    self._begin(server[0], threads)
                if not self._requests:
                    return
                done, _ = wait(self._requests, return_when=FIRST_COMPLETED)
                for request in done:
                    self._continue(request, self._requests.pop(request), threads)

    def _choose(self) -> tuple[Server] | None:
        """Return the server of the next attempt, in a tuple because None is a server, too."""
        if len(self._requests) >= MAX_PARALLEL_REQUESTS or self._clock() >= self._until:
            return None
        if self._working:
            return (self._working.popleft(),)
        probes = sum(each.server in self._calls.slow for each in self._requests.values())
        return (self._probed.popleft(),) if self._probed and probes < MAX_PROBES else None

    def _begin(self, server: Server, threads: ThreadPoolExecutor) -> None:
        now = self._clock()
        row = self._rows[server].popleft()
        attempt = self._calls.begin(row, now=now)
        progress = _Progress(server, row, attempt, now)
        self._step(progress, lambda: next(attempt), threads)

    def _continue(self, request: "Future[Any]", progress: _Progress[str], threads: ThreadPoolExecutor) -> None:
        attempt, error = progress.attempt, request.exception()
        if isinstance(error, Exception):
            self._step(progress, lambda: attempt.throw(error), threads)
        else:
            answer = request.result()  # raises what is no Exception
            self._step(progress, lambda: attempt.send(answer), threads)

    def _step(self, progress: _Progress[str], step: Callable[[], Request], threads: ThreadPoolExecutor) -> None:
        """Continue an attempt until its next request, or its end."""
        note_progress()
        try:
            self._requests[threads.submit(step())] = progress
        except StopIteration as ended:
            self._end(progress, ended.value)
        except Exception as failed:
            log.exception("request of a sweep failed", row=str(progress.row))
            self._result.failures.append(f"{progress.row}: {failed}")
            self._end(progress, "")

    def _end(self, progress: _Progress[str], outcome: str) -> None:
        server, now = progress.server, self._clock()
        self._result.note(outcome, bool(outcome))
        is_slow = outcome == self._calls.failure and now - progress.began >= SLOW_FAILURE
        self._calls.slow.note(server, is_slow=is_slow, now=now)
        if is_slow:
            with self._result.catching(server):
                self._result.note("postponed", self._calls.postpone(server, now=now))
        elif self._rows[server]:
            self._working.append(server)
