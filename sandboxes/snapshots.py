"""Copies of a workspace that somebody asks for: taken, and gone back to.

What sleeps is copied by a second row for the objects that are there. What is alive is stored anew, in a Run, so that
nothing takes the sandbox away meanwhile; programs in it are not stopped, and each file is as it was when it was read."""

import time
from collections.abc import Callable
from datetime import datetime
from uuid import UUID

from django.conf import settings
from django.db import transaction

from sandboxes import eviction, pool, runs
from sandboxes.db.clock import Clock, clock_from
from sandboxes.errors import SandboxBusy, SandboxLost, SandboxNotHeld, SnapshotNotFound, StoreUnavailable
from sandboxes.lifecycle import COLD, EVICTING, RUNNING, checkpoint
from sandboxes.models import ALIVE_STATES, GONE_STATES, Sandbox, SandboxState, TransitionReason
from sandboxes.models.state import Snapshot, SnapshotKind
from sandboxes.pool import SandboxRequest
from sandboxes.runs import Command, Operation
from sandboxes.state import workspace

MAX_ATTEMPTS = 5  # with others who wake it, or put it to sleep, in between
EMPTY_WORKSPACE_MESSAGE = "There is nothing in this workspace yet: nothing was run in it, and nothing written to it."
SnapshotCallback = Callable[[Snapshot], object]  # called in the transaction that saves the row


def take_snapshot(
    request: SandboxRequest, *, name: str = "", now: datetime, actor: str = "", record: SnapshotCallback = bool
) -> Snapshot:
    """A copy of the holder's workspace as it is now, without waking it. The oldest copies go, as always.

    NoSnapshot if it has never had anything in it; Lost, Busy, StoreFailed and ProviderFailed as for a run."""
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
    raise SandboxBusy("Its sandbox wakes and falls asleep over and over.")


def capture_current(request: SandboxRequest, *, now: datetime, actor: str = "") -> tuple[Snapshot, bool]:
    """A copy of what is in the workspace now, and whether it was taken for this. That of what sleeps is there already.

    No other copy goes for it: whoever asked forgets one that was taken, once another row points to the same objects."""
    clock = clock_from(now)
    sandbox = wait_until_settled(request.holder, now=now)
    if sandbox and sandbox.state in ALIVE_STATES:
        return _snapshot_alive(request, "", now=clock(), actor=actor, record=bool), True
    newest = workspace.find_latest(request.holder)
    if newest is None:
        raise SnapshotNotFound(EMPTY_WORKSPACE_MESSAGE)
    return newest, False


def get_snapshot(holder: UUID, pk: UUID) -> Snapshot:
    """A copy of this holder's, or NoSnapshot. If the row itself was let go and its objects are still there as those of a
    clock one, which is so after it was restored, it is that one."""
    named = Snapshot.objects.filter(pk=pk, holder=holder).first()
    if named and named.forgotten_at:
        named = workspace.find_by_holder(holder).filter(key=named.key).first()
    if named is None:
        raise SnapshotNotFound(field="snapshot_id")
    return named


def restore_snapshot(
    request: SandboxRequest, pk: UUID, *, now: datetime, actor: str = "", record: SnapshotCallback = bool
) -> Snapshot:
    """Have an earlier copy as what the next use finds in the workspace. What is there now is put to sleep before, and so
    can be gone back to.

    Busy while something runs in it; NoSnapshot if there is no such copy of this holder's; StoreFailed if what is there
    now could not be stored, which is then still there. After a crash anywhere either of the two is what a use finds."""
    clock, source = clock_from(now), get_snapshot(request.holder, pk)
    noted: Snapshot | None = None
    try:
        for _ in range(MAX_ATTEMPTS):
            sandbox = wait_until_settled(request.holder, now=clock())
            if sandbox is None or sandbox.state == COLD:
                if restored := _promote_snapshot(request, source, noted, now=clock(), record=record):
                    checkpoint("restored", restored)
                    return restored
                continue
            _require_not_running(sandbox)
            if noted is None:  # else the copy of what is there now might push it out of those that are kept
                noted = _copy_snapshot(source, request.holder, SnapshotKind.RESTORED, now=clock())
                checkpoint("restore noted", noted)
            _evict(sandbox, now=clock(), actor=actor)
            checkpoint("restore asleep", noted)
        raise SandboxBusy("Its sandbox is used over and over. Restore it when it is not.")
    except Exception:
        if (
            noted and workspace.find_by_holder(request.holder).filter(pk=source.pk).exists()
        ):  # else it is all there is of that copy
            workspace.forget(noted, now=clock())
        raise


