"""Recoveries within provider calls: the call has found the sandbox stopped, and has started it with its files.

A provider reports them to the operation that made the call, because neither its result nor its error shows them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum


class Recovery(StrEnum):
    """Kind of a recovery. The value ends the sentence "The sandbox was …"."""

    STARTED = "restarted"
    RECREATED = "removed at its engine, and made again on its volumes"


_observed: ContextVar[list[Recovery] | None] = ContextVar("observed_recoveries", default=None)


def report(recovery: Recovery) -> None:
    """Report a recovery to the operation of this thread or task, if any."""
    if (observed := _observed.get()) is not None:
        observed.append(recovery)


@contextmanager
def observe() -> Iterator[list[Recovery]]:
    """Collect the recoveries that provider calls of this thread or task report within the block."""
    before = _observed.get()
    observed: list[Recovery] = []
    _observed.set(observed)  # without a token: a generator may be left in another context than it was entered in
    try:
        yield observed
    finally:
        _observed.set(before)
