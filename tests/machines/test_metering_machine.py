"""Hypothesis state machine of the pool with metering.

Metered time and CPU equal those of the provider's clock and counters, to the microsecond. Deriving the records again gives the
same records."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from pytest_django import Settings

from billing import metering
from billing.dates import start_of_hour
from billing.models import Meter, UsageKind, UsageRecord
from sandboxes import lifecycle
from sandboxes.db import clock as db_clock
from sandboxes.models import Pool, Sandbox, Transition
from sandboxes.pool import allocation
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory.provider import DEFAULT_ENGINE_ID
from sandboxes.sweeps import measurements
from sandboxes.usage import readings
from tests.conftest import SimulatedCrash
from tests.machines.test_pool_machine import ROW_INDEX, PoolMachine
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: metering aggregates in the database")]
# Metering has no SQL dialect of its own, so PostgreSQL, the slower, gets half of the examples. 2,000 random histories take
# ten minutes.
READY = {"warm", "running", "waiting"}  # billed states
FACTS = [
    "item", "source", "day", "began_at", "ended_at", "sandbox_id", "holder", "agent_did", "environment_id", "provider", "state",
    "memory_mib", "millicpus", "measured", "cpu_micros", "mib_micros", "size_bytes", "model", "calls", "input_tokens", "usd",
    "estimated_tokens",
]  # fmt: skip
TimeRange = tuple[datetime, datetime]
HOUR = timedelta(hours=1)


class SimulatedTime:
    """Clock that advances only during sleep()."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class ObservedSandboxes(dict[str, Any]):
    """The memory provider's sandboxes, with the time ranges in which each existed."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__()
        self.clock, self.since = clock, {}
        self.ranges: dict[str, list[TimeRange]] = defaultdict(list)
        self.vanished: set[str] = set()
        self.used: dict[str, int] = {}  # CPU microseconds of removed sandboxes

    def setdefault(self, name: str, sandbox: Any = None) -> Any:
        if name not in self:
            self.since[name] = self.clock()
        return super().setdefault(name, sandbox)

    def __delitem__(self, name: str) -> None:
        self.vanished.add(name)  # only the rule vanish_sandbox deletes items
        self._end(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self._end(name)
        return super().pop(name, *default)

    def _end(self, name: str) -> None:
        if name in self:
            self.ranges[name].append((self.since.pop(name), self.clock()))
            self.used[name] = self[name].used.cpu_micros


class MeteredMachine(PoolMachine):
    calm = False
    simulated_time: SimulatedTime

    @initialize()
    def begin(self) -> None:
        super().begin()
        Pool.objects.exclude(pk=self.pool.pk).delete()  # otherwise each reconciliation asks the Docker Engine
        self.began = self.simulated_time.at
        self.observed = ObservedSandboxes(self.clock)
        self.memory._engines[DEFAULT_ENGINE_ID] = self.observed
        self.counted = True

    def check_invariants(self, *args: object) -> None:
        """Skip the pool's invariants after each step: test_pool_machine checks them."""

    def clock(self) -> datetime:
        return self.now + timedelta(seconds=self.simulated_time.at - self.began)

    def attempt(self, act: Callable[[], object]) -> Any:
        self.began = self.simulated_time.at
        try:
            return super().attempt(act)
        finally:
            self.now, self.began = self.clock(), self.simulated_time.at

    @rule(index=ROW_INDEX, micros=st.integers(0, 10**9), mib=st.integers(0, 512))
    def use_resources(self, index: int, micros: int, mib: int) -> None:
        ready = Sandbox.objects.filter(pool=self.pool, state__in=READY).order_by("created_at", "pk")
        if existing := [sandbox.name for sandbox in ready if sandbox.name in self.observed]:
            self.memory.use(existing[index % len(existing)], cpu_micros=micros, memory_bytes=mib << 20)

    @rule()
    def read(self) -> None:
        self.attempt(lambda: measurements.record_readings(now=self.now))

    @rule()
    def fail_stats(self) -> None:
        self.counted = False
        self.armed.push(self.memory.fail("stats", Unavailable("stats failed"), times=1))

    @rule()
    def meter(self) -> None:
        self.attempt(lambda: metering.meter_usage(now=self.now))

    @rule()
    def crash_meter(self) -> None:
        """Crash in the second batch of the meter."""

        def die(reached: str, subject: object) -> None:
            if (reached, subject) == ("metered", "snapshots"):
                raise SimulatedCrash

        lifecycle.CHECKPOINT_HOOKS.append(die)
        self.attempt(lambda: metering.meter_usage(now=self.now))
        lifecycle.CHECKPOINT_HOOKS.remove(die)

    def settle(self) -> None:
        self.began = self.simulated_time.at
        super().settle()
        self.now += timedelta(hours=1)
        for sandbox in readings.find_readable().filter(pool=self.pool):
            if sandbox.name in self.observed:
                readings.record_reading(sandbox, self.memory, now=self.now, min_cpu_micros=1)
        metering.meter_usage(now=self.now)
        self.check_cpu_is_metered_once()
        self.check_billed_time_existed()
        self.check_every_hour_is_complete()
        self.check_derivation_is_repeatable()

    def find_names(self, sandbox: Sandbox) -> set[str]:
        """Return the names of all incarnations of a row that have existed."""
        names = {*self.observed, *self.observed.ranges, *self.observed.used, *self.observed.vanished}
        return {name for name in names if name.startswith(f"leasehold-{sandbox.pk.hex}-")}

    def check_cpu_is_metered_once(self) -> None:
        for sandbox in Sandbox.objects.filter(pool=self.pool):
            names = self.find_names(sandbox)
            counted = sum(
                self.observed[name].used.cpu_micros if name in self.observed else self.observed.used.get(name, 0)
                for name in names
            )
            metered = sum(UsageRecord.objects.filter(sandbox=sandbox, item=UsageKind.USE).values_list("cpu_micros", flat=True))
            assert metered <= counted
            if self.counted and not self.observed.vanished & {*names}:
                assert metered == counted

    def check_billed_time_existed(self) -> None:
        for name, since in self.observed.since.items():
            self.observed.ranges[name].append((since, self.clock()))
        for sandbox in Sandbox.objects.filter(pool=self.pool):
            names = self.find_names(sandbox)
            if self.observed.vanished & {*names}:
                continue  # the end is unknown until a sweep notices the loss
            existing = [time_range for name in names for time_range in self.observed.ranges[name]]
            paid = [(row.began_at, row.ended_at) for row in usage(sandbox.pk) if row.state in READY]
            for hour in list_hours(paid):
                assert overlap(paid, [hour]) <= overlap(existing, [hour])

    def check_every_hour_is_complete(self) -> None:
        """Check for gaps and overlaps. Records of one hour may be rolled up, so its time is compared as a whole."""
        for sandbox in Sandbox.objects.filter(pool=self.pool):
            began = Transition.objects.filter(sandbox=sandbox).order_by("pk").values_list("at", flat=True)[0]
            life = (began, sandbox.destroyed_at or self.now)
            rows = [(row.began_at, row.ended_at) for row in usage(sandbox.pk)]
            for hour in list_hours([life, *rows]):
                assert overlap(rows, [hour]) == overlap([life], [hour])
            assert sandbox.metered == (sandbox.state == "destroyed") != Meter.objects.filter(pk=sandbox.pk).exists()

    def check_derivation_is_repeatable(self) -> None:
        before = records()
        metering.meter_usage(now=self.now - timedelta(hours=5))  # repeated, with an earlier time
        assert records() == before
        metering.reset_usage()
        assert not UsageRecord.objects.exists()
        metering.meter_usage(now=self.now)
        assert records() == before


