"""Promises that every history keeps: checks after a history, when sweeps find nothing more to do.

One function for each promise. The numbers are those of the table in docs/architecture.md."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.db.models import Max

from billing import derivation
from billing.dates import start_of_hour
from billing.models import CostRecord, UsageKind, UsageRecord
from leases.models import IdempotentRequest, Lease, LeaseStatus, Turn
from sandboxes.hosts.bound_provider import compute_host_id
from sandboxes.models import DataObject, OutputObject, Pool, Quota, Run, Sandbox, Snapshot, Transition, TransitionReason
from sandboxes.models.state import DataFile
from sandboxes.providers.base import DATA
from sandboxes.state import workspace
from sandboxes.sweeps import passes
from tests.simulation.expectations import read_snapshot
from tests.support.suites import TEST_PROVIDER

if TYPE_CHECKING:
    from tests.simulation.world import World

READY_STATES = {"warm", "running", "waiting", "suspended"}  # billed
USAGE_FIELDS = [
    "item", "source", "day", "began_at", "ended_at", "sandbox_id", "holder", "agent_did", "provider", "state", "memory_mib",
    "millicpus", "cpu_micros", "mib_micros", "size_bytes", "usd",
]  # fmt: skip
COST_FIELDS = ["day", "provider", "item", "agent_did", "holder", "rate", "quantity", "free", "usd"]
TimeRange = tuple[datetime, datetime]


def check_all(world: "World") -> None:
    for check in (check_nothing_leaks, check_capacity, check_nothing_is_stuck, check_stored_state, check_usage, check_bill):
        check(world)


def check_nothing_leaks(world: "World") -> None:
    """Promises 5 and 11: a sandbox exists exactly while a row names it; every row's object exists, every object has a row."""
    existing = Sandbox.objects.exclude(state__in=("cold", "destroyed")).filter(lost_at__isnull=True)
    rows = {sandbox.name for sandbox in existing}
    listed = {name for host in world.hosts for name in host.provider._sandboxes}
    listed |= {name for host in world.hosts_in_service for name in host.provider.list_witnessed()}
    # The sweep `reconcile` does not believe an engine that lists nothing, and reports that as a failure.
    empty = [compute_host_id(TEST_PROVIDER, host.name) for host in world.hosts if not host.provider._sandboxes]
    for name in sorted(listed - rows):
        world.promises.violate(11, f"{name} exists, and no row names it")
    for name in sorted(rows - listed - {sandbox.name for sandbox in existing.filter(host__in=empty)}):
        world.promises.violate(5, f"{name} does not exist, but its row says so")
    recorded = {f"{key}/workspace" for key in Snapshot.objects.filter(forgotten_at=None).values_list("key", flat=True)}
    recorded |= set(DataObject.objects.values_list("key", flat=True))
    recorded |= set(OutputObject.objects.values_list("key", flat=True))
    stored = {key for key in world.store.values if key.startswith(("snapshots/", "agents/", "outputs/"))}
    for key in sorted(recorded - stored):
        world.promises.violate(8, f"the object {key} of a row is missing in the store")
    for key in sorted(stored - recorded):
        world.promises.violate(11, f"the object {key} has no row")


def check_capacity(world: "World") -> None:
    """Promise 7: the counters of pools and quotas are the numbers of rows."""
    for pool in Pool.objects.all():
        owners = Counter(Sandbox.objects.filter(pool=pool).exclude(state="destroyed").values_list("agent_did", flat=True))
        if owners.total() != pool.used or pool.used > world.capacity:
            world.promises.violate(
                7, f"the pool counts {pool.used} sandboxes of {world.capacity}, and has {owners.total()} rows"
            )
        for quota in Quota.objects.filter(pool=pool):
            if owners[quota.agent_did] != quota.used:
                world.promises.violate(7, f"{quota} counts {quota.used} sandboxes, and has {owners[quota.agent_did]} rows")
    for failure in passes.recount(now=world.scheduler.time).failures:
        world.promises.violate(7, failure)


def check_nothing_is_stuck(world: "World") -> None:
    """Promise 11: no row waits for a process that is dead."""
    stuck = {
        "sandbox": Sandbox.objects.filter(state__in=("warming", "evicting", "destroying", "running")),
        "suspension": Sandbox.objects.filter(state="suspended", deadline_at__isnull=False),
        "lost sandbox": Sandbox.objects.filter(lost_at__isnull=False).exclude(state="destroyed"),
        "open run": Run.objects.filter(ended_at=None),
        "ended lease": Lease.objects.filter(status=LeaseStatus.EXPIRED),
        "turn": Turn.objects.filter(ended_at=None),
        "request": IdempotentRequest.objects.filter(status_code=None, deadline_at__gt=world.scheduler.time),
    }
    for kind, rows in stuck.items():
        for row in rows:
            detail = {name: str(value) for name, value in vars(row).items() if name in STUCK_FIELDS and value}
            world.promises.violate(11, f"stuck {kind} {row.pk}: {detail}")
    suspended = {sandbox.name for sandbox in Sandbox.objects.filter(state="suspended")}
    for name, sandbox in [item for host in world.hosts for item in host.provider._sandboxes.items()]:
        if sandbox.suspended != (name in suspended):
            world.promises.violate(11, f"{name} is {'frozen' if sandbox.suspended else 'awake'}, unlike its row")


STUCK_FIELDS = ("state", "deadline_at", "tries", "last_error", "quarantined_at", "lost_at", "status", "end_reason", "note")


