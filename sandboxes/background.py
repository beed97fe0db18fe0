"""Threads and tasks that a process needs until its end: an error must not end them unnoticed.

A thread that had ended with an error, or was never started because the process is at its limit of threads, was taken for a
running one: claims were not extended any more, or streams outlived their key."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import structlog
from django.db import Error as DatabaseError

log = structlog.get_logger(__name__)


class OnDemandThread:
    """Thread of this process that exists while there is work.

    The owner calls `start` and `release` under the lock by which it adds work and finds that there is none: the thread then
    sees the new work, or `start` sees that the thread ends."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.name, self._run = name, run
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, unless it runs. At the limit of threads an error is logged, and the next call tries again."""
        if self.is_running:
            return
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.error("thread not started", thread=self.name, error=str(error))
            return
        self._thread = thread

    def release(self) -> None:
        """Have the next `start` begin a new thread. The thread calls this method before it ends."""
        self._thread = None

    def join(self) -> None:
        """Wait until the thread has ended, if one was started."""
        if self._thread is not None:
            self._thread.join()


async def repeat(check: Callable[[], Awaitable[object]], message: str, *, seconds: float) -> None:
    """Await `check` every `seconds` until cancelled. An error is logged as `message`, and the next check is made."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await check()
        except DatabaseError as error:
            log.warning(message, error=str(error))
        except Exception:
            log.exception(message)
