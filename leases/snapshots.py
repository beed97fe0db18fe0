"""Copies of a lease's workspace: taken, listed, gone back to. Each is in the lease's timeline."""

from datetime import datetime
from uuid import UUID

from leases import execution
from leases.models import LeaseEvent
from sandboxes import snapshots
from sandboxes.models import Snapshot
from sandboxes.pool import SandboxRequest


def take_snapshot(pk: UUID, *, name: str = "", now: datetime, actor: str = "") -> Snapshot:
    """Store the lease's workspace as it is now, also while it sleeps. LeaseEnded, NoSnapshot, Busy."""

    def act(want: SandboxRequest, at: datetime) -> Snapshot:
        def tell(taken: Snapshot) -> None:
            _record_event(pk, at, "snapshot", actor, f"{taken.pk} {taken.name}")

        return snapshots.take_snapshot(want, name=name, now=at, actor=actor, record=tell)

    return execution.call_with_lease(pk, act, now=now, actor=actor)


def restore_snapshot(pk: UUID, snapshot: UUID, *, now: datetime, actor: str = "") -> Snapshot:
    """Have an earlier copy in the workspace from the next use on. LeaseEnded, NoSnapshot, Busy while something runs."""

    def act(want: SandboxRequest, at: datetime) -> Snapshot:
        def tell(restored: Snapshot) -> None:
            _record_event(pk, at, "restored", actor, f"from snapshot {snapshot} {restored.name}")

        return snapshots.restore_snapshot(want, snapshot, now=at, actor=actor, record=tell)

    return execution.call_with_lease(pk, act, now=now, actor=actor)


def _record_event(pk: UUID, at: datetime, kind: str, actor: str, reason: str) -> None:
    LeaseEvent.objects.create(lease_id=pk, at=at, kind=kind, actor=actor, reason=reason.strip())
