"""Copies of a lease's workspace: taken, listed, gone back to. Each is in the lease's timeline."""

from datetime import datetime
from uuid import UUID

from leases import execution
from leases.models import LeaseEvent
from sandboxes import snapshots
from sandboxes.models import Snapshot


def take_snapshot(pk: UUID, *, name: str = "", now: datetime, actor: str = "") -> Snapshot:
    """Store the lease's workspace as it is now, also while it sleeps. LeaseEnded, NoSnapshot, Busy."""

    def record(taken: Snapshot) -> None:
        _record_event(pk, now, "snapshot", actor, f"{taken.pk} {taken.name}")

    with execution.use_lease(pk, now=now) as request:
        return snapshots.take_snapshot(request, name=name, now=now, actor=actor, record=record)


def restore_snapshot(pk: UUID, snapshot: UUID, *, now: datetime, actor: str = "") -> Snapshot:
    """Have an earlier copy in the workspace from the next use on. LeaseEnded, NoSnapshot, Busy while something runs."""

    def record(restored: Snapshot) -> None:
        _record_event(pk, now, "restored", actor, f"from snapshot {snapshot} {restored.name}")

    with execution.use_lease(pk, now=now) as request:
        return snapshots.restore_snapshot(request, snapshot, now=now, actor=actor, record=record)


def _record_event(pk: UUID, at: datetime, kind: str, actor: str, reason: str) -> None:
    LeaseEvent.objects.create(lease_id=pk, at=at, kind=kind, actor=actor, reason=reason.strip())
