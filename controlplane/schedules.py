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
from sandboxes.sweeps import Swept
from sandboxes.webhooks import delivery

PATH = f"{__name__}."  # of the functions below; whatever else is scheduled is not ours
EVERY = {  # minutes
    "heartbeat": 1, "expire": 1, "stalled": 1, "reclaim": 1, "idle": 1, "cold": 5, "warm": 1, "reconcile": 5, "recount": 5,
    "measure": 10, "weigh": 60, "read": 5, "persist": 1, "prune": 60, "collect": 1, "meter": 1, "budgets": 1, "webhooks": 1,
}  # fmt: skip
SWEEPS: dict[str, Callable[[datetime], Swept]] = {  # in this order each finds what the one before it has left
    "expire": lambda now: leases.expire_due(now=now),
    "stalled": lambda now: leases.stalled(now=now),
    "reclaim": lambda now: leases.reclaim(now=now),
    "persist": lambda now: pruning.persist(now=now),
    "idle": lambda now: sandboxes.idle(now=now),
    "cold": lambda now: leases.cold(now=now),
    "warm": lambda now: sandboxes.warm(now=now),
    "reconcile": lambda now: leases.reconcile(now=now, grace=settings.ORPHAN_GRACE),
    "recount": lambda now: sandboxes.recount(now=now),
    "measure": lambda now: leases.measure(now=now),
    "weigh": lambda now: pruning.weigh(now=now),
    "read": lambda now: sandboxes.read(now=now),
    "prune": lambda now: leases.prune(now=now),
    "collect": lambda now: reconciliation.collect(now=now),
    "meter": lambda now: _metered(now),
    "budgets": lambda now: budget_enforcement.enforce(now=now),
    "webhooks": lambda now: delivery.deliver_due(now=now),
}


def heartbeat() -> str:
    """Do nothing, and leave a row that says when: proof that the queue runs what is scheduled."""
    now = timezone.now()
    return str(sandboxes.recorded("heartbeat", Swept, now=now, every=every("heartbeat")))


def expire() -> str:
    return str(sweep("expire", now=timezone.now()))


def stalled() -> str:
    return str(sweep("stalled", now=timezone.now()))


def reclaim() -> str:
    return str(sweep("reclaim", now=timezone.now()))


def idle() -> str:
    return str(sweep("idle", now=timezone.now()))


def cold() -> str:
    return str(sweep("cold", now=timezone.now()))


def warm() -> str:
    return str(sweep("warm", now=timezone.now()))


def reconcile() -> str:
    return str(sweep("reconcile", now=timezone.now()))


def recount() -> str:
    return str(sweep("recount", now=timezone.now()))


def measure() -> str:
    return str(sweep("measure", now=timezone.now()))


def weigh() -> str:
    return str(sweep("weigh", now=timezone.now()))


def read() -> str:
    return str(sweep("read", now=timezone.now()))


def persist() -> str:
    return str(sweep("persist", now=timezone.now()))


def prune() -> str:
    return str(sweep("prune", now=timezone.now()))


def collect() -> str:
    return str(sweep("collect", now=timezone.now()))


def meter() -> str:
    return str(sweep("meter", now=timezone.now()))


def budgets() -> str:
    return str(sweep("budgets", now=timezone.now()))


def webhooks() -> str:
    return str(sweep("webhooks", now=timezone.now()))


def _metered(now: datetime) -> Swept:
    """What was used, and what that costs."""
    swept = Swept()
    usage, money = derivation.derive(now=now)
    for item, records in usage.items():
        swept.note(f"records of {item}", records)
    for done, records in money.items():
        swept.note(f"costs {done}", records)
    return swept


def sweep(name: str, *, now: datetime) -> Swept:
    """One pass of one sweep, recorded for whoever reads health."""
    return sandboxes.recorded(name, lambda: SWEEPS[name](now), now=now, every=every(name))


def every(name: str) -> timedelta:
    return timedelta(minutes=EVERY[name])


def sync(*, now: datetime) -> dict[str, int]:
    """The queue's schedules are those of the table; how many were created, changed and removed. Safe to repeat.

    Rows of other functions are left alone. Ours come from code alone, since one row whose arguments cannot be parsed
    stops every schedule of the queue."""
    counts = {"created": 0, "changed": 0, "removed": 0}
    with transaction.atomic():
        ours = Schedule.objects.select_for_update().filter(func__startswith=PATH).order_by("pk")
        counts["removed"] += ours.exclude(func__in=[PATH + name for name in EVERY]).delete()[0]
        for name, minutes in EVERY.items():
            wanted = {
                "name": name, "schedule_type": Schedule.MINUTES, "minutes": minutes, "repeats": -1, "args": None,
                "kwargs": None, "hook": None, "cron": None, "cluster": None, "intended_date_kwarg": None,
            }  # fmt: skip
            first, *twins = [*ours.filter(func=PATH + name)] or [None]
            if first is None:
                Schedule.objects.create(func=PATH + name, next_run=now, **wanted)
                counts["created"] += 1
            elif first.next_run > now + every(name) or any(getattr(first, field) != wanted[field] for field in wanted):
                Schedule.objects.filter(pk=first.pk).update(next_run=now, **wanted)
                counts["changed"] += 1
            counts["removed"] += Schedule.objects.filter(pk__in=[twin.pk for twin in twins]).delete()[0]
    return counts


def run_now() -> None:
    """Queue one pass of everything: a schedule's first run comes up to half a minute after the queue has started."""
    for name in EVERY:
        async_task(PATH + name, group=name)
