"""Time is a value: a verb is given `now`, and measures what it does itself on the monotonic clock."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

Clock = Callable[[], datetime]


def clock_from(now: datetime) -> Clock:
    """A clock that showed `now` when this was called and has run since."""
    began = time.monotonic()
    return lambda: now + timedelta(seconds=time.monotonic() - began)


def format_timestamp(moment: datetime) -> str:
    """A moment as JSON has it: "2026-11-21T12:00:00Z", with microseconds if it has any."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def compute_backoff(
    tries: int, *, first: timedelta = timedelta(seconds=5), most: timedelta = timedelta(minutes=10)
) -> timedelta:
    """How long to leave something alone that failed `tries` times: doubling from `first` up to `most`."""
    return min(first * 2 ** min(max(tries - 1, 0), 16), most)
