"""Web server, queue worker and egress server as threads of one process: LEASEHOLD_PROFILE=small."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import structlog

from controlplane import webserver
from controlplane.worker.cluster import Cluster
from controlplane.worker.heartbeat import HeartbeatFile
from sandboxes.egress import nginx
from sandboxes.hosts import registry
from sandboxes.management.commands import egress

log = structlog.get_logger(__name__)
RESTART_DELAY_SECONDS = 5.0


class Server(Protocol):
    """Part of the process. `run` returns after `stop`, which any thread may call at any time."""

    def run(self) -> None: ...

    def stop(self) -> None: ...


class EgressPart:
    """Egress server with an event loop of its own."""

    def __init__(self) -> None:
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(egress.Command().serve(nginx.get_proxy_kind(), self._stop))

    def stop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._stop.set)


class PartThread(threading.Thread):
    """Thread that runs a server until `stop`. A server that fails is started again, as `up` restarts a process that ends."""

    def __init__(self, name: str, make: Callable[[], Server]) -> None:
        super().__init__(name=name, daemon=True)
        self._make, self._server, self._stopping = make, None, threading.Event()

    _server: Server | None

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._server = self._make()
                if self._stopping.is_set():
                    self._server.stop()
                self._server.run()
            except Exception as error:
                log.exception("part failed, starting it again", part=self.name, error=f"{type(error).__name__}: {error}")
            self._stopping.wait(RESTART_DELAY_SECONDS)

    def stop(self) -> None:
        self._stopping.set()
        if self._server:
            self._server.stop()


def serve(host: str, port: int, *, with_queue: bool) -> None:
    """Serve until SIGTERM. The web server finishes its requests, which need the egress server, before the others stop."""
    parts = [PartThread("egress", EgressPart)]
    if with_queue:
        parts.append(PartThread("queue", lambda: Cluster(registry.get_queue_name(), HeartbeatFile())))
    for part in parts:
        part.start()
    webserver.serve(host, port)
    for part in parts:
        part.stop()
    for part in parts:
        part.join()
