"""Requested snapshots of a workspace: take and restore.

A cold workspace is copied by inserting a second row for its stored objects. The workspace of an alive sandbox is stored in a
Run, so that the sandbox is not evicted meanwhile. Processes are not stopped: each file is stored as read."""

import time
from collections.abc import Callable
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import transaction

from sandboxes import eviction, suspension
from sandboxes.claims import CLAIM_TTL
from sandboxes.db.clock import Clock, clock_from
from sandboxes.errors import SandboxBusy, SandboxLost, SandboxNotHeld, SnapshotNotFound, StoreUnavailable
from sandboxes.hosts import registry
from sandboxes.lifecycle import COLD, EVICTING, RUNNING, checkpoint
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import ALIVE_STATES, GONE_STATES, FinalPersist, Sandbox, SandboxState, TransitionReason
from sandboxes.models.state import Snapshot, SnapshotKind
from sandboxes.pool import allocation
from sandboxes.pool.allocation import SandboxRequest
from sandboxes.runs import operations
from sandboxes.runs.operations import Command, Operation
from sandboxes.state import workspace

MAX_ATTEMPTS = 5  # if other processes wake or evict the sandbox between two steps
EMPTY_WORKSPACE_MESSAGE = "The workspace is empty: nothing has run in it yet, and no file was written to it."
SnapshotCallback = Callable[[Snapshot], object]  # called in the transaction that writes the row


def _ignore_snapshot(snapshot: Snapshot) -> None:
    """Default SnapshotCallback."""


def take_snapshot(
    request: SandboxRequest, *, name: str = "", now: datetime, actor: str = "", record: SnapshotCallback = _ignore_snapshot
) -> Snapshot:
    """Take a snapshot of the holder's workspace, without waking the sandbox. Deletes the oldest beyond the retained number.

    Raises SnapshotNotFound if the workspace was never used, SandboxBusy if the sandbox changes state repeatedly, and the
    errors of `operations.operation`."""
    clock = clock_from(now)
    for _ in range(MAX_ATTEMPTS):
        sandbox = wait_until_settled(request.holder, now=clock())
        if sandbox and sandbox.state in ALIVE_STATES:
            taken: Snapshot | None = _snapshot_alive(request, name, now=clock(), actor=actor, record=record)
        else:
            taken = _copy_newest(request, name, now=clock(), record=record)
        if taken:
            workspace.forget_older(request.holder, now=clock())
            return taken
    raise SandboxBusy("The sandbox is being woken and evicted repeatedly. Try again in a moment.")


def capture_current(request: SandboxRequest, *, now: datetime, actor: str = "") -> tuple[Snapshot, bool]:
    """Return a snapshot of the current workspace, and whether this call took the snapshot. A cold workspace has one already.

    No other snapshot is deleted. If this call took the snapshot, the caller has to forget it as soon as another row points to
    its objects. Raises the errors of take_snapshot."""
    clock = clock_from(now)
    sandbox = wait_until_settled(request.holder, now=now)
    if sandbox and sandbox.state in ALIVE_STATES:
        return _snapshot_alive(request, "", now=clock(), actor=actor, record=_ignore_snapshot), True
    newest = workspace.find_latest(request.holder)
    if newest is None:
        raise SnapshotNotFound(EMPTY_WORKSPACE_MESSAGE)
    return newest, False


def get_last_state(holder: UUID) -> Snapshot:
    """Return the last stored state of a holder whose lease has ended.

    Raises SandboxBusy while a sandbox of the holder has unsaved state that is still to be stored, and SnapshotNotFound if none
    is stored."""
    remaining = Sandbox.objects.filter(holder=holder, final_persist=FinalPersist.ALL, lost_at__isnull=True)
    for sandbox in remaining.exclude(state=SandboxState.DESTROYED):
        if workspace.has_unsaved_state(sandbox):
            raise SandboxBusy("The lease has ended, and its last state is still being stored. Name a snapshot, or try again.")
    newest = workspace.find_latest(holder)
    if newest is None:
        raise SnapshotNotFound("The lease has ended, and no snapshot of its workspace is stored.")
    return newest