def check_stored_state(world: "World") -> None:
    """Promise 8: an acknowledged write is stored, unless its sandbox was lost, and its lease ended for that, or discarded."""
    lost_with_host = set(Transition.objects.filter(code=TransitionReason.HOST_LOST).values_list("holder", flat=True))
    for pk, expected in world.promises.expectations.leases.items():
        lease = Lease.objects.get(pk=pk)
        if lease.end_reason == "lost" and not expected.losses and pk not in lost_with_host:
            world.promises.violate(8, f"lease {pk} ended as lost, but no engine has lost its sandbox: {lease.end_detail}")
        kept = lease.end_reason != "lost" and not expected.discarded and not expected.vanished
        if kept and lease.status != LeaseStatus.ACTIVE:
            _check_last_state(world, pk, expected.workspace)
        stored = dict(DataFile.objects.filter(data__agent_did=expected.agent, removed=False).values_list("path", "digest"))
        for path, text in expected.data.items():
            if lease.status == LeaseStatus.ACTIVE or (not kept and path in expected.unstored):
                continue
            if stored.get(path.removeprefix(f"{DATA}/")) != hashlib.sha256(text.encode()).hexdigest():
                world.promises.violate(8, f"{path} ({text}) of lease {pk} is not stored; the lease ended: {lease.end_reason}")


def _check_last_state(world: "World", pk: UUID, expected: dict[str, str]) -> None:
    newest = workspace.find_latest(pk)
    ended_at = Lease.objects.get(pk=pk).ended_at
    if ended_at and ended_at < world.scheduler.time - settings.KEEP_STATE:
        return
    files = read_snapshot(world.store, newest.key) if newest else {}
    missing = {path: text for path, text in expected.items() if (files or {}).get(path) != text}
    if missing:
        reason = Lease.objects.get(pk=pk).end_reason
        world.promises.violate(8, f"the last state of lease {pk} ({reason}) lacks {missing}; stored: {files}")


def check_usage(world: "World") -> None:
    """Promise 9: metered time equals the time at the provider's clock, and has no gap and no overlap."""
    existing: dict[str, TimeRange] = {}
    vanished: set[str] = set()
    for host in world.hosts:
        existing |= host.provider.existence.ranges
        existing |= {name: (since, world.scheduler.time) for name, since in host.provider.existence.since.items()}
        vanished |= host.provider.existence.vanished
    records: dict[UUID, list[UsageRecord]] = {}
    for record in UsageRecord.objects.filter(item=UsageKind.TIME).order_by("began_at", "ended_at"):
        records.setdefault(record.sandbox_id, []).append(record)
    for sandbox in Sandbox.objects.all():
        names = [name for name in {*existing, *vanished} if name.startswith(f"leasehold-{sandbox.pk.hex}-")]
        rows = records.get(sandbox.pk, [])
        metered = [(row.began_at, row.ended_at) for row in rows]
        hours = list_hours(metered)
        if metered:  # records of one hour may be rolled up, so its time is compared as a whole
            ended = Transition.objects.filter(sandbox=sandbox).aggregate(last=Max("at"))["last"]
            life = [(metered[0][0], ended if sandbox.state == "destroyed" else max(end for _, end in metered))]
            for hour in hours:
                if measure_overlap(metered, [hour]) != measure_overlap(life, [hour]):
                    world.promises.violate(9, f"usage of {sandbox.pk} has a gap or an overlap in the hour {hour[0]}")
        if vanished & {*names}:
            continue  # the end is unknown until a sweep notices the loss
        paid = [(row.began_at, row.ended_at) for row in rows if row.state in READY_STATES]
        existed = [existing[name] for name in names if name in existing]
        excess = timedelta(0)
        for hour in hours:
            excess += max(measure_overlap(paid, [hour]) - measure_overlap(existed, [hour]), timedelta(0))
        intervals = Transition.objects.filter(sandbox=sandbox, to__in=READY_STATES).count()
        if excess > intervals * world.max_skew:
            world.promises.violate(9, f"usage of {sandbox.pk} exceeds its time at the provider by {excess}")


def check_bill(world: "World") -> None:
    """Promise 9: usage and costs can be derived again to the same rows."""
    before = read_bill()
    derivation.reset_usage_and_costs()
    derivation.derive_usage_and_costs(now=world.scheduler.time)
    after = read_bill()
    if before != after:
        difference = [*(set(before) ^ set(after))][:3]
        world.promises.violate(9, f"the bill differs when it is derived again: {difference}")


def read_bill() -> list[tuple[Any, ...]]:
    rows = [*UsageRecord.objects.values_list(*USAGE_FIELDS), *CostRecord.objects.values_list(*COST_FIELDS)]
    return sorted(rows, key=str)


def list_hours(ranges: Sequence[TimeRange]) -> list[TimeRange]:
    """Return the UTC hours in which any of the ranges lies."""
    hours = set[datetime]()
    for start, end in ranges:
        hour = start_of_hour(start)
        while hour <= end:
            hours.add(hour)
            hour += timedelta(hours=1)
    return [(hour, hour + timedelta(hours=1)) for hour in sorted(hours)]


def measure_overlap(some: Sequence[TimeRange], others: Sequence[TimeRange]) -> timedelta:
    """Sum the time that each range of one list shares with each range of the other."""
    both = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return sum((end - start for start, end in both if start < end), timedelta(0))
