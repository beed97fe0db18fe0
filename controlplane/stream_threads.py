"""Threads of granian's workers that send event streams.

granian sends a response that is an iterator from the thread in which it called the application, one of WEB_THREADS. An event
stream is mostly idle, and would occupy that thread until its end. granian has no option for other threads, so the callback
that it makes of a WSGI application is replaced. tests/e2e/test_streams.py fails if a version of granian makes it
differently."""

import resource
import threading
from collections.abc import Callable, Sequence
from typing import Any

from granian.server import mp, mt
from granian.wsgi import ResponseIterWrap
from granian.wsgi import _callback_wrapper as wrap_application

from leases.api.streams import EventStreamResponse
from sandboxes.streams.registry import OPEN_STREAMS


def install() -> None:
    """Send the event streams of this process from threads of their own. Call this function before a worker starts."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a stream has two files: client and gateway
    mt._wsgi_call_wrap = mp._wsgi_call_wrap = _wrap_application  # type: ignore[assignment]
    OPEN_STREAMS.occupy_threads = False


def _wrap_application(application: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    """Return granian's callback for an application, with a DetachingProtocol."""
    call = wrap_application(application, *options)
    return lambda protocol, scope: call(DetachingProtocol(protocol), scope)


class DetachingProtocol:
    """Protocol of one request that sends event streams from threads of their own."""

    __slots__ = ("_protocol", "response_bytes")

    def __init__(self, protocol: Any) -> None:
        self._protocol, self.response_bytes = protocol, protocol.response_bytes

    def response_iter(self, status: int, headers: Sequence[tuple[str, str]], body: ResponseIterWrap) -> None:
        arguments = status, headers, body
        if not isinstance(body.inner, EventStreamResponse):
            self._protocol.response_iter(*arguments)
            return
        try:
            threading.Thread(target=self._protocol.response_iter, args=arguments, name="stream", daemon=True).start()
        except BaseException:
            body.close()
            raise
