"""Daemon threads that execute one call after the other. Between the calls others may use their connections to PostgreSQL."""

import queue
import threading
from collections.abc import Callable
from contextvars import Context

from django.db import close_old_connections, connections

IDLE_SECONDS = 150.0  # until an idle thread ends: longer than the pause between two rounds of sweeps
JOIN_SECONDS = 10.0


class _ReusableThread(threading.Thread):
    def __init__(self, pool: "ReusableThreads") -> None:
        super().__init__(daemon=True)
        self.calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._pool = pool

    def run(self) -> None:
        try:
            while call := self._wait_for_call():
                name, act, end = call
                self.name = name
                close_old_connections()  # those that are too old or were lost; the others are checked before their first query
                try:
                    Context().run(act)  # as in a new thread: no call sees the context of an earlier one
                finally:
                    close_old_connections()
                    self._pool._give_back(self)
                    end()
        finally:
            connections.close_all()

    def _wait_for_call(self) -> "Call | None":
        while True:
            try:
                return self.calls.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if self._pool._forget(self):
                    return None  # otherwise a call is on its way


Call = tuple[str, Callable[[], None], Callable[[], None]]


class ReusableThreads:
    """Threads of this process, as many as there are calls at the same time. The last idle thread is used first."""

    def __init__(self) -> None:
        self._idle: list[_ReusableThread] = []
        self._lock = threading.Lock()

    def start(self, name: str, act: Callable[[], None], end: Callable[[], None]) -> None:
        """Call `act` in a thread of this name, which must not raise, and then `end`, when the thread may be used again."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        if thread is None:
            thread = _ReusableThread(self)
            thread.start()
        thread.calls.put((name, act, end))

    def close_idle(self) -> None:
        """End the idle threads and their connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.calls.put(None)
        for thread in idle:
            thread.join(JOIN_SECONDS)

    def _give_back(self, thread: _ReusableThread) -> None:
        with self._lock:
            self._idle.append(thread)

    def _forget(self, thread: _ReusableThread) -> bool:
        """Return whether the thread was idle. It is not used any more then."""
        with self._lock:
            if thread in self._idle:
                self._idle.remove(thread)
                return True
        return False
