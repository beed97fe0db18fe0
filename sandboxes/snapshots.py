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
from sandboxes.db.clock import ticking
from sandboxes.errors import Busy, Lost, NoSnapshot, NotHeld, StoreFailed
from sandboxes.lifecycle import COLD, EVICTING, RUNNING, step
from sandboxes.models import ALIVE, GONE, Sandbox, State
from sandboxes.models.state import Snapshot, SnapshotKind
from sandboxes.pool import Want
from sandboxes.providers.base import Provider
from sandboxes.runs import Command
from sandboxes.state import workspace

TRIES = 5  # with others who wake it, or put it to sleep, in between
NOTHING = "There is nothing in this workspace yet: nothing was run in it, and nothing written to it."
Record = Callable[[Snapshot], object]  # called in the transaction that saves the row


def take(want: Want, *, name: str = "", now: datetime, actor: str = "", record: Record = bool) -> Snapshot:
    """A copy of the holder's workspace as it is now, without waking it. The oldest copies go, as always.

    NoSnapshot if it has never had anything in it; Lost, Busy, StoreFailed and ProviderFailed as for a run."""
    later = ticking(now)
    for _ in range(TRIES):
        sandbox = settled(want.holder, now=later())
        if sandbox and sandbox.state in ALIVE:
            taken: Snapshot | None = _store(want, name, now=later(), actor=actor, record=record)
        else:
            taken = _name_newest(want, name, now=later(), record=record)
        if taken:
            workspace.forget_older(want.holder, now=later())
            return taken
    raise Busy("Its sandbox wakes and falls asleep over and over.")


def present(want: Want, *, now: datetime, actor: str = "") -> tuple[Snapshot, bool]:
    """A copy of what is in the workspace now, and whether it was taken for this. That of what sleeps is there already.

    No other copy goes for it: whoever asked forgets one that was taken, once another row points to the same objects."""
    later = ticking(now)
    sandbox = settled(want.holder, now=now)
    if sandbox and sandbox.state in ALIVE:
        return _store(want, "", now=later(), actor=actor, record=bool), True
    newest = workspace.latest(want.holder)
    if newest is None:
        raise NoSnapshot(NOTHING)
    return newest, False


def kept(holder: UUID, pk: UUID) -> Snapshot:
    """A copy of this holder's, or NoSnapshot. If the row itself was let go and its objects are still there as those of a
    later one, which is so after it was restored, it is that one."""
    named = Snapshot.objects.filter(pk=pk, holder=holder).first()
    if named and named.forgotten_at:
        named = workspace.of(holder).filter(key=named.key).first()
    if named is None:
        raise NoSnapshot(field="snapshot_id")
    return named


def restore(want: Want, pk: UUID, *, now: datetime, actor: str = "", record: Record = bool) -> Snapshot:
    """Have an earlier copy as what the next use finds in the workspace. What is there now is put to sleep before, and so
    can be gone back to.

    Busy while something runs in it; NoSnapshot if there is no such copy of this holder's; StoreFailed if what is there
    now could not be stored, which is then still there. After a crash anywhere either of the two is what a use finds."""
    later, source = ticking(now), kept(want.holder, pk)
    noted: Snapshot | None = None
    try:
        for _ in range(TRIES):
            sandbox = settled(want.holder, now=later())
            if sandbox is None or sandbox.state == COLD:
                if restored := _make_newest(want, source, noted, now=later(), record=record):
                    step("restored", restored)
                    return restored
                continue
            _refuse_running(sandbox)
            if noted is None:  # else the copy of what is there now might push it out of those that are kept
                noted = _again(source, want.holder, SnapshotKind.RESTORED, now=later())
                step("restore noted", noted)
            _put_to_sleep(sandbox, now=later(), actor=actor)
            step("restore asleep", noted)
        raise Busy("Its sandbox is used over and over. Restore it when it is not.")
    except Exception:
        if noted and workspace.of(want.holder).filter(pk=source.pk).exists():  # else it is all there is of that copy
            workspace.forget(noted, now=later())
        raise


