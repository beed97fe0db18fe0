"""Threads of the web process that execute streamed commands: a client that goes away does not end its command."""

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Generic, TypeVar

import structlog
from django.db import connections

log = structlog.get_logger(__name__)
T = TypeVar("T")
_threads = set[threading.Thread]()


class CommandThread(threading.Thread, Generic[T]):
    """Thread of one request that executes a command. `response` is the result of `execute`, or `error` its exception.

    The number of such threads is limited as that of execs without a stream: by sandboxes.long_calls."""

    def __init__(self, execute: Callable[[threading.Event], T]) -> None:
        """`execute` receives an event that it sets when the command starts."""
        super().__init__(name="streamed-command", daemon=True)
        self._context = copy_context()  # of the request: its trace
        self._execute, self._ready = execute, threading.Event()
        self.response: T | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.response = self._context.run(self._execute, self._ready)
        except Exception as error:
            self.error = error
            if self._ready.is_set():  # the request is answered
                log.warning("command failed after its request was answered", error=f"{type(error).__name__}: {error}")
        finally:
            _threads.discard(self)
            self._ready.set()
            connections.close_all()

    def start_and_wait(self) -> None:
        """Start the thread, and return when its command has started or its request is answered."""
        _threads.add(self)
        self.start()
        self._ready.wait()


def join_all() -> None:
    """Wait until every command has ended and its result is recorded."""
    for thread in [*_threads]:
        thread.join()
