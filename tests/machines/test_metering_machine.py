"""The machine of the pool again, with a meter beside it: whatever happens, what is metered is what the provider's own clock
says, and its counter of CPU, to the microsecond, and deriving it all again gives the same records."""

import os
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
from billing.models import Meter, UsageKind, UsageRecord
from sandboxes import lifecycle, pool
from sandboxes import sweeps as below
from sandboxes.db import clock as moments
from sandboxes.models import Sandbox, Transition
from sandboxes.providers.base import Unavailable
from sandboxes.usage import readings
from tests.conftest import SimulatedCrash
from tests.machines.test_pool_machine import WHICH, PoolMachine

pytestmark = pytest.mark.django_db
EXAMPLES = int(os.environ.get("METERING_MACHINE_EXAMPLES", "60"))  # each a random history: some 2,000 take half an hour
READY = {"warm", "running", "waiting"}  # what is paid for
FACTS = [
    "item", "source", "day", "began_at", "ended_at", "sandbox_id", "holder", "agent_did", "environment_id", "provider", "state",
    "memory_mib", "millicpus", "measured", "cpu_micros", "mib_micros", "size_bytes", "model", "calls", "input_tokens", "usd",
]  # fmt: skip
Span = tuple[datetime, datetime]


class Slow:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class Boxes(dict[str, Any]):
    """The memory provider's sandboxes, and when each was there: name -> since, and spans that are over."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__()
        self.clock, self.since = clock, {}
        self.spans: dict[str, list[Span]] = defaultdict(list)
        self.vanished: set[str] = set()
        self.used: dict[str, int] = {}  # microseconds of CPU of those that are gone

    def setdefault(self, name: str, box: Any = None) -> Any:
        if name not in self:
            self.since[name] = self.clock()
        return super().setdefault(name, box)

    def __delitem__(self, name: str) -> None:
        self.vanished.add(name)  # by the machine's rule alone
        self._end(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self._end(name)
        return super().pop(name, *default)

    def _end(self, name: str) -> None:
        if name in self:
            self.spans[name].append((self.since.pop(name), self.clock()))
            self.used[name] = self[name].used.cpu_micros


class MeteredMachine(PoolMachine):
    calm = False
    slow: Slow

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.began = self.slow.at
        self.memory._boxes = self.boxes = Boxes(self.clock)
        self.counted = True

    def clock(self) -> datetime:
        return self.now + timedelta(seconds=self.slow.at - self.began)

    def attempt(self, act: Callable[[], object]) -> Any:
        self.began = self.slow.at
        try:
            return super().attempt(act)
        finally:
            self.now, self.began = self.clock(), self.slow.at

    @rule(which=WHICH, micros=st.integers(0, 10**9), mib=st.integers(0, 512))
    def it_uses(self, which: int, micros: int, mib: int) -> None:
        ready = Sandbox.objects.filter(pool=self.pool, state__in=READY).order_by("created_at", "pk")
        if there := [box.name for box in ready if box.name in self.boxes]:
            self.memory.use(there[which % len(there)], cpu_micros=micros, memory_bytes=mib << 20)

    @rule()
    def read(self) -> None:
        self.attempt(lambda: below.record_readings(now=self.now))

    @rule()
    def the_provider_does_not_count(self) -> None:
        self.counted = False
        self.armed.push(self.memory.fail("stats", Unavailable("stats failed"), times=1))

    @rule()
    def meter(self) -> None:
        self.attempt(lambda: metering.meter_usage(now=self.now))

    @rule()
    def the_meter_dies(self) -> None:
        """In its second batch, before or after that is committed."""

        def die(reached: str, subject: object) -> None:
            if (reached, subject) == ("metered", "snapshots"):
                raise SimulatedCrash

        lifecycle.CHECKPOINT_HOOKS.append(die)
        self.attempt(lambda: metering.meter_usage(now=self.now))
        lifecycle.CHECKPOINT_HOOKS.remove(die)

    def settle(self) -> None:
        self.began = self.slow.at
        super().settle()
        self.now += timedelta(hours=1)
        for box in readings.find_readable().filter(pool=self.pool):
            if box.name in self.boxes:
                readings.record_reading(box, self.memory, now=self.now, least=1)
        metering.meter_usage(now=self.now)
        self.all_cpu_is_metered_and_none_twice()
        self.every_paid_second_was_there()
        self.nothing_overlaps_and_nothing_is_left_out()
        self.derived_again_it_is_the_same()

    def all_cpu_is_metered_and_none_twice(self) -> None:
        for box in Sandbox.objects.filter(pool=self.pool):
            names = [f"leasehold-{box.pk.hex}-{number}" for number in range(1, box.incarnation + 1)]
            counted = sum(
                self.boxes[name].used.cpu_micros if name in self.boxes else self.boxes.used.get(name, 0) for name in names
            )
            metered = sum(UsageRecord.objects.filter(sandbox=box, item=UsageKind.USE).values_list("cpu_micros", flat=True))
            assert metered <= counted
            if self.counted and not self.boxes.vanished & {*names}:
                assert metered == counted

    def every_paid_second_was_there(self) -> None:
        for name, since in self.boxes.since.items():
            self.boxes.spans[name].append((since, self.clock()))
        for box in Sandbox.objects.filter(pool=self.pool):
            names = [f"leasehold-{box.pk.hex}-{number}" for number in range(1, box.incarnation + 1)]
            if self.boxes.vanished & {*names}:
                continue  # until a sweep has noticed it, nobody knows
            there = [span for name in names for span in self.boxes.spans[name]]
            paid = [(row.began_at, row.ended_at) for row in usage(box.pk) if row.state in READY]
            assert overlap(paid, there) == total(paid)

    def nothing_overlaps_and_nothing_is_left_out(self) -> None:
        for box in Sandbox.objects.filter(pool=self.pool):
            rows = sorted(usage(box.pk), key=lambda row: row.began_at)
            began = Transition.objects.filter(sandbox=box).order_by("pk").values_list("at", flat=True)[0]
            ended = box.destroyed_at or self.now
            assert total([(row.began_at, row.ended_at) for row in rows]) == ended - began
            for before, after in zip([(began, began), *((row.began_at, row.ended_at) for row in rows)], rows, strict=False):
                assert before[1] == after.began_at
            assert box.metered == (box.state == "destroyed") != Meter.objects.filter(pk=box.pk).exists()

    def derived_again_it_is_the_same(self) -> None:
        before = records()
        metering.meter_usage(now=self.now - timedelta(hours=5))  # twice, and by a clock that is late
        assert records() == before
        metering.reset_usage()
        assert not UsageRecord.objects.exists()
        metering.meter_usage(now=self.now)
        assert records() == before


def usage(sandbox: UUID) -> list[UsageRecord]:
    return [*UsageRecord.objects.filter(sandbox=sandbox, item=UsageKind.TIME)]


def records() -> list[tuple[Any, ...]]:
    return sorted(UsageRecord.objects.values_list(*FACTS), key=str)


def total(spans: list[Span]) -> timedelta:
    return sum((end - start for start, end in spans), timedelta(0))


def overlap(some: list[Span], others: list[Span]) -> timedelta:
    """How long both were at once; in each list no two overlap."""
    both = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return total([(start, end) for start, end in both if start < end])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow()
    for module in (moments, pool):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=slow.monotonic, sleep=slow.sleep))
    MeteredMachine.slow = slow
    return slow


def test_metered_use_equals_the_use_at_the_provider(slow: Slow, settings: Settings) -> None:
    settings.SANDBOX_START_TIMEOUT = timedelta(seconds=1)
    run_state_machine_as_test(
        MeteredMachine,
        settings=hypothesis.settings(
            max_examples=EXAMPLES, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )  # fmt: skip
