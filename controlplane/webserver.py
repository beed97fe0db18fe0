"""Web server of one process: granian's threads, in the process that calls it."""

import resource
import threading
from collections.abc import Callable, Sequence
from typing import Any

from django.conf import settings
from granian.constants import HTTPModes, Interfaces
from granian.log import LogLevels
from granian.server import MTServer, mt
from granian.wsgi import ResponseIterWrap
from granian.wsgi import _callback_wrapper as wrap_application

from leases.api import command_threads
from leases.api.streams import EventStreamResponse
from sandboxes.runs.retention import ACKNOWLEDGER
from sandboxes.streams.registry import OPEN_STREAMS

THREAD_IDLE_SECONDS = 600  # a database connection ends with its thread


class ThreadServer(MTServer):
    """Server whose worker is a thread of this process instead of a process of its own.

    granian offers it to interpreters without the GIL only, where several such workers would run Python at the same time. A
    single worker is the same code as that of granian's worker process."""

    def _check_gil(self) -> None:
        pass

    def shutdown(self, exit_code: int = 0) -> None:
        OPEN_STREAMS.stop()  # granian waits for all responses
        super().shutdown(exit_code)


class DetachingProtocol:
    """Protocol of one request that sends event streams from threads of their own.

    granian sends a response that is an iterator from the thread in which it called the application, one of WEB_THREADS. An
    event stream is mostly idle, and would occupy that thread until its end."""

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


def _wrap_application(application: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    """Return granian's callback for an application, with a DetachingProtocol."""
    call = wrap_application(application, *options)
    return lambda protocol, scope: call(DetachingProtocol(protocol), scope)


# granian has no option for it. tests/e2e/test_streams.py fails if the name changes.
mt._wsgi_call_wrap = _wrap_application  # type: ignore[assignment]


def serve(host: str, port: int) -> None:
    """Serve HTTP until SIGTERM or SIGINT, then accept no more requests and finish those in progress. Main thread only.

    Several processes may serve the same port."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a stream has two: client and gateway
    build_server(host, port).serve()
    command_threads.join_all()
    ACKNOWLEDGER.flush()


def build_server(host: str, port: int) -> ThreadServer:
    """Return a server that is not started. With a backpressure below the default, idle connections block others."""
    return ThreadServer(
        "controlplane.wsgi:application", host, port,
        interface=Interfaces.WSGI, http=HTTPModes.http1, websockets=False,
        blocking_threads=settings.WEB_THREADS, blocking_threads_idle_timeout=THREAD_IDLE_SECONDS,
        log_level=LogLevels.error,
    )  # fmt: skip