def get_snapshot(holder: UUID, pk: UUID) -> Snapshot:
    """Return a snapshot of this holder, or raise SnapshotNotFound.

    If the row was forgotten but a later row has the same objects, as after a restore, returns the later row."""
    snapshot = Snapshot.objects.filter(pk=pk, holder=holder).first()
    if snapshot and snapshot.forgotten_at:
        snapshot = workspace.find_by_holder(holder).filter(key=snapshot.key).first()
    if snapshot is None:
        raise SnapshotNotFound(field="snapshot_id")
    return snapshot


def restore_snapshot(
    request: SandboxRequest, pk: UUID, *, now: datetime, actor: str = "", record: SnapshotCallback = _ignore_snapshot
) -> Snapshot:
    """Restore an earlier snapshot into the workspace of the next use. Returns the row that the next wake reads.

    1. Insert a copy of the snapshot's row, so that step 2 does not delete the snapshot as one of the oldest.
    2. Evict the sandbox, if it is alive. Its current state is stored and can be restored later.
    3. Make the copy the newest snapshot of the holder.

    Raises WrongHost, SandboxBusy while something runs in the sandbox, SnapshotNotFound if the holder has no such snapshot, and
    StoreUnavailable if the current state could not be stored; the sandbox then keeps its state. After a crash at any step, the
    next use finds either the previous state or the restored one."""
    clock, source = clock_from(now), get_snapshot(request.holder, pk)
    reserved: Snapshot | None = None
    try:
        for _ in range(MAX_ATTEMPTS):
            sandbox = wait_until_settled(request.holder, now=clock())
            if sandbox is None or sandbox.state == COLD:
                if restored := _promote_snapshot(request, source, reserved, now=clock(), record=record):
                    checkpoint("restored", restored)
                    return restored
                continue
            registry.require_local(sandbox)
            _require_not_running(sandbox)
            if reserved is None:
                reserved = _copy_snapshot(source, request.holder, SnapshotKind.RESTORED, now=clock())
                checkpoint("restore reserved", reserved)
            with LONG_CALLS.admit():
                _evict(sandbox, now=clock(), actor=actor)
            checkpoint("restore evicted", reserved)
        raise SandboxBusy("The sandbox is in constant use. Restore the snapshot when it is idle.")
    except Exception:
        # If the source was forgotten meanwhile, the copy is the last row that points to its objects.
        if reserved and workspace.find_by_holder(request.holder).filter(pk=source.pk).exists():
            workspace.forget(reserved, now=clock())
        raise


def wait_until_settled(holder: UUID, *, now: datetime) -> Sandbox | None:
    """Wait until the holder's sandbox is alive or cold, and return it. Returns None if the holder has none.

    Raises SandboxLost, SandboxBusy if the sandbox is still in flight after SANDBOX_START_TIMEOUT, and TooManyLongCalls."""
    if _is_settled(sandbox := allocation.find_by_holder(holder), now=now):
        return sandbox
    clock = clock_from(now)
    deadline = now + settings.SANDBOX_START_TIMEOUT
    with LONG_CALLS.admit():
        while not _is_settled(sandbox := allocation.find_by_holder(holder), now=clock()):
            if clock() > deadline:
                raise SandboxBusy("The sandbox is still being started or evicted by another process. Try again in a moment.")
            time.sleep(allocation.POLL_INTERVAL_SECONDS)
    return sandbox


def _is_settled(sandbox: Sandbox | None, *, now: datetime) -> bool:
    if sandbox and sandbox.lost_at:
        raise SandboxLost()
    if sandbox is None or sandbox.state == COLD:
        return True
    return sandbox.state in ALIVE_STATES and not suspension.is_in_transition(sandbox, now=now)


def _snapshot_alive(request: SandboxRequest, name: str, *, now: datetime, actor: str, record: SnapshotCallback) -> Snapshot:
    """Store the workspace of an alive sandbox as a snapshot."""
    clock = clock_from(now)
    argv = ["snapshot", name] if name else ["snapshot"]
    command = Command(argv=argv, timeout=CLAIM_TTL, kind="file", needs_data=False)
    with operations.operation(request, command, now=now, actor=actor) as opened:
        return _store_workspace(opened, name, clock, record=record)


