"""Snapshots of a lease's workspace: take and restore. Each adds an entry to the lease's timeline."""

from datetime import datetime
from uuid import UUID

from leases import execution
from leases.models import LeaseEvent
from sandboxes import snapshots
from sandboxes.db.clock import clock_from
from sandboxes.models import Snapshot


def take_snapshot(pk: UUID, *, name: str = "", now: datetime, actor: str = "", request_id: int | None = None) -> Snapshot:
    """Store the current workspace of a lease, also while its sandbox is cold.

    `request_id` is the LeaseEvent of a queued request. Raise LeaseEnded, SnapshotNotFound or SandboxBusy; IntegrityError,
    without effect, if the request has an outcome."""
    clock = clock_from(now)

    def record(taken: Snapshot) -> None:
        _record_event(pk, clock(), "snapshot", actor, f"{taken.pk} {taken.name}", request_id)

    with execution.use_lease(pk, now=now) as request:
        return snapshots.take_snapshot(request, name=name, now=clock(), actor=actor, record=record)


def restore_snapshot(pk: UUID, snapshot: UUID, *, now: datetime, actor: str = "", request_id: int | None = None) -> Snapshot:
    """Make a snapshot the content of the workspace from its next use on.

    Raise LeaseEnded, SnapshotNotFound, or SandboxBusy while a run is open. `request_id` as in take_snapshot."""
    clock = clock_from(now)

    def record(restored: Snapshot) -> None:
        _record_event(pk, clock(), "restored", actor, f"from snapshot {snapshot} {restored.name}", request_id)

    with execution.use_lease(pk, now=now) as request:
        return snapshots.restore_snapshot(request, snapshot, now=clock(), actor=actor, record=record)


def _record_event(pk: UUID, at: datetime, kind: str, actor: str, reason: str, request_id: int | None) -> None:
    LeaseEvent.objects.create(lease_id=pk, at=at, kind=kind, actor=actor, reason=reason.strip(), request_id=request_id)
