"""Wait for what other processes do: look again and again, and fail loudly when the time is up."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T], what: str, *, within: float = 30.0) -> T:
    """The first answer of `look` that is true; AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(0.05)
    return found
