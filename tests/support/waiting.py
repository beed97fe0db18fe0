"""Wait for what other processes do: look again and again, and fail loudly when the time is up."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TIME_LIMITS_SECONDS = (0.7, 3.0, 15.0)  # seconds


def wait_until(look: Callable[[], T], what: str, *, within: float = 30.0) -> T:
    """The first answer of `look` that is true; AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(0.05)
    return found


def run_with_growing_timeouts(run: Callable[[float], T], had_begun: Callable[[T], object]) -> T:
    """What became of something that does not end by itself and was given so many seconds: few, so that it is over soon, and
    more if they were too few on a busy machine for it to begin."""
    for seconds in TIME_LIMITS_SECONDS:
        found = run(seconds)
        if had_begun(found):
            break
    return found