def wait_until_settled(holder: UUID, *, now: datetime) -> Sandbox | None:
    """The holder's sandbox, alive or cold; None if it has none. Waits while somebody starts it or puts it to sleep.

    Lost; Busy if they are still at it after the start timeout."""
    clock = clock_from(now)
    patience = now + settings.SANDBOX_START_TIMEOUT
    while sandbox := pool.find_by_holder(holder):
        if sandbox.lost_at:
            raise SandboxLost()
        if sandbox.state == COLD or sandbox.state in ALIVE_STATES:
            break
        if clock() > patience:
            raise SandboxBusy("Its sandbox is still being started or stored by somebody else.")
        time.sleep(pool.POLL_INTERVAL_SECONDS)
    return sandbox


def _snapshot_alive(request: SandboxRequest, name: str, *, now: datetime, actor: str, record: SnapshotCallback) -> Snapshot:
    """Store what is alive."""
    clock = clock_from(now)
    # As long as an eviction may take, which does the same.
    argv = ["snapshot", name] if name else ["snapshot"]
    command = Command(argv=argv, timeout=eviction.EVICTION_TIMEOUT, kind="file", needs_data=False)
    with runs.operation(request, command, now=now, actor=actor) as opened:
        return _store_workspace(opened, name, clock, record=record)


def _store_workspace(opened: Operation, name: str, clock: Clock, *, record: SnapshotCallback) -> Snapshot:
    sandbox = opened.sandbox
    snapshot = workspace.persist(sandbox, opened.provider, kind=SnapshotKind.ASKED, name=name, now=clock())
    checkpoint("snapshot stored", snapshot)
    with transaction.atomic(durable=True):
        # Locked until the row is there: nobody puts it to sleep, or gives it up, in between.
        alive = Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(
            pk=sandbox.pk, holder=sandbox.holder, incarnation=sandbox.incarnation, state__in=ALIVE_STATES
        )
        if alive.values_list("pk", flat=True).first() is None:
            raise SandboxNotHeld()
        snapshot.save(force_insert=True)
        record(snapshot)
    checkpoint("snapshot saved", snapshot)
    return snapshot


def _copy_newest(request: SandboxRequest, name: str, *, now: datetime, record: SnapshotCallback) -> Snapshot | None:
    """A row of its own for what is stored of what sleeps. None if it has woken."""
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
    request: SandboxRequest, source: Snapshot, noted: Snapshot | None, *, now: datetime, record: SnapshotCallback
) -> Snapshot | None:
    """The copy that the next wake reads. None if somebody has woken it."""
    with transaction.atomic(durable=True):
        if not _is_cold(request):
            return None
        restored = noted or _copy_snapshot(source, request.holder, SnapshotKind.RESTORED, now=now)
        restored.at = workspace.next_snapshot_time(request.holder, now)
        if not workspace.find_by_holder(request.holder).filter(pk=restored.pk).update(at=restored.at):
            raise SnapshotNotFound(field="snapshot_id")
        record(restored)
    return restored


def _is_cold(request: SandboxRequest) -> bool:
    """Is nothing alive of this holder? It stays so until the transaction ends: its lease and its sandbox are locked."""
    request.guard.fence()
    mine = (
        Sandbox.objects.select_for_update(no_key=True, of=("self",))
        .filter(holder=request.holder)
        .exclude(state__in=GONE_STATES)
    )
    return all(state == COLD for state in mine.values_list("state", flat=True))


def _copy_snapshot(source: Snapshot, holder: UUID, kind: SnapshotKind, *, now: datetime) -> Snapshot:
    with transaction.atomic():
        return workspace.copy_snapshot(source, holder=holder, kind=kind, now=workspace.next_snapshot_time(holder, now))


def _require_not_running(sandbox: Sandbox) -> None:
    if sandbox.state == RUNNING:
        raise SandboxBusy("Something runs in its sandbox. Restore it when that has ended.")


def _evict(sandbox: Sandbox, *, now: datetime, actor: str) -> None:
    """Busy or StoreFailed if it does not sleep, and not because somebody else has put it to sleep."""
    if eviction.evict(sandbox.pk, now=now, code=TransitionReason.RESTORE, actor=actor):
        return
    there = Sandbox.objects.get(pk=sandbox.pk)
    _require_not_running(there)
    if there.state == SandboxState.WAITING and there.last_error and there.tries > sandbox.tries:
        raise StoreUnavailable(f"What is in the workspace now could not be stored, so nothing was restored. {there.last_error}")
    if there.state == EVICTING and there.last_error:
        raise SandboxBusy("What is in the workspace now is stored, but its sandbox does not go yet. A sweep tries again.")