def _store_workspace(opened: Operation, name: str, clock: Clock, *, record: SnapshotCallback) -> Snapshot:
    sandbox = opened.sandbox
    with workspace.persist(sandbox, opened.provider, kind=SnapshotKind.ASKED, name=name, now=clock()) as snapshot:
        checkpoint("snapshot stored", snapshot)
        with transaction.atomic(durable=True):
            # The lock keeps the sandbox from being evicted or destroyed before the snapshot's row is committed.
            alive = Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(
                pk=sandbox.pk, holder=sandbox.holder, incarnation=sandbox.incarnation, state__in=ALIVE_STATES
            )
            if alive.values_list("pk", flat=True).first() is None:
                raise SandboxNotHeld()
            workspace.insert(snapshot)
            record(snapshot)
    checkpoint("snapshot saved", snapshot)
    return snapshot


def _copy_newest(request: SandboxRequest, name: str, *, now: datetime, record: SnapshotCallback) -> Snapshot | None:
    """Insert a second row for the newest snapshot of a cold workspace. Returns None if the sandbox has woken."""
    with transaction.atomic(durable=True):
        if not _is_cold(request):
            return None
        newest = workspace.find_latest(request.holder)
        if newest is None:
            raise SnapshotNotFound(EMPTY_WORKSPACE_MESSAGE)
        snapshot = _copy_snapshot(newest, request.holder, SnapshotKind.ASKED, now=now)
        snapshot.name = name
        snapshot.save(update_fields=["name"])
        record(snapshot)
    return snapshot


def _promote_snapshot(
    request: SandboxRequest, source: Snapshot, reserved: Snapshot | None, *, now: datetime, record: SnapshotCallback
) -> Snapshot | None:
    """Make a copy of `source` the newest snapshot, which the next wake reads. Returns None if the sandbox has woken."""
    with transaction.atomic(durable=True):
        if not _is_cold(request):
            return None
        restored = reserved or _copy_snapshot(source, request.holder, SnapshotKind.RESTORED, now=now)
        restored.at = workspace.next_snapshot_time(request.holder, now)
        if not workspace.find_by_holder(request.holder).filter(pk=restored.pk).update(at=restored.at):
            raise SnapshotNotFound(field="snapshot_id")
        record(restored)
    return restored


def _is_cold(request: SandboxRequest) -> bool:
    """Return whether the holder has no sandbox or a cold one.

    Locks the holder and the sandbox, so that the result is valid until the transaction ends."""
    request.guard.fence()
    locked = Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(holder=request.holder)
    return all(state == COLD for state in locked.exclude(state__in=GONE_STATES).values_list("state", flat=True))


def _copy_snapshot(source: Snapshot, holder: UUID, kind: SnapshotKind, *, now: datetime) -> Snapshot:
    with transaction.atomic():
        return workspace.copy_snapshot(source, holder=holder, kind=kind, now=workspace.next_snapshot_time(holder, now))


def _require_not_running(sandbox: Sandbox) -> None:
    if sandbox.state == RUNNING:
        raise SandboxBusy("A run is open in the sandbox. Restore the snapshot after the run has ended.")


def _evict(sandbox: Sandbox, *, now: datetime, actor: str) -> None:
    """Evict the sandbox before a restore. Raises SandboxBusy or StoreUnavailable if the eviction failed."""
    if eviction.evict(sandbox.pk, now=now, code=TransitionReason.RESTORE, actor=actor):
        return
    current = Sandbox.objects.get(pk=sandbox.pk)
    _require_not_running(current)
    if current.state == SandboxState.WAITING and current.persist_failures > sandbox.persist_failures:
        raise StoreUnavailable(f"The current workspace could not be stored, so nothing was restored. {current.last_error}")
    if current.state == EVICTING and current.last_error:
        raise SandboxBusy("The current workspace is stored, but its sandbox could not be destroyed yet. A sweep tries again.")
