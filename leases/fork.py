"""Fork of a lease: a new lease whose workspace starts as a copy of the source's workspace."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from uuid import UUID

import structlog

from leases import execution, leasing
from leases.errors import Conflict
from leases.leasing import LeaseRequest
from leases.models import Lease, LeaseEvent, LeaseStatus
from leases.resources import Resources
from sandboxes import snapshots
from sandboxes.db import sql
from sandboxes.db.clock import clock_from
from sandboxes.db.connection_errors import log_connection_errors
from sandboxes.models import Snapshot
from sandboxes.models.state import SnapshotKind
from sandboxes.state import workspace
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
FORKED_EVENT = "forked"  # event kind, recorded on both leases


def fork(
    lease: Lease,
    request: LeaseRequest,
    *,
    snapshot: UUID | None = None,
    now: datetime,
    actor: str = "",
    admit: Callable[[], object] = bool,
) -> tuple[Lease, bool]:
    """Grant a lease whose workspace starts as a copy of `lease`'s. Return the new lease and whether it is new. Idempotent.

    The source is the named snapshot, else the current workspace, or the last state if the lease has ended. Without resources
    of its own, the new lease requests those of `lease`. The new lease and its copy commit in one transaction, with `admit` as
    in `leasing.acquire`.
    Raise Conflict if the agent holds another lease in that environment, SnapshotNotFound if there is nothing to copy,
    SandboxBusy if the last state of an ended lease is not stored yet, and the errors of `leasing.acquire`."""
    clock = clock_from(now)
    if request.resources in (None, Resources()):
        request = replace(request, resources=Resources.of_lease(lease))
    current = sql.find_first(Lease, leasing.ACTIVE_LEASE_SQL, request.agent_did, request.environment_id)
    source, temporary = None, False
    if current and not leasing.find_elapsed_clock(current, now):
        _require_forked_from(current, lease, snapshot)
    elif snapshot:
        source = snapshots.get_snapshot(lease.pk, snapshot)
    else:
        leasing.find_type_and_pool(request)  # refuse before the source's sandbox is woken
        source, temporary = _find_or_take_source(lease, now=clock(), actor=actor)

    granted_at = clock()  # the source's workspace may have taken long to store

    def copy_workspace() -> None:
        if source is None:
            raise Conflict("The earlier fork has just ended. Try again.", field="environment_id")
        granted = Lease.objects.get(
            agent_did=request.agent_did, environment_id=request.environment_id, status=LeaseStatus.ACTIVE
        )
        # Lock order: lease before snapshot, as in a restore.
        _record_event(lease, f"into lease {granted.pk} of {granted}", now=granted_at, actor=actor)
        workspace.copy_snapshot(source, holder=granted.pk, kind=SnapshotKind.FORKED, now=granted_at)
        Lease.objects.filter(pk=granted.pk).update(forked_from=lease)
        _record_event(granted, f"from lease {lease.pk}, snapshot {source.pk}", now=granted_at, actor=actor)
        admit()

    try:
        granted, is_new = leasing.acquire(request, now=granted_at, actor=actor, admit=copy_workspace)
    finally:
        if source and temporary:  # a granted fork has its own copy
            _forget_temporary(source, now=clock())
    if not is_new:
        _require_forked_from(granted, lease, snapshot)
    return granted, is_new


def _find_or_take_source(lease: Lease, *, now: datetime, actor: str) -> tuple[Snapshot, bool]:
    """Return a snapshot of a lease's workspace, and whether it was taken for this fork and must be deleted."""
    if lease.status != LeaseStatus.ACTIVE or leasing.find_elapsed_clock(lease, now):
        return snapshots.get_last_state(lease.pk), False
    clock = clock_from(now)
    with execution.use_lease(lease.pk, now=now) as request:
        return snapshots.capture_current(request, now=clock(), actor=actor)


def _forget_temporary(source: Snapshot, *, now: datetime) -> None:
    """Delete the snapshot that was taken for a fork. A failure is logged: the client must learn the id of the granted lease.

    The sweep `prune` deletes objects that remain in the store, and later snapshots displace one that is not yet forgotten."""
    try:
        with log_connection_errors("temporary snapshot not deleted", snapshot=str(source.pk)):
            workspace.forget(source, now=now)
    except StoreError as failed:
        log.warning("temporary snapshot not deleted", snapshot=str(source.pk), error=str(failed))


def _require_forked_from(current: Lease, lease: Lease, snapshot: UUID | None) -> None:
    """Raise Conflict unless `current` was forked from `lease`, and from `snapshot` if it is given."""
    matches = current.forked_from_id == lease.pk
    if matches and snapshot:
        key = Snapshot.objects.filter(pk=snapshot, holder=lease.pk).values("key")
        matches = Snapshot.objects.filter(holder=current.pk, kind=SnapshotKind.FORKED, key__in=key).exists()
    if not matches:
        raise Conflict(
            f"{current.agent_did} already holds a lease in this environment that was not forked from this source.",
            field="environment_id",
        )


def _record_event(lease: Lease, reason: str, *, now: datetime, actor: str) -> None:
    LeaseEvent.objects.create(lease=lease, at=now, kind=FORKED_EVENT, actor=actor, reason=reason)
