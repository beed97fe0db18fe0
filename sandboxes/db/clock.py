"""Clocks that are never set, the text form of times, and exponential backoff."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from time import clock_gettime

Clock = Callable[[], datetime]
UPTIME_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine is suspended


def clock_from(now: datetime) -> Clock:
    """Return a clock that starts at `now` and advances with the monotonic clock. For verbs that take `now` and wait."""
    started = time.monotonic()
    return lambda: now + timedelta(seconds=time.monotonic() - started)


def read_uptime() -> float:
    """Return the seconds since the machine was started, by a clock that is never set."""
    return clock_gettime(UPTIME_CLOCK)


def format_timestamp(moment: datetime) -> str:
    """Format a time as RFC 3339 in UTC: "2026-11-21T12:00:00Z", with microseconds if they are not zero."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def format_optional_timestamp(moment: datetime | None) -> str | None:
    """Like `format_timestamp`; None for None."""
    return format_timestamp(moment) if moment else None


def compute_backoff(
    tries: int, *, initial: timedelta = timedelta(seconds=5), maximum: timedelta = timedelta(minutes=10)
) -> timedelta:
    """Return the exponential backoff after `tries` failures: `initial`, doubled for each further failure, up to `maximum`."""
    return min(initial * 2 ** min(max(tries - 1, 0), 16), maximum)
