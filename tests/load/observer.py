"""Observation of the engine and the database once a second: container time, and the recovery of the sweeps."""

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
    """Thread that observes until `stop` is called. While the engine is down, the last listing counts."""

    system: System
    running_seconds: float = 0.0  # of all sandboxes, by the engine's listings
    existing_seconds: float = 0.0  # includes containers that a restart of the engine has stopped
    sweeps: list[tuple[float, float]] = field(default_factory=list)  # (monotonic clock, newest success of a sweep in seconds)
    _states: list[str] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        last = time.monotonic()
        while not self._done.wait(INTERVAL_SECONDS):
            self._states = self._list_states()
            now = time.monotonic()
            self.running_seconds += self._states.count("running") * (now - last)
            self.existing_seconds += len(self._states) * (now - last)
            last = now
            self._note_sweeps(now)

    def stop(self) -> None:
        self._done.set()

    def _list_states(self) -> list[str]:
        try:
            with closing(APIClient(self.system.engine.url, version="auto", timeout=5)) as client:
                return [container["State"] for container in client.containers(all=True, filters={"label": LABEL})]
        except (DockerException, RequestException):
            return self._states

    def _note_sweeps(self, now: float) -> None:
        try:
            [(newest,)] = self.system.select("SELECT extract(epoch FROM max(succeeded_at)) FROM sandboxes_sweep")
            self.sweeps.append((now, float(newest or 0)))
        except psycopg.Error:
            pass
