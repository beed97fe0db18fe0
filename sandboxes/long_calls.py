"""Limit on the calls of one process that wait for a sandbox.

Such a call blocks its thread until a command, a start, a wake or an eviction has ended, which may take an hour. A web process
has a fixed number of threads: without a limit, long calls would leave none for requests that are answered at once, such as
renewals and health checks. Management commands and queue workers have no limit, also in the process of a web server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import BoundedSemaphore, local

from django.conf import settings

from sandboxes.errors import TooManyLongCalls


class LongCallLimit:
    """Number of long calls that may be open at once in this process. None: no limit."""

    def __init__(self) -> None:
        self.maximum: int | None = None
        self._permits: BoundedSemaphore | None = None
        self._thread = local()

    def set_maximum(self, maximum: int | None) -> None:
        """Replace the limit. Call this method before the process serves requests."""
        self.maximum, self._permits = maximum, BoundedSemaphore(maximum) if maximum else None

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count the body of the `with` as one long call. Raises TooManyLongCalls at the limit, without waiting.

        A nested `with` of the same thread is part of the outer call."""
        permits = self._permits
        if permits is None or getattr(self._thread, "admitted", False):
            yield
            return
        if not permits.acquire(blocking=False):
            raise TooManyLongCalls(
                f"{self.maximum} calls wait for sandboxes in this web process, which is its limit. Nothing was run. Try again "
                "in a few seconds. LEASEHOLD_WEB_THREADS and LEASEHOLD_WEB_WORKERS set the limit.",
                limit=self.maximum,
            )
        self._thread.admitted = True
        try:
            yield
        finally:
            self._thread.admitted = False
            permits.release()

    def exempt_thread(self) -> None:
        """Do not count the calls of this thread."""
        self._thread.admitted = True


LONG_CALLS = LongCallLimit()
WAITING_CALLS = LongCallLimit()  # long calls that wait for a place: they must leave threads to the calls that free a place


def exempt_thread() -> None:
    """Do not limit the calls of this thread, which serves no requests."""
    LONG_CALLS.exempt_thread()
    WAITING_CALLS.exempt_thread()


def get_shutdown_path() -> Path:
    """Return the file that exists while the web processes with this state directory shut down."""
    return Path(settings.STATE_DIR) / "draining"


def is_shutting_down() -> bool:
    return get_shutdown_path().exists()


def compute_maximum(threads: int) -> int:
    """Return the number of long calls for a web process with this number of threads: three quarters, 12 of 16.

    At least one thread is left for short calls, so `threads` must be 2 or more."""
    return threads - max(1, threads // 4)


def set_limits(threads: int) -> None:
    """Set the limits of a web process with this number of threads. Half of the long calls may wait for a place."""
    maximum = compute_maximum(threads)
    LONG_CALLS.set_maximum(maximum)
    WAITING_CALLS.set_maximum(max(1, maximum // 2))
