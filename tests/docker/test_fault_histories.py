"""Random histories of leases on a Docker Engine of their own, with stops, removals, restarts of the daemon and crashes.

Containers are killed, stopped, restarted and removed, between commands and during them; the daemon is stopped gracefully,
killed, and dies with all processes of the host. After each history the faults end and the sweeps run. Then no command has run
twice, every acknowledged write is there, no lease is lost, and containers and volumes are those of the rows.
REMOTE_HISTORIES is the number of seeds; a failure names its seed."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
from django.utils import timezone

from leases import leasing, sweeps
from leases.models import Lease
from sandboxes.errors import StartsPaused
from sandboxes.models import GONE_STATES, Pool, Run, Sandbox
from sandboxes.pool import allocation
from tests.support.servers.engines import PrivateEngine
from tests.support.waiting import wait_until
from tests.unit.sandboxes.remote import test_fault_histories as remote_histories

COUNT = int(os.environ.get("REMOTE_HISTORIES", "0"))
SEEDS, STEPS = (range(1, 1 + COUNT), 16) if COUNT else ((1,), 8)  # in the matrix a short one
STOPS = ("kill", "stop -t 1", "restart -t 1", "rm -f")
DISTURBED_SECONDS = 20  # of a command that a stop ends
pytestmark = [
    pytest.mark.docker,
    pytest.mark.django_db(transaction=True),
    pytest.mark.matrix("a random history of minutes: test_lost_sandbox.py and test_engine_stop.py have a case of each fault"),
]


@dataclass
class History(remote_histories.History):
    """One history on one engine. Each agent appends lines to a file of its /data, which outlives its leases."""

    engine: PrivateEngine = field(kw_only=True)
    disturbed: int = 0  # stops and restarts that have happened

    def run(self, agent: str, script: str) -> bytes:
        self.now = max(self.now, timezone.now())  # a command takes as long as it takes
        return super().run(agent, script)

    def call_engine(self, *argv: str) -> str:
        done = subprocess.run(["docker", *argv], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    def stop_at_vendor(self, agent: str) -> None:
        """Stop or remove the container of an agent between two commands."""
        if sandbox := allocation.find_by_holder(self.get_lease(agent).pk):
            self.disturbed += bool(self.call_engine(*self.random.choice(STOPS).split(), sandbox.name))

    def append_disturbed(self, agent: str) -> None:
        """Append a line by a command during which the container is stopped or removed, or the daemon stops."""
        disturb = self.random.choice([self._stop_container, self._stop_container, self._shut_down])
        line = f"{agent}-{len(self.started[agent])}"
        self.started[agent].append(line)
        ended = threading.Event()
        thread = threading.Thread(target=disturb, args=(agent, self.random.choice(STOPS), ended))
        thread.start()
        try:
            self.run(agent, f"echo {line} >>/data/lines && exec sleep {DISTURBED_SECONDS}")
            self.acknowledged.add(line)
        finally:
            ended.set()
            thread.join()
            if not self.engine.is_running:
                self.engine.start()

    def _stop_container(self, agent: str, stop: str, ended: threading.Event) -> None:
        if name := self._await_command(ended):
            self.disturbed += bool(self.call_engine(*stop.split(), name))

    def _shut_down(self, agent: str, stop: str, ended: threading.Event) -> None:
        if self._await_command(ended):
            self.engine.shut_down()
            self.disturbed += 1

    def _await_command(self, ended: threading.Event) -> str:
        """Return the name of the container in which the disturbed command runs, "" if it does not begin."""

        def find() -> str:
            names = self.call_engine("ps", "--format", "{{.Names}}").split()
            running = (name for name in names if f"sleep {DISTURBED_SECONDS}" in self.call_engine("top", name))
            return next(running, "") or ("ended" if ended.is_set() else "")

        found = wait_until(find, "the command begins or ends", within=120, every=0.2)
        return "" if found == "ended" else found

    def restart_engine(self, agent: str) -> None:
        self.random.choice([self.engine.shut_down, self.engine.kill, self.engine.crash])()
        self.engine.start()
        self.disturbed += 1

    @contextmanager
    def crashing(self) -> Iterator[None]:
        try:
            with super().crashing():
                yield
        except StartsPaused:
            pass

    def step(self) -> None:
        operations = [self.append] * 3 + [self.append_disturbed] * 3 + [self.stop_at_vendor] * 2 + [self.sweep] * 3
        operations += [self.read, self.sleep, self.sleep, self.restart_engine, self.release]
        with self.crashing():
            self.random.choice(operations)(self.random.choice(remote_histories.AGENTS))
        self.now += timedelta(minutes=self.random.choice([0, 1, 5, 20]))


@pytest.mark.parametrize("seed", SEEDS)
def test_history_with_stops_and_restarts_keeps_the_promises(
    seed: int, engine: PrivateEngine, docker_pool: Pool, grant: Callable[..., Lease], settings: Any
) -> None:
    settings.SANDBOX_START_TIMEOUT = timedelta(seconds=30)  # also the wait for a start whose process has died
    acquire = partial(grant, pool=docker_pool.name)
    history = History(None, "docker", Random(seed), acquire, timezone.now(), engine=engine)  # type: ignore[arg-type]
    for _ in range(STEPS):
        history.step()
    assert history.disturbed
    for _ in range(3):
        history.now += timedelta(hours=2)
        history.sweep("")
    for agent in remote_histories.AGENTS:
        history.append(agent)
        assert history.read(agent)
    rows = Sandbox.objects.filter(pool=docker_pool)
    existing = {sandbox.name for sandbox in rows.exclude(state__in=(*GONE_STATES, "cold"))}
    assert {*history.call_engine("ps", "-a", "--format", "{{.Names}}").split()} == existing
    volumes = {f"{name}-{volume}" for name in existing for volume in ("data", "workspace")}
    assert {*history.call_engine("volume", "ls", "-q").split()} == volumes
    assert not Run.objects.filter(ended_at__isnull=True).exists()
    assert not rows.filter(lost_at__isnull=False).exists()
    assert {*Lease.objects.values_list("end_reason", flat=True)} <= {"", "released"}
    for lease in Lease.objects.filter(status="active"):
        leasing.release(lease.pk, now=history.now)
    for _ in range(2):
        sweeps.reclaim(now=history.now)
    assert history.call_engine("ps", "-aq") + history.call_engine("volume", "ls", "-q") == ""
