"""A second lease that starts from what is in the workspace of a first one."""

from collections.abc import Callable
from datetime import datetime
from uuid import UUID

from leases import execution, leasing
from leases.errors import Conflict
from leases.leasing import LeaseRequest
from leases.models import Lease, LeaseEvent, LeaseStatus
from sandboxes import snapshots
from sandboxes.db import sql
from sandboxes.db.clock import clock_from
from sandboxes.errors import SnapshotNotFound
from sandboxes.models import Snapshot
from sandboxes.models.state import SnapshotKind
from sandboxes.state import workspace

FORKED_EVENT = "forked"  # the kind of an event, of both leases


def fork(
    lease: Lease,
    ask: LeaseRequest,
    *,
    snapshot: UUID | None = None,
    now: datetime,
    actor: str = "",
    admit: Callable[[], object] = bool,
) -> tuple[Lease, bool]:
    """A lease as asked for that starts with a copy of this one's workspace, and whether this call granted it.

    The copy is the named one, or what is in the workspace now; of a lease that has ended, the newest that is kept. A
    repeat is answered with the same lease. Conflict if the agent holds another lease in that environment; NoSnapshot if
    there is nothing to copy. `admit` is called as in acquire: a new lease and its first copy are there both, or neither."""
    later = clock_from(now)
    held = sql.find_first(Lease, leasing.ACTIVE_LEASE_SQL, ask.agent_did, ask.environment_id)
    source, borrowed = None, False
    if held and not leasing.find_elapsed_clock(held, now):
        _require_forked_from(held, lease, snapshot)
    elif snapshot:
        source = snapshots.get_snapshot(lease.pk, snapshot)
    else:
        source, borrowed = _find_or_take_source(lease, now=later(), actor=actor)

    def begin() -> None:
        if source is None:
            raise Conflict("The lease that this had granted has just ended. Ask again.", field="environment_id")
        granted = Lease.objects.get(agent_did=ask.agent_did, environment_id=ask.environment_id, status=LeaseStatus.ACTIVE)
        # The lease before its copy: in this order a restore locks them, too.
        _record_event(lease, f"into lease {granted.pk} of {granted}", now=now, actor=actor)
        workspace.copy_snapshot(source, holder=granted.pk, kind=SnapshotKind.FORKED, now=now)
        Lease.objects.filter(pk=granted.pk).update(forked_from=lease)
        _record_event(granted, f"from lease {lease.pk}, snapshot {source.pk}", now=now, actor=actor)
        admit()

    try:
        granted, is_new = leasing.acquire(ask, now=now, actor=actor, admit=begin)
    finally:
        if source and borrowed:  # from here on it is the fork's, or nobody's
            workspace.forget(source, now=later())
    if not is_new:
        _require_forked_from(granted, lease, snapshot)
    return granted, is_new


def _find_or_take_source(lease: Lease, *, now: datetime, actor: str) -> tuple[Snapshot, bool]:
    """What is in the workspace of a lease now, or was when it was last stored; and whether it was stored for this."""
    if lease.status != LeaseStatus.ACTIVE or leasing.find_elapsed_clock(lease, now):
        newest = workspace.find_latest(lease.pk)
        if newest is None:
            raise SnapshotNotFound("The lease has ended, and no copy of its workspace is kept.")
        return newest, False
    with execution.use_lease(lease.pk, now=now) as request:
        return snapshots.capture_current(request, now=now, actor=actor)


def _require_forked_from(held: Lease, lease: Lease, snapshot: UUID | None) -> None:
    """Conflict unless the held lease was forked from the other one, and from that snapshot if it is named."""
    same = held.forked_from_id == lease.pk
    if same and snapshot:
        key = Snapshot.objects.filter(pk=snapshot, holder=lease.pk).values("key")
        same = Snapshot.objects.filter(holder=held.pk, kind=SnapshotKind.FORKED, key__in=key).exists()
    if not same:
        raise Conflict(
            f"{held.agent_did} holds a lease in this environment already, which does not start from there.",
            field="environment_id",
        )


def _record_event(lease: Lease, reason: str, *, now: datetime, actor: str) -> None:
    LeaseEvent.objects.create(lease=lease, at=now, kind=FORKED_EVENT, actor=actor, reason=reason[:500])
