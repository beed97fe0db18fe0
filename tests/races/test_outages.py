"""Outages of the database at every statement and commit of an operation: repeated, it takes effect once and loses nothing."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError

from billing import metering
from billing.models import UsageRecord
from leases import leasing, sweeps
from leases.models import EnvironmentType, Lease
from sandboxes import claims
from sandboxes.db.connection_errors import RetriesExhausted
from sandboxes.errors import SandboxBusy, SandboxError
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.pool import allocation
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.memory.programs import ProgramCall, ProgramResult
from sandboxes.state import data_sync
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import assert_converged, get_sandbox, read, run, write
from tests.support.outages import Outage, Weather, any_outage, any_outage_of_server_too, injected

pytestmark = pytest.mark.django_db(transaction=True)
WEATHER = (OperationalError, RetriesExhausted, SandboxError)
IDLE, LATER = NOW + 10 * MINUTE, NOW + timedelta(hours=1)


@dataclass
class Sandboxes:
    """Leases of a test, one at each step."""

    grant: Callable[..., Lease]
    pool: Pool
    memory: MemoryProvider

    def start(self, environment: str) -> Lease:
        return self.grant(environment=environment)

    def write(self, environment: str) -> Lease:
        lease = self.start(environment)
        write(lease)
        return lease

    def sleep(self, environment: str) -> Lease:
        lease = self.write(environment)
        passes.evict_idle(now=IDLE)
        return lease


def give_up(seconds: float) -> None:
    raise SandboxBusy("another process has the sandbox")


@pytest.fixture
def sandboxes(
    grant: Callable[..., Lease], pool: Pool, memory: MemoryProvider, failover: Any, monkeypatch: pytest.MonkeyPatch
) -> Sandboxes:
    """Sandboxes of which a start, sleep or pull in progress is not waited for: a request is answered "busy"."""
    monkeypatch.setattr(allocation, "time", SimpleNamespace(sleep=give_up))
    monkeypatch.setattr(data_sync, "time", SimpleNamespace(sleep=give_up))
    return Sandboxes(grant, pool, memory)


def survive(act: Callable[[], object], outage: Outage, *, now: datetime) -> datetime | None:
    """Act at `now` during an outage and again after it, as clients and sweeps do. Return the time of the sweeps after it.

    Workers that got an error have ended their claims two minutes later, before any deadline, also those whose answer was lost.
    None if the outage has not begun."""
    with injected(outage):
        with suppress(*WEATHER):
            act()
        if not outage.has_begun:
            return None
        outage.end()
    claims.HEARTBEAT.beat()
    with suppress(SandboxError):  # busy: the first attempt counts until its claim expires
        act()
    later = now + 2 * MINUTE
    sweep(later)
    return later


def sweep(now: datetime) -> None:
    sweeps.recover_stalled(now=now)
    sweeps.reclaim(now=now)
    sweeps.reconcile(now=now, grace=timedelta(0))


def release(lease: Lease) -> None:
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)


@any_outage_of_server_too
def test_exec_at_any_step(sandboxes: Sandboxes, weather: Weather) -> None:
    """The client has no answer, and repeats the command without a key: each Run executes it once."""
    executions, lease = Counter[str](), sandboxes.write("e")

    def execute(call: ProgramCall) -> ProgramResult:
        executions[call.argv[1]] += 1
        return ProgramResult()

    sandboxes.memory.programs["count"] = execute
    for step in weather.list_steps():
        later = survive(partial(run, lease, "count", str(step)), weather.begin(step), now=NOW)
        if later is None:
            break
        runs = Run.objects.filter(argv=["count", str(step)])
        assert (step, runs.filter(outcome="open").count(), get_sandbox(lease).open_runs) == (step, 0, 0)
        assert (step, 1 <= runs.filter(outcome="ok").count() <= executions[str(step)] <= runs.count() <= 2) == (step, True)
        assert run(lease, now=later).exit_code == 0
    assert step > 5


@any_outage_of_server_too
def test_start_at_any_step(sandboxes: Sandboxes, weather: Weather) -> None:
    for step in weather.list_steps():
        later = survive(partial(sandboxes.write, f"e{step}"), weather.begin(step), now=NOW)
        if later is None:
            break
        lease = sandboxes.start(f"e{step}")
        assert (step, run(lease, now=later).exit_code) == (step, 0)
        assert Lease.objects.filter(environment_id=f"e{step}", ended_at__isnull=True).count() == 1
        assert_converged(sandboxes.pool, sandboxes.memory)
    assert step > 15


@any_outage_of_server_too
def test_sleep_at_any_step(sandboxes: Sandboxes, weather: Weather) -> None:
    for step in weather.list_steps():
        lease = sandboxes.write(f"e{step}")
        later = survive(partial(passes.evict_idle, now=IDLE), weather.begin(step), now=IDLE)
        if later is None:
            break
        passes.evict_idle(now=later)
        assert (step, Sandbox.objects.get(holder=lease.pk).state) == (step, "cold")
        assert read(lease, now=later) == "kept"
        assert_converged(sandboxes.pool, sandboxes.memory)
        release(lease)
    assert step > 10


@any_outage
def test_wake_at_any_step(sandboxes: Sandboxes, weather: Weather) -> None:
    for step in weather.list_steps():
        lease = sandboxes.sleep(f"e{step}")
        later = survive(partial(read, lease, now=IDLE + MINUTE), weather.begin(step), now=IDLE + MINUTE)
        if later is None:
            break
        assert (step, read(lease, now=later)) == (step, "kept")
        assert_converged(sandboxes.pool, sandboxes.memory)
        release(lease)
    assert step > 10


@any_outage
def test_suspension_at_any_step(sandboxes: Sandboxes, weather: Weather) -> None:
    EnvironmentType.objects.update(suspend_after=MINUTE)
    for step in weather.list_steps():
        lease = sandboxes.write(f"e{step}")
        act, now = partial(passes.suspend_waiting, now=NOW + 2 * MINUTE), NOW + 2 * MINUTE
        later = survive(act, weather.begin(step), now=now)
        if later is None:
            break
        passes.suspend_waiting(now=later)
        assert (step, Sandbox.objects.get(holder=lease.pk).state) == (step, "suspended")
        assert read(lease, now=later) == "kept"
        assert_converged(sandboxes.pool, sandboxes.memory)
        release(lease)
    assert step > 5


@any_outage_of_server_too
def test_release_and_destroy_at_any_step(sandboxes: Sandboxes, weather: Weather) -> None:
    for step in weather.list_steps():
        lease = sandboxes.write(f"e{step}")
        later = survive(partial(release, lease), weather.begin(step), now=NOW)
        if later is None:
            break
        lease.refresh_from_db()
        assert (step, lease.ended_at is not None, lease.end_reason) == (step, True, "released")
        assert_converged(sandboxes.pool, sandboxes.memory)
        assert not sandboxes.memory.list(str(sandboxes.pool.owner))
    assert step > 10


@any_outage_of_server_too
def test_metering_at_any_step(sandboxes: Sandboxes, weather: Weather) -> None:
    for step in weather.list_steps():
        release(sandboxes.write(f"e{step}"))
        now = LATER + step * MINUTE
        later = survive(partial(metering.meter_usage, now=now), weather.begin(step), now=now)
        if later is None:
            break
        metering.meter_usage(now=now)
        metered = read_usage()
        metering.reset_usage()
        metering.meter_usage(now=now)
        assert (step, read_usage()) == (step, metered)
    assert step > 10


def read_usage() -> list[tuple[Any, ...]]:
    return sorted(
        UsageRecord.objects.values_list("sandbox_id", "item", "state", "began_at", "ended_at", "calls", "size_bytes"), key=str
    )