def settled(holder: UUID, *, now: datetime) -> Sandbox | None:
    """The holder's sandbox, alive or cold; None if it has none. Waits while somebody starts it or puts it to sleep.

    Lost; Busy if they are still at it after the start timeout."""
    later = ticking(now)
    patience = now + settings.SANDBOX_START_TIMEOUT
    while sandbox := pool.of(holder):
        if sandbox.lost_at:
            raise Lost()
        if sandbox.state == COLD or sandbox.state in ALIVE:
            break
        if later() > patience:
            raise Busy("Its sandbox is still being started or stored by somebody else.")
        time.sleep(pool.POLL)
    return sandbox


def _store(want: Want, name: str, *, now: datetime, actor: str, record: Record) -> Snapshot:
    """Store what is alive."""
    later = ticking(now)

    def store(provider: Provider, sandbox: Sandbox) -> Snapshot:
        snapshot = workspace.persist(sandbox, provider, kind=SnapshotKind.ASKED, name=name, now=later())
        step("snapshot stored", snapshot)
        with transaction.atomic(durable=True):
            # Locked until the row is there: nobody puts it to sleep, or gives it up, in between.
            mine = Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(
                pk=sandbox.pk, holder=want.holder, incarnation=sandbox.incarnation, state__in=ALIVE
            )
            if mine.values_list("pk", flat=True).first() is None:
                raise NotHeld()
            snapshot.save(force_insert=True)
            record(snapshot)
        step("snapshot saved", snapshot)
        return snapshot

    # As long as an eviction may take: it does the same.
    argv = ["snapshot", name] if name else ["snapshot"]
    command = Command(argv=argv, timeout=eviction.EVICT_WITHIN, kind="file", needs_data=False)
    _, snapshot = runs.act_in(want, command, store, now=now, actor=actor)
    return snapshot


def _name_newest(want: Want, name: str, *, now: datetime, record: Record) -> Snapshot | None:
    """A row of its own for what is stored of what sleeps. None if it has woken."""
    with transaction.atomic(durable=True):
        if not _asleep(want):
            return None
        newest = workspace.latest(want.holder)
        if newest is None:
            raise NoSnapshot(NOTHING)
        snapshot = _again(newest, want.holder, SnapshotKind.ASKED, now=now)
        snapshot.name = name
        snapshot.save(update_fields=["name"])
        record(snapshot)
    return snapshot


def _make_newest(want: Want, source: Snapshot, noted: Snapshot | None, *, now: datetime, record: Record) -> Snapshot | None:
    """The copy that the next wake reads. None if somebody has woken it."""
    with transaction.atomic(durable=True):
        if not _asleep(want):
            return None
        restored = noted or _again(source, want.holder, SnapshotKind.RESTORED, now=now)
        restored.at = workspace.moment(want.holder, now)
        if not workspace.of(want.holder).filter(pk=restored.pk).update(at=restored.at):
            raise NoSnapshot(field="snapshot_id")
        record(restored)
    return restored


def _asleep(want: Want) -> bool:
    """Is nothing alive of this holder? It stays so until the transaction ends: its lease and its sandbox are locked."""
    want.fence()
    mine = Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(holder=want.holder).exclude(state__in=GONE)
    return all(state == COLD for state in mine.values_list("state", flat=True))


def _again(source: Snapshot, holder: UUID, kind: SnapshotKind, *, now: datetime) -> Snapshot:
    with transaction.atomic():
        return workspace.again(source, holder=holder, kind=kind, now=workspace.moment(holder, now))


def _refuse_running(sandbox: Sandbox) -> None:
    if sandbox.state == RUNNING:
        raise Busy("Something runs in its sandbox. Restore it when that has ended.")


def _put_to_sleep(sandbox: Sandbox, *, now: datetime, actor: str) -> None:
    """Busy or StoreFailed if it does not sleep, and not because somebody else has put it to sleep."""
    if eviction.sleep(sandbox.pk, now=now, reason="an earlier copy is restored", actor=actor):
        return
    there = Sandbox.objects.get(pk=sandbox.pk)
    _refuse_running(there)
    if there.state == State.WAITING and there.last_error and there.tries > sandbox.tries:
        raise StoreFailed(f"What is in the workspace now could not be stored, so nothing was restored. {there.last_error}")
    if there.state == EVICTING and there.last_error:
        raise Busy("What is in the workspace now is stored, but its sandbox does not go yet. A sweep tries again.")
