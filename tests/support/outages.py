"""Outages of the database that begin at a chosen statement or commit of the code under test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from django.db import OperationalError, connections

from tests.support.search import SEARCH

OUTAGES = [(False, 1), (False, None), (True, 1), (True, None)]  # whether the first statement takes effect; length, None: long


def list_steps(loses_answer: bool, lasts: int | None) -> Iterator[int]:
    """Count the statements and commits before an outage; in the fast suite every eighth, others for each kind of outage."""
    return count() if SEARCH != "fast" else count(OUTAGES.index((loses_answer, lasts)), 8)


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
