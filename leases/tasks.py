"""What the queue runs for this app, and how it is asked to."""

from collections.abc import Callable
from datetime import datetime
from functools import partial
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django_q.models import OrmQ
from django_q.tasks import async_task

from leases import execution, snapshots, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease, LeaseEvent, LeaseStatus
from sandboxes import eviction
from sandboxes import sweeps as below
from sandboxes.errors import SandboxError
from sandboxes.models import Sandbox, SandboxState, Snapshot

MAX_QUEUED_TASKS = 100  # tasks waiting: beyond this the next scheduled sweep is soon enough


def enqueue_reclaim() -> None:
    """Have the queue destroy what was just given up, rather than wait for the next sweep. Losing this loses only time."""
    if OrmQ.objects.count() < MAX_QUEUED_TASKS:
        async_task("leases.tasks.reclaim", group="reclaim")


def reclaim() -> str:
    return str(sweeps.reclaim(now=timezone.now()))


def request_sleep(sandbox: Sandbox, *, now: datetime, actor: str, reason: str, guard: Q | None = None) -> bool:
    """Have the next idle sweep put a lease's sandbox to sleep; its timeline says who asked. False if it may not sleep."""
    holder = sandbox.holder
    with transaction.atomic():
        if holder is None or not eviction.request_eviction(sandbox.pk, now=now, actor=actor, reason=reason, guard=guard):
            return False
        LeaseEvent.objects.create(lease_id=holder, at=now, kind="sleep_asked_for", actor=actor, reason=reason)
    return True


def enqueue_idle_sweep() -> None:
    """Have the queue put to sleep what is due, rather than wait for the next sweep. Losing this loses only time."""
    if OrmQ.objects.count() < MAX_QUEUED_TASKS:
        async_task("leases.tasks.sweep_idle", group="idle")


def sweep_idle() -> str:
    return str(below.evict_idle(now=timezone.now()))


def request_wake(sandbox: Sandbox, *, now: datetime, actor: str, reason: str) -> bool:
    """Have the queue wake a lease's sandbox; its timeline says who asked. False if it does not sleep, or its lease ended."""
    holder = sandbox.holder
    if holder is None or not Sandbox.objects.filter(pk=sandbox.pk, state=SandboxState.COLD, lost_at__isnull=True).exists():
        return False
    if not Lease.objects.filter(pk=holder, status=LeaseStatus.ACTIVE).exists():
        return False
    with transaction.atomic():  # the event and the task are rows of one database: both, or neither
        LeaseEvent.objects.create(lease_id=holder, at=now, kind="wake_asked_for", actor=actor, reason=reason)
        async_task("leases.tasks.wake_sandbox", str(holder), actor, group="wake")
    return True


def wake_sandbox(lease_id: str, actor: str) -> str:
    """Have a lease's sandbox awake. Doing it twice is harmless."""
    try:
        return str(execution.ensure_sandbox_ready(UUID(lease_id), now=timezone.now(), actor=actor).state)
    except LeaseEnded as ended:
        return str(ended)


def request_snapshot(sandbox: Sandbox, name: str, *, now: datetime, actor: str, reason: str) -> bool:
    """Have the queue store a lease's workspace as it is then; its timeline says who asked. False if the lease has ended."""
    return _enqueue_with_event(sandbox.holder, "snapshot_asked_for", "take", name, now=now, actor=actor, reason=reason)


def request_restore(snapshot: Snapshot, *, now: datetime, actor: str, reason: str) -> bool:
    """Have the queue make an earlier copy what a lease's workspace holds. False if the lease has ended."""
    return _enqueue_with_event(
        snapshot.holder, "restore_asked_for", "restore", str(snapshot.pk), now=now, actor=actor, reason=reason
    )


def _enqueue_with_event(
    holder: UUID | None, kind: str, task: str, what: str, *, now: datetime, actor: str, reason: str
) -> bool:
    if holder is None or not Lease.objects.filter(pk=holder, status=LeaseStatus.ACTIVE).exists():
        return False
    with transaction.atomic():  # as for wake_soon
        LeaseEvent.objects.create(lease_id=holder, at=now, kind=kind, actor=actor, reason=reason)
        async_task(f"leases.tasks.{task}", str(holder), what, actor, group=task)
    return True


def take(lease_id: str, name: str, actor: str) -> str:
    """Store a lease's workspace. Delivered twice, it is two copies."""
    verb = partial(snapshots.take_snapshot, UUID(lease_id), name=name, now=timezone.now(), actor=actor)
    return _run_recording_failure(verb, lease_id, "snapshot_failed", actor)


def restore(lease_id: str, snapshot_id: str, actor: str) -> str:
    """Go back to an earlier copy."""
    verb = partial(snapshots.restore_snapshot, UUID(lease_id), UUID(snapshot_id), now=timezone.now(), actor=actor)
    return _run_recording_failure(verb, lease_id, "restore_failed", actor)


def _run_recording_failure(verb: Callable[[], Snapshot], lease_id: str, failed: str, actor: str) -> str:
    """What the verb made, or why it did not, which whoever asked finds in the lease's timeline."""
    try:
        return str(verb().pk)
    except SandboxError as why:
        LeaseEvent.objects.create(lease_id=lease_id, at=timezone.now(), kind=failed, actor=actor, reason=str(why)[:500])
        return str(why)
