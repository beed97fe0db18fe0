"""Queries behind `manage.py sweep --dry-run` and observe mode: pending actions of each sweep, without changes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from django.conf import settings

from billing.models import Budget, Unpriced
from leases import budget_enforcement, turns
from leases import sweeps as leases
from leases.atproto import records
from leases.coding import pull_requests, tasks
from leases.models import Lease
from leases.retention import kinds as retention
from sandboxes import process_restarts, suspension
from sandboxes.egress import model_pricing, settlement
from sandboxes.egress.allow_list import connections
from sandboxes.egress.logs import access_log
from sandboxes.models import Pool, Sandbox
from sandboxes.pool import intervals, lifetimes
from sandboxes.providers.base import ProviderSandbox
from sandboxes.runs import abandoned
from sandboxes.state import data_sync, pruning, run_outputs, vendor_snapshots
from sandboxes.sweep_log import SweepResult
from sandboxes.sweeps import agent_restarts, measurements, passes, reconciliation, seal_checks
from sandboxes.templates import builds
from sandboxes.webhooks import delivery

MAX_LISTED = 200  # rows that --dry-run lists per query


@dataclass(frozen=True)
class ListedKey:
    name: str


def _iter_unreferenced_keys(now: datetime) -> Iterable[ListedKey]:
    keys = (key for category in pruning.OBJECT_CATEGORIES for key in pruning.find_orphans(category, now - pruning.ORPHAN_GRACE))
    return (ListedKey(key) for key in islice(keys, MAX_LISTED))


def _iter_expired_rows(now: datetime) -> Iterable[ListedKey]:
    for expired in retention.find_expired(now=now):
        yield from (ListedKey(f"{expired.kind}: {pk}") for pk in expired.select().values_list("pk", flat=True)[:MAX_LISTED])


def _iter_orphans(now: datetime) -> Iterable[ProviderSandbox]:
    for item, name in reconciliation.iter_pool_providers():
        yield from reconciliation.find_orphans(item, name, now=now, grace=settings.ORPHAN_GRACE)


# For --dry-run: the queries of each sweep, by the action that the sweep would take.
DRY_RUN_QUERIES: dict[str, dict[str, Callable[[datetime], Iterable[Any]]]] = {
    "expire": {"end lease": lambda now: leases.find_elapsed_leases(now=now)[:MAX_LISTED]},
    "stalled": {
        "close run": lambda now: abandoned.find_abandoned(now=now)[:MAX_LISTED],
        "destroy overdue sandbox": lambda now: passes.find_overdue_starts(now=now)[:MAX_LISTED],
        "finish eviction of sandbox": lambda now: passes.find_overdue_evictions(now=now)[:MAX_LISTED],
        "finish suspension of sandbox": lambda now: passes.find_overdue_suspensions(now=now)[:MAX_LISTED],
        "restart process": lambda now: process_restarts.find_due(now=now)[:MAX_LISTED],
        "skip turn": lambda now: turns.find_overdue_turns(now=now)[:MAX_LISTED],
        "close model call": lambda now: settlement.find_overdue(now=now)[:MAX_LISTED],
        "build template": lambda now: builds.find_due(now=now)[:MAX_LISTED],
        "close connection": lambda now: connections.find_overdue(now=now)[:MAX_LISTED],
    },
    "hosts": {},
    "seal": {"check isolation of host": lambda now: seal_checks.find_due_hosts(now=now)},
    "mark": {},
    "persist": {"store data of sandbox": lambda now: pruning.find_unsaved()[:MAX_LISTED]},
    "reclaim": {
        "destroy sandbox": lambda now: passes.find_due_for_destroy(now=now)[:MAX_LISTED],
        "close lease": lambda now: leases.find_leases_to_close()[:MAX_LISTED],
    },
    "idle": {"put sandbox to sleep": lambda now: passes.find_idle(now=now)[:MAX_LISTED]},
    "suspend": {"suspend sandbox": lambda now: suspension.find_due(now=now)[:MAX_LISTED]},
    "lifetime": {"put sandbox to sleep": lambda now: lifetimes.find_ending(now=now)[:MAX_LISTED]},
    "watch": {},
    "intervals": {"raise intervals of sandbox": lambda now: intervals.find_short(now=now)[:MAX_LISTED]},
    "restart": {"restart sandbox": lambda now: agent_restarts.find_unresponsive()},
    "cold": {
        "destroy cold sandbox": lambda now: passes.find_expired_cold(now=now)[:MAX_LISTED],
        "delete local copy": lambda now: passes.find_leftover_local_copies()[:MAX_LISTED],
        "delete snapshot": lambda now: leases.find_expired_snapshots(now=now)[:MAX_LISTED],
    },
    "warm": {
        "destroy surplus sandbox": lambda now: Sandbox.objects.filter(pk__in=passes.find_surplus()),
        "start sandbox in pool": lambda now: passes.find_pools_below_target(now=now),
    },
    "reconcile": {"destroy orphan": _iter_orphans, "end lease as lost": lambda now: leases.find_lost_leases()},
    "recount": {"recount pool": lambda now: Pool.objects.order_by("pk")},
    "measure": {"measure workspace of sandbox": lambda now: measurements.find_unmeasured().order_by("pk")[:MAX_LISTED]},
    "weigh": {"measure data": lambda now: pruning.find_mounted().order_by("pk")[:MAX_LISTED]},
    "read": {"read sandbox": lambda now: measurements.find_readable().order_by("pk")[:MAX_LISTED]},
    "prune": {
        "delete outdated object": lambda now: data_sync.find_outdated_objects()[:MAX_LISTED],
        "delete unreferenced object": _iter_unreferenced_keys,
        "delete vendor's snapshot": lambda now: vendor_snapshots.find_unneeded(now=now)[:MAX_LISTED],
    },
    "outputs": {
        "move output of run": lambda now: run_outputs.find_movable(now=now).defer("stdout", "stderr")[:MAX_LISTED],
        "delete outdated object": lambda now: run_outputs.find_outdated_objects()[:MAX_LISTED],
    },
    "retention": {"delete": _iter_expired_rows},
    "collect": {
        "close model call": lambda now: access_log.find_abandoned(now=now)[:MAX_LISTED],
        "price model call": lambda now: islice(model_pricing.find_priceable(now), MAX_LISTED),
    },
    "meter": {
        "meter sandbox": lambda now: Sandbox.objects.filter(metered=False).order_by("pk")[:MAX_LISTED],
        "price day": lambda now: Unpriced.objects.order_by("pk")[:MAX_LISTED],
    },
    "budgets": {
        "total budget": lambda now: Budget.objects.filter(active=True)[:MAX_LISTED],
        "end lease": lambda now: Lease.objects.filter(
            pk__in=[*budget_enforcement.find_leases_over_budget(now=now)][:MAX_LISTED]
        ),
    },
    "pull_requests": {
        "request state of pull request": lambda now: pull_requests.find_due(now=now)[:MAX_LISTED],
        "abandon task": lambda now: tasks.find_unsubmitted(now=now)[:MAX_LISTED],
    },
    "records": {"create record": lambda now: records.find_due(now=now)[:MAX_LISTED]},
    "webhooks": {"attempt delivery": lambda now: delivery.find_deliverable(now=now)[:MAX_LISTED]},
}


def iter_actions(name: str, *, now: datetime) -> Iterable[tuple[str, Any]]:
    """Yield (action, object) for each pending action of a sweep, at most MAX_LISTED of each action."""
    for action, find_due in DRY_RUN_QUERIES[name].items():
        for item in find_due(now):
            yield action, item


def count_actions(name: str, *, now: datetime) -> SweepResult:
    """Count the pending actions of a sweep without executing them."""
    result = SweepResult()
    for action, _ in iter_actions(name, now=now):
        result.note(f"observed: would {action}")
    return result
