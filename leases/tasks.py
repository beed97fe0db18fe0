"""What the queue runs for this app, and how it is asked to."""

from datetime import datetime
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django_q.models import OrmQ
from django_q.tasks import async_task

from leases import acting, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease, LeaseEvent, Status
from sandboxes import pool
from sandboxes import sweeps as below
from sandboxes.models import Sandbox, State

DEEPEST = 100  # tasks waiting: beyond this the next scheduled sweep is soon enough


def wake_reclaim() -> None:
    """Have the queue destroy what was just given up, rather than wait for the next sweep. Losing this loses only time."""
    if OrmQ.objects.count() < DEEPEST:
        async_task("leases.tasks.reclaim", group="reclaim")


def reclaim() -> str:
    return str(sweeps.reclaim(now=timezone.now()))


def sleep_soon(sandbox: Sandbox, *, now: datetime, actor: str, reason: str, guard: Q | None = None) -> bool:
    """Have the next idle sweep put a lease's sandbox to sleep; its timeline says who asked. False if it may not sleep."""
    holder = sandbox.holder
    with transaction.atomic():
        if holder is None or not pool.sleep_soon(sandbox.pk, now=now, actor=actor, reason=reason, guard=guard):
            return False
        LeaseEvent.objects.create(lease_id=holder, at=now, kind="sleep_asked_for", actor=actor, reason=reason)
    return True


def wake_idle() -> None:
    """Have the queue put to sleep what is due, rather than wait for the next sweep. Losing this loses only time."""
    if OrmQ.objects.count() < DEEPEST:
        async_task("leases.tasks.idle", group="idle")


def idle() -> str:
    return str(below.idle(now=timezone.now()))


def wake_soon(sandbox: Sandbox, *, now: datetime, actor: str, reason: str) -> bool:
    """Have the queue wake a lease's sandbox; its timeline says who asked. False if it does not sleep, or its lease ended."""
    holder = sandbox.holder
    if holder is None or not Sandbox.objects.filter(pk=sandbox.pk, state=State.COLD, lost_at__isnull=True).exists():
        return False
    if not Lease.objects.filter(pk=holder, status=Status.ACTIVE).exists():
        return False
    with transaction.atomic():  # the event and the task are rows of one database: both, or neither
        LeaseEvent.objects.create(lease_id=holder, at=now, kind="wake_asked_for", actor=actor, reason=reason)
        async_task("leases.tasks.wake", str(holder), actor, group="wake")
    return True


def wake(lease_id: str, actor: str) -> str:
    """Have a lease's sandbox awake. Doing it twice is harmless."""
    try:
        return str(acting.sandbox_for(UUID(lease_id), now=timezone.now(), actor=actor).state)
    except LeaseEnded as ended:
        return str(ended)
