"""Copies of a lease's workspace: taken, listed, gone back to. Each is in the lease's timeline."""

from datetime import datetime
from uuid import UUID

from leases import execution
from leases.models import LeaseEvent
from sandboxes import snapshots
from sandboxes.models import Snapshot
from sandboxes.pool import Want


def take(pk: UUID, *, name: str = "", now: datetime, actor: str = "") -> Snapshot:
    """Store the lease's workspace as it is now, also while it sleeps. LeaseEnded, NoSnapshot, Busy."""

    def act(want: Want, at: datetime) -> Snapshot:
        def tell(taken: Snapshot) -> None:
            _tell(pk, at, "snapshot", actor, f"{taken.pk} {taken.name}")

        return snapshots.take(want, name=name, now=at, actor=actor, record=tell)

    return execution.for_lease(pk, act, now=now, actor=actor)


def restore(pk: UUID, snapshot: UUID, *, now: datetime, actor: str = "") -> Snapshot:
    """Have an earlier copy in the workspace from the next use on. LeaseEnded, NoSnapshot, Busy while something runs."""

    def act(want: Want, at: datetime) -> Snapshot:
        def tell(restored: Snapshot) -> None:
            _tell(pk, at, "restored", actor, f"from snapshot {snapshot} {restored.name}")

        return snapshots.restore(want, snapshot, now=at, actor=actor, record=tell)

    return execution.for_lease(pk, act, now=now, actor=actor)


def _tell(pk: UUID, at: datetime, kind: str, actor: str, reason: str) -> None:
    LeaseEvent.objects.create(lease_id=pk, at=at, kind=kind, actor=actor, reason=reason.strip())
