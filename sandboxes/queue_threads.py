"""Threads of a queue worker, for work that may take longer than a task is allowed to.

The queue's worker ends if a task exceeds the queue's timeout, and a task is delivered again after its retry time. A sweep that
stores a large workspace takes longer than both. Such work runs in a thread of its own. Its task waits for TASK_WAIT and then
ends: the worker is free for other tasks, and the thread continues under the claims of the work. If the process dies, a sweep
takes over at the deadlines of these claims.

The number of threads is limited per name, such as the name of a sweep. A hung thread counts until the process ends. Once the
limit is reached and all threads of a name hang, the process ends, and its supervisor starts another one."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import structlog

from sandboxes import long_calls
from sandboxes.claims import Progress, hold
from sandboxes.db.reusable_threads import ReusableThreads

log = structlog.get_logger(__name__)
# For which a task waits for its work. All tasks share one or two threads of the queue: a sweep that waits for a slow engine or
# vendor must not delay the others.
TASK_WAIT = timedelta(seconds=5)
DETACHED = timedelta(0)  # of work that waits for strangers' servers
MAX_THREADS_PER_NAME = 4
# A thread without progress for this long hangs. Longer than every timeout of a store's or an engine's client.
HANG_TIMEOUT = timedelta(minutes=30)
T = TypeVar("T")
_current_thread = threading.local()


class StillRunning(Exception):
    """The work continues in a thread after its task has ended, or earlier work of the same name does."""


class WorkThread(Progress, Generic[T]):
    """A call of a function in a thread of `threads`, which starts at once."""

    def __init__(self, name: str, work: Callable[[], T], threads: ReusableThreads, *, clock: Callable[[], float]) -> None:
        super().__init__()
        self.name, self._work, self._clock = name, work, clock
        self._seen_steps, self._seen_at = 0, clock()
        self.ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        threads.start(name, self._run, self.ended.set)

    def get_result(self) -> T:
        """Return the result of an ended call, or raise its exception."""
        if self._error:
            raise self._error
        return self._result  # type: ignore[return-value]  # set unless there was an error

    def is_hung(self) -> bool:
        """Return whether the call made no progress for HANG_TIMEOUT, as far as earlier calls of this method saw."""
        if self.steps != self._seen_steps:
            self._seen_steps, self._seen_at = self.steps, self._clock()
        return self._clock() - self._seen_at > HANG_TIMEOUT.total_seconds()

    def _run(self) -> None:
        long_calls.exempt_thread()
        try:
            with hold(self):
                self._result = self._work()
        except BaseException as error:  # `get_result` raises it in the task, if the task still waits
            self._error = error
            log.exception("queued work failed", work=self.name)


class WorkThreads:
    """Work threads of this process, at most MAX_THREADS_PER_NAME of each name."""

    def __init__(self, *, wait: timedelta = TASK_WAIT, clock: Callable[[], float] = time.monotonic) -> None:
        self.wait, self._clock = wait, clock
        self._threads: list[WorkThread[Any]] = []
        self._reusable = ReusableThreads()
        self._lock = threading.Lock()  # several tasks call `run` at the same time, each in a thread of the queue

    def run(
        self, name: str, work: Callable[[], T], *, wait: timedelta | None = None, max_threads: int = MAX_THREADS_PER_NAME
    ) -> T:
        """Call `work` in a thread and return its result, or raise its exception.

        Raises StillRunning if the call has not ended after `wait`, by default TASK_WAIT. Also raises StillRunning, without
        calling `work`, if `max_threads` calls of this name are running already: 1 for work of which a second call would wait
        for the first one, so that a single hung call ends the process."""
        with self._lock:
            thread = self._start(name, work, max_threads)
        if not thread.ended.wait((self.wait if wait is None else wait).total_seconds()):
            raise StillRunning("still running in the background")
        return thread.get_result()

    def _start(self, name: str, work: Callable[[], T], max_threads: int) -> WorkThread[T]:
        """Start a thread, or raise StillRunning at the limit. The caller holds the lock."""
        self._threads = [thread for thread in self._threads if not thread.ended.is_set()]
        running = [thread for thread in self._threads if thread.name == name]
        if len(running) >= max_threads:
            hung = [thread for thread in running if thread.is_hung()]
            if hung == running:
                log.critical("worker hangs", work=name, threads=len(running))
                self.end_process()
            raise StillRunning(f"earlier passes that still run: {len(running)}")
        thread = WorkThread(name, work, self._reusable, clock=self._clock)
        self._threads.append(thread)
        return thread

    def close_idle(self) -> None:
        """End the threads without work, with their database connections."""
        self._reusable.close_idle()

    def end_process(self) -> None:
        """End the process at once: there is no other way to end a hung thread."""
        os._exit(1)


THREADS = WorkThreads()


def mark_worker_thread() -> None:
    """Mark the calling thread as one that executes tasks of the queue. The limit on long calls does not apply to it."""
    _current_thread.is_worker = True
    long_calls.exempt_thread()


def is_worker_thread() -> bool:
    return getattr(_current_thread, "is_worker", False)


def run_in_work_thread(
    name: str, work: Callable[[], T], *, wait: timedelta | None = None, max_threads: int = MAX_THREADS_PER_NAME
) -> T:
    """Call `work` through WorkThreads.run if the calling thread executes tasks of the queue, else directly."""
    return THREADS.run(name, work, wait=wait, max_threads=max_threads) if is_worker_thread() else work()
