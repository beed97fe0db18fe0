"""Metered time compared with the engine's start and end events."""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from billing.alive_time import STATES_WITHOUT_PROCESS
from billing.metering import meter_usage
from billing.models import UsageKind, UsageRecord
from billing.rollup import HourParts
from leases import execution, leasing, sweeps
from sandboxes import eviction
from sandboxes.db import clock
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.docker.engine import Engine
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE
from tests.lanes.speed import Speedometer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
WITHIN = timedelta(seconds=1)
TimeInterval = tuple[datetime, datetime]


def test_each_container_run_is_metered_within_a_second(docker_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metering covers the time from the request to start until the confirmed end, so never less than the container ran.

    The times of a verb are behind the engine's by the time that passes between the reading of its `now` and its beginning,
    milliseconds on a busy machine. The excess is the latency of the engine: a second on the machine of the budgets, longer on a
    slower one, and arbitrary while the machine is busy. One success in ten tries suffices."""
    speedometer = Speedometer()
    for attempt in range(10):
        delays = record_delays(monkeypatch)
        by_engine, by_metering = run_lease(docker_pool, f"metered-{attempt}")
        behind = sum(delays, timedelta())
        assert len(by_engine) == len(by_metering) == 3
        for (started, ended), (since, until) in zip(by_engine, by_metering, strict=True):
            assert since <= started < ended <= until + behind
        pairs = zip(by_engine, by_metering, strict=True)
        longest = max((until - since) - (ended - started) for (started, ended), (since, until) in pairs)
        speedometer.sample()
        if longest <= WITHIN * speedometer.slowdown:
            return
    pytest.fail(f"metered time exceeds the run time by {longest}")


def record_delays(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """Let each clock of a verb record how old its `now` is at its start."""
    delays = list[timedelta]()

    def clock_from(now: datetime) -> clock.Clock:
        delays.append(timezone.now() - now)
        return clock.clock_from(now)

    for module in [*sys.modules.values()]:
        if getattr(module, "clock_from", None) is not None and module is not clock:
            monkeypatch.setattr(module, "clock_from", clock_from)
    return delays


def run_lease(pool: Pool, environment: str) -> tuple[list[TimeInterval], list[TimeInterval]]:
    """Run a lease whose sandbox sleeps twice. Return the containers' run times (by the engine, by metering)."""
    with engine_spans(pool) as spans:
        lease = leasing.acquire(leasing.LeaseRequest("did:plc:ada", environment, "coding", pool=pool.name), now=timezone.now())[
            0
        ]
        for _ in range(2):
            execution.exec_command(lease.pk, Command(argv=["sleep", "0.2"], timeout=MINUTE), now=timezone.now())
            box = Sandbox.objects.get(holder=lease.pk)
            assert eviction.evict(box.pk, now=timezone.now(), reason="test")
        execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=timezone.now())
        leasing.release(lease.pk, now=timezone.now())
        sweeps.reclaim(now=timezone.now())
        assert Sandbox.objects.get(holder=lease.pk).state == "destroyed"
        by_engine = wait_until(lambda: len(found := spans()) == 3 and found, "the engine has reported three ends")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HourParts, "find_start", lambda *_: None)  # no roll-up: a record for each time range
        meter_usage(now=timezone.now())
    return by_engine, metered_spans(box)


@contextmanager
def engine_spans(pool: Pool) -> Iterator[Callable[[], list[TimeInterval]]]:
    """Read the engine's events while the block runs. Yield a function that returns the run times of ended containers.

    The events are read as they occur: the engine keeps only the last 256, those of all containers of this machine included."""
    label = {"label": f"leasehold.owner={pool.owner}", "type": "container", "event": ["start", "die"]}
    events = Engine().client.events(filters=label, decode=True)
    seen: dict[str, dict[str, datetime]] = defaultdict(dict)

    def read() -> None:
        for event in events:
            seen[event["Actor"]["ID"]][event["Action"]] = datetime.fromtimestamp(event["timeNano"] / 1e9, UTC)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield lambda: sorted((each["start"], each["die"]) for each in [*seen.values()] if "die" in each)
    finally:
        events.close()
        reader.join()


def metered_spans(box: Sandbox) -> list[TimeInterval]:
    """Return a sandbox's run times from its usage records: from each start to the next sleep or the end."""
    spans: list[TimeInterval] = []
    rows = UsageRecord.objects.filter(sandbox=box, item=UsageKind.TIME).exclude(state__in=STATES_WITHOUT_PROCESS)
    for row in rows.order_by("began_at", "ended_at"):
        if spans and spans[-1][1] == row.began_at:
            spans[-1] = (spans[-1][0], row.ended_at)
        else:
            spans.append((row.began_at, row.ended_at))
    return spans
