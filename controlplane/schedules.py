"""The clockwork on one page: what runs by itself, how often, and in which order when all of it is run at once."""

from collections.abc import Callable
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from django_q.models import Schedule
from django_q.tasks import async_task

from billing import derivation
from leases import budget_enforcement
from leases import sweeps as leases
from sandboxes import sweeps as sandboxes
from sandboxes.egress import reconciliation
from sandboxes.state import pruning
from sandboxes.sweep_log import SweepResult, run_recorded
from sandboxes.webhooks import delivery

TASK_PREFIX = f"{__name__}."  # of the functions below; whatever else is scheduled is not ours
INTERVAL_MINUTES = {  # minutes
    "heartbeat": 1, "expire": 1, "stalled": 1, "reclaim": 1, "idle": 1, "cold": 5, "warm": 1, "reconcile": 5, "recount": 5,
    "measure": 10, "weigh": 60, "read": 5, "persist": 1, "prune": 60, "collect": 1, "meter": 1, "budgets": 1, "webhooks": 1,
}  # fmt: skip
SWEEPS: dict[str, Callable[[datetime], SweepResult]] = {  # in this order each finds what the one before it has left
    "expire": lambda now: leases.expire_due_leases(now=now),
    "stalled": lambda now: leases.recover_stalled(now=now),
    "reclaim": lambda now: leases.reclaim(now=now),
    "persist": lambda now: pruning.persist_unsaved(now=now),
    "idle": lambda now: sandboxes.evict_idle(now=now),
    "cold": lambda now: leases.destroy_cold(now=now),
    "warm": lambda now: sandboxes.warm_pools(now=now),
    "reconcile": lambda now: leases.reconcile(now=now, grace=settings.ORPHAN_GRACE),
    "recount": lambda now: sandboxes.recount(now=now),
    "measure": lambda now: leases.measure_workspaces(now=now),
    "weigh": lambda now: pruning.measure_mounted(now=now),
    "read": lambda now: sandboxes.record_readings(now=now),
    "prune": lambda now: leases.prune(now=now),
    "collect": lambda now: reconciliation.collect_call_logs(now=now),
    "meter": lambda now: _run_metering(now),
    "budgets": lambda now: budget_enforcement.enforce_budgets(now=now),
    "webhooks": lambda now: delivery.deliver_due(now=now),
}


def heartbeat() -> str:
    """Do nothing, and leave a row that says when: proof that the queue runs what is scheduled."""
    now = timezone.now()
    return str(run_recorded("heartbeat", SweepResult, now=now, every=get_interval("heartbeat")))


def expire() -> str:
    return str(run_sweep("expire", now=timezone.now()))


def stalled() -> str:
    return str(run_sweep("stalled", now=timezone.now()))


def reclaim() -> str:
    return str(run_sweep("reclaim", now=timezone.now()))


def idle() -> str:
    return str(run_sweep("idle", now=timezone.now()))


def cold() -> str:
    return str(run_sweep("cold", now=timezone.now()))


def warm() -> str:
    return str(run_sweep("warm", now=timezone.now()))


def reconcile() -> str:
    return str(run_sweep("reconcile", now=timezone.now()))


def recount() -> str:
    return str(run_sweep("recount", now=timezone.now()))


def measure() -> str:
    return str(run_sweep("measure", now=timezone.now()))


def weigh() -> str:
    return str(run_sweep("weigh", now=timezone.now()))


def read() -> str:
    return str(run_sweep("read", now=timezone.now()))


def persist() -> str:
    return str(run_sweep("persist", now=timezone.now()))


def prune() -> str:
    return str(run_sweep("prune", now=timezone.now()))


def collect() -> str:
    return str(run_sweep("collect", now=timezone.now()))


def meter() -> str:
    return str(run_sweep("meter", now=timezone.now()))


def budgets() -> str:
    return str(run_sweep("budgets", now=timezone.now()))


def webhooks() -> str:
    return str(run_sweep("webhooks", now=timezone.now()))


def _run_metering(now: datetime) -> SweepResult:
    """What was used, and what that costs."""
    swept = SweepResult()
    usage, money = derivation.derive_usage_and_costs(now=now)
    for item, records in usage.items():
        swept.note(f"records of {item}", records)
    for done, records in money.items():
        swept.note(f"costs {done}", records)
    return swept


def run_sweep(name: str, *, now: datetime) -> SweepResult:
    """One pass of one sweep, recorded for whoever reads health."""
    return run_recorded(name, lambda: SWEEPS[name](now), now=now, every=get_interval(name))


def get_interval(name: str) -> timedelta:
    return timedelta(minutes=INTERVAL_MINUTES[name])


def sync_schedules(*, now: datetime) -> dict[str, int]:
    """The queue's schedules are those of the table; how many were created, changed and removed. Safe to repeat.

    Rows of other functions are left alone. Ours come from code alone, since one row whose arguments cannot be parsed
    stops every schedule of the queue."""
    counts = {"created": 0, "changed": 0, "removed": 0}
    with transaction.atomic():
        ours = Schedule.objects.select_for_update().filter(func__startswith=TASK_PREFIX).order_by("pk")
        counts["removed"] += ours.exclude(func__in=[TASK_PREFIX + name for name in INTERVAL_MINUTES]).delete()[0]
        for name, minutes in INTERVAL_MINUTES.items():
            wanted = {
                "name": name, "schedule_type": Schedule.MINUTES, "minutes": minutes, "repeats": -1, "args": None,
                "kwargs": None, "hook": None, "cron": None, "cluster": None, "intended_date_kwarg": None,
            }  # fmt: skip
            first, *twins = [*ours.filter(func=TASK_PREFIX + name)] or [None]
            if first is None:
                Schedule.objects.create(func=TASK_PREFIX + name, next_run=now, **wanted)
                counts["created"] += 1
            elif first.next_run > now + get_interval(name) or any(getattr(first, field) != wanted[field] for field in wanted):
                Schedule.objects.filter(pk=first.pk).update(next_run=now, **wanted)
                counts["changed"] += 1
            counts["removed"] += Schedule.objects.filter(pk__in=[twin.pk for twin in twins]).delete()[0]
    return counts


def enqueue_all_sweeps() -> None:
    """Queue one pass of everything: a schedule's first run comes up to half a minute after the queue has started."""
    for name in INTERVAL_MINUTES:
        async_task(TASK_PREFIX + name, group=name)
