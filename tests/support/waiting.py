"""Polling for effects of other processes, with a time limit."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from django.db import connection

T = TypeVar("T")
TIME_LIMITS_SECONDS = (0.7, 3.0, 15.0)


def wait_until(poll: Callable[[], T], description: str, *, within: float = 30.0, every: float = 0.05) -> T:
    """Return the first true value of `poll`. Raise AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while not (result := poll()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {description}"
        time.sleep(every)
    return result


def run_with_growing_timeouts(attempt: Callable[[float], T], has_started: Callable[[T], object]) -> T:
    """Make an attempt that does not end by itself under a short time limit, then under longer ones until it starts in time.

    The first limit keeps the test fast; the longer ones are for a busy machine. Return the last result."""
    for seconds in TIME_LIMITS_SECONDS:
        result = attempt(seconds)
        if has_started(result):
            break
    return result


def wait_until_blocked(rival: threading.Thread, *, within: float = 30.0) -> None:
    """Wait until a started thread has ended or waits for a lock that the current transaction holds.

    SQLite does not show a waiting writer. There a transaction excludes every other writer, so both orders are valid and
    this function returns at once."""
    if connection.vendor != "postgresql":
        if not connection.in_atomic_block:
            rival.join(within)
        return
    wait_until(lambda: not rival.is_alive() or _has_waiting_backend(), "the rival ends or waits for a lock", within=within)


def _has_waiting_backend() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")  # statistics are cached for the length of a transaction
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
        return cursor.fetchone() is not None