def usage(sandbox: UUID) -> list[UsageRecord]:
    return [*UsageRecord.objects.filter(sandbox=sandbox, item=UsageKind.TIME)]


def records() -> list[tuple[Any, ...]]:
    return sorted(UsageRecord.objects.values_list(*FACTS), key=str)


def total(ranges: list[TimeRange]) -> timedelta:
    return sum((end - start for start, end in ranges), timedelta(0))


def list_hours(ranges: list[TimeRange]) -> list[TimeRange]:
    """Return the UTC hours in which any of the ranges lies."""
    hours = set[datetime]()
    for start, end in ranges:
        hour = start_of_hour(start)
        while hour <= end:
            hours.add(hour)
            hour += HOUR
    return [(hour, hour + HOUR) for hour in sorted(hours)]


def overlap(some: list[TimeRange], others: list[TimeRange]) -> timedelta:
    """Sum the time that each range of one list shares with each range of the other."""
    both = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return total([(start, end) for start, end in both if start < end])


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedTime]:
    simulated_time = SimulatedTime()
    for module in (db_clock, allocation):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=simulated_time.monotonic, sleep=simulated_time.sleep))
    MeteredMachine.simulated_time = simulated_time
    return simulated_time


def test_metered_use_equals_the_use_at_the_provider(simulated_time: SimulatedTime, settings: Settings) -> None:
    settings.SANDBOX_START_TIMEOUT = timedelta(seconds=1)
    run_state_machine_as_test(
        MeteredMachine,
        settings=hypothesis.settings(
            max_examples=budget(fast=6, full=40), stateful_step_count=30, deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )  # fmt: skip
