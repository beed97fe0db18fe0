"""Threads of the web process that execute streamed commands: a client that goes away does not end its command."""

import threading
from collections.abc import Callable

from django.db import connections
from django.http import HttpResponse

_threads = set[threading.Thread]()


class CommandThread(threading.Thread):
    """Thread of one request that executes a command. `response` is that of the request once it is answered.

    The number of such threads is limited as that of execs without a stream: by sandboxes.long_calls."""

    def __init__(self, respond: Callable[[threading.Event], HttpResponse]) -> None:
        """`respond` receives an event that it sets when the command starts."""
        super().__init__(name="streamed-command", daemon=True)
        self._respond, self._ready = respond, threading.Event()
        self.response: HttpResponse | None = None

    def run(self) -> None:
        try:
            self.response = self._respond(self._ready)
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
