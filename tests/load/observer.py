"""Observation of the engine and the database once a second: container time, late sweeps, and the recovery of each part."""

import threading
import time
from contextlib import closing
from dataclasses import dataclass, field

import psycopg
from docker import APIClient
from docker.errors import DockerException
from requests.exceptions import RequestException

from tests.load.system import System

INTERVAL_SECONDS = 1.0
LABEL = "leasehold.name"


@dataclass
class Observer:
    """Thread that observes until `stop` is set."""

    system: System
    container_seconds: float = 0.0  # of sandboxes, by the engine's listing; the last one counts while the engine is down
    sweeps: list[tuple[float, float]] = field(default_factory=list)  # (monotonic clock, newest success of a sweep in seconds)
    _listed: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        last = time.monotonic()
        while not self._done.wait(INTERVAL_SECONDS):
            self._listed = self._count_containers()
            now = time.monotonic()
            self.container_seconds += self._listed * (now - last)
            last = now
            self._note_sweeps(now)

    def stop(self) -> None:
        self._done.set()

    def _count_containers(self) -> int:
        try:
            with closing(APIClient(self.system.engine.url, version="auto", timeout=5)) as client:
                return len(client.containers(all=True, filters={"label": LABEL}))
        except (DockerException, RequestException):
            return self._listed

    def _note_sweeps(self, now: float) -> None:
        try:
            [(newest,)] = self.system.select("SELECT extract(epoch FROM max(succeeded_at)) FROM sandboxes_sweep")
            self.sweeps.append((now, float(newest or 0)))
        except psycopg.Error:
            pass
