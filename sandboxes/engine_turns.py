"""Turns of engines in a sweep: an engine that does not answer delays its own rows only.

The calls to an engine that is down fail after 40 seconds each. In one order for all engines, the rows of such an engine would
use up every pass."""

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import chain, zip_longest
from typing import Any, Generic, TypeVar
from uuid import UUID

from django.db.models import Model, QuerySet

from sandboxes.claims import note_progress
from sandboxes.db.clock import Clock

MAX_FAILURES = 3  # in a row, after which the engine is left to the next pass
Engine = tuple[str, UUID | None]  # provider and host
M = TypeVar("M", bound=Model)
T = TypeVar("T")


class EngineTurns(Generic[T]):
    """Iterator over the rows of several engines, until a time. Each step is progress of the pass.

    The next row is one of the engine whose rows have taken the least time. The caller reports each row that its engine has not
    answered (`note_failure`)."""

    def __init__(self, rows: Iterable[tuple[Engine, T]], *, clock: Clock, until: datetime) -> None:
        self._clock, self._until = clock, until
        self._queues: dict[Engine, deque[T]] = {}
        for engine, row in rows:
            self._queues.setdefault(engine, deque()).append(row)
        self._failures = dict.fromkeys(self._queues, 0)
        self._current: Engine | None = None
        self._has_failed = self._is_left = False

    def __iter__(self) -> Iterator[T]:
        used = dict.fromkeys(self._queues, timedelta(0))
        while self._queues and (began := self._clock()) <= self._until:
            engine = min(self._queues, key=lambda each: used[each])
            row, self._has_failed, self._is_left = self._queues[engine].popleft(), False, False
            note_progress()
            yield row
            used[engine] += self._clock() - began
            self._failures[engine] = self._failures[engine] + 1 if self._has_failed else 0
            if not self._queues[engine] or self._failures[engine] >= MAX_FAILURES or self._is_left:
                del self._queues[engine]

    def note_failure(self) -> None:
        """Count a failure of the engine of the current row."""
        self._has_failed = True

    def leave(self) -> None:
        """Drop the remaining rows of the engine of the current row."""
        self._is_left = True


def list_by_engine(rows: QuerySet[M], *, limit: int, prefix: str = "") -> list[tuple[Engine, M]]:
    """Return up to `limit` rows of each engine, in the order of the query. `prefix` is the path to the sandbox: "sandbox__"."""
    engines = rows.order_by().values_list(f"{prefix}provider", f"{prefix}host").distinct()
    return [
        (engine, row)
        for engine in sorted(engines, key=str)
        for row in rows.filter(**{f"{prefix}provider": engine[0], f"{prefix}host": engine[1]})[:limit]
    ]


def alternate(*lists: Iterable[tuple[Engine, Any]]) -> list[tuple[Engine, Any]]:
    """Return the rows of several lists in turns, so that many rows of one kind do not delay those of another."""
    missing = object()
    return [row for row in chain.from_iterable(zip_longest(*lists, fillvalue=missing)) if row is not missing]
