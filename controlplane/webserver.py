"""Web server of one process: granian's threads, in the process that calls it."""

from django.conf import settings
from granian.constants import HTTPModes, Interfaces
from granian.log import LogLevels
from granian.server import MTServer

from leases.api import command_threads
from leases.queue import runner
from sandboxes.db import tracing
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
        runner.get_runner().stop()
        super().shutdown(exit_code)


def serve(host: str, port: int) -> None:
    """Serve HTTP until SIGTERM or SIGINT, then accept no more requests and finish those in progress. Main thread only.

    Several processes may serve the same port."""
    runner.configure(settings.RUNNER_THREADS)
    runner.get_runner().start()
    build_server(host, port).serve()
    runner.get_runner().stop()
    command_threads.join_all()
    runner.get_runner().join()
    ACKNOWLEDGER.flush()
    tracing.flush()


def build_server(host: str, port: int) -> ThreadServer:
    """Return a server that is not started. With a backpressure below the default, idle connections block others."""
    return ThreadServer(
        "controlplane.wsgi:application", host, port,
        interface=Interfaces.WSGI, http=HTTPModes.http1, websockets=False,
        blocking_threads=settings.WEB_THREADS, blocking_threads_idle_timeout=THREAD_IDLE_SECONDS,
        log_level=LogLevels.error,
    )  # fmt: skip
