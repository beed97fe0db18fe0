"""Snapshots of a lease's workspace: take and restore. Each adds an entry to the lease's timeline."""

from datetime import datetime
from uuid import UUID

from leases import execution
from leases.models import LeaseEvent
from sandboxes import snapshots
from sandboxes.models import Snapshot


def take_snapshot(pk: UUID, *, name: str = "", now: datetime, actor: str = "") -> Snapshot:
    """Store the current workspace of a lease, also of a sleeping one. Raise LeaseEnded, SnapshotNotFound or SandboxBusy."""

    def record(taken: Snapshot) -> None:
        _record_event(pk, now, "snapshot", actor, f"{taken.pk} {taken.name}")

    with execution.use_lease(pk, now=now) as request:
        return snapshots.take_snapshot(request, name=name, now=now, actor=actor, record=record)


def restore_snapshot(pk: UUID, snapshot: UUID, *, now: datetime, actor: str = "") -> Snapshot:
    """Make a snapshot the content of the workspace from its next use on.

    Raise LeaseEnded, SnapshotNotFound, or SandboxBusy while a run is open."""

    def record(restored: Snapshot) -> None:
        _record_event(pk, now, "restored", actor, f"from snapshot {snapshot} {restored.name}")

    with execution.use_lease(pk, now=now) as request:
        return snapshots.restore_snapshot(request, snapshot, now=now, actor=actor, record=record)


def _record_event(pk: UUID, at: datetime, kind: str, actor: str, reason: str) -> None:
    LeaseEvent.objects.create(lease_id=pk, at=at, kind=kind, actor=actor, reason=reason.strip())
