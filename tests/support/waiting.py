"""Polling for effects of other processes, with a time limit."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TIME_LIMITS_SECONDS = (0.7, 3.0, 15.0)


def wait_until(poll: Callable[[], T], description: str, *, within: float = 30.0) -> T:
    """Call `poll` until it returns a true value and return that. Raise AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while not (result := poll()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {description}"
        time.sleep(0.05)
    return result


def run_with_growing_timeouts(attempt: Callable[[float], T], has_started: Callable[[T], object]) -> T:
    """Run something that does not end by itself with a short time limit, and longer ones if it did not start in time.

    The first limit keeps the test fast; the longer ones are for a busy machine. Return the last result."""
    for seconds in TIME_LIMITS_SECONDS:
        result = attempt(seconds)
        if has_started(result):
            break
    return result
