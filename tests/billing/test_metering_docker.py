"""Metered time against the engine's own: when it says that each container started, and that it ended."""

import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from billing.metering import WITHOUT_PROCESS, meter
from billing.models import Item, UsageRecord
from leases import acting, leasing, sweeps
from sandboxes import retiring
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.engine import Engine
from sandboxes.runs import Command
from tests.conftest import MINUTE

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
WITHIN = timedelta(seconds=1)
Span = tuple[datetime, datetime]


def test_each_time_a_container_ran_is_metered_within_a_second(docker_pool: Pool) -> None:
    began = int(time.time())
    ask = leasing.Ask("did:plc:ada", "metered", "coding", pool=docker_pool.name)
    lease = leasing.acquire(ask, now=timezone.now())[0]
    for _ in range(2):
        acting.exec_in(lease.pk, Command(argv=["sleep", "1.5"], timeout=MINUTE), now=timezone.now())
        box = Sandbox.objects.get(holder=lease.pk)
        assert retiring.sleep(box.pk, now=timezone.now(), reason="test")
    acting.exec_in(lease.pk, Command(argv=["true"], timeout=MINUTE), now=timezone.now())
    leasing.release(lease.pk, now=timezone.now())
    sweeps.reclaim(now=timezone.now())
    assert Sandbox.objects.get(holder=lease.pk).state == "destroyed"
    meter(now=timezone.now())
    by_engine, by_us = ran(docker_pool, since=began), metered(box)
    assert len(by_engine) == len(by_us) == 3
    for (started, ended), (since, until) in zip(by_engine, by_us, strict=True):
        assert since - WITHIN <= started <= since + WITHIN, "from the start"
        assert until - WITHIN <= ended <= until + WITHIN, "to the end"
        assert abs((until - since) - (ended - started)) <= WITHIN


def ran(pool: Pool, *, since: int) -> list[Span]:
    """When each container of a pool ran, as the engine tells it."""
    engine = Engine().client
    label = {"label": f"leasehold.owner={pool.owner}", "type": "container", "event": ["start", "die"]}
    seen: dict[str, dict[str, datetime]] = defaultdict(dict)
    for event in engine.events(since=since, until=int(time.time()) + 1, filters=label, decode=True):
        seen[event["Actor"]["ID"]][event["Action"]] = datetime.fromtimestamp(event["timeNano"] / 1e9, UTC)
    return sorted((each["start"], each["die"]) for each in seen.values())


def metered(box: Sandbox) -> list[Span]:
    """When a sandbox had a process by its usage records: from one start to the next sleep, or the end."""
    spans: list[Span] = []
    rows = UsageRecord.objects.filter(sandbox=box, item=Item.TIME).exclude(state__in=WITHOUT_PROCESS)
    for row in rows.order_by("began_at", "ended_at"):
        if spans and spans[-1][1] == row.began_at:
            spans[-1] = (spans[-1][0], row.ended_at)
        else:
            spans.append((row.began_at, row.ended_at))
    return spans
