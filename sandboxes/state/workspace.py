"""Snapshots of a sandbox's own files: persist, hydrate, forget.

The key of an object is claimed, then the object is written, then the Snapshot row, which ends the claim. Objects are removed
after their row is marked forgotten. A crash leaves at worst objects that the prune sweep finds and removes. A local copy of
each snapshot in the state directory makes the next wake faster."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from sandboxes.claims import Claim, note_progress, track_transfer
from sandboxes.db.clock import Clock, clock_from
from sandboxes.errors import SnapshotNotFound, WorkspaceFull, WrongHost
from sandboxes.hosts import registry
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Run, Sandbox, SandboxState
from sandboxes.models.state import DataEvent, Snapshot, SnapshotKind, format_key_timestamp
from sandboxes.providers.base import DATA, WORKSPACE, Provider
from sandboxes.providers.errors import TooLarge
from sandboxes.state import disk_space, missing_snapshots, uploads
from sandboxes.state.exact_tars import read_omissions
from sandboxes.state.local_copies import TEMPORARY_PREFIX, digest_file, write_file
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.storage.observed import DeleteRefused

log = structlog.get_logger(__name__)
RESTORE_TIMEOUT = timedelta(minutes=10)  # a restore that takes longer, its eviction excluded, is treated as crashed
MAX_DOWNLOADS = 2  # of an object with another digest: a cut or foreign answer is no damage
MAX_FETCHES = 3  # of a local copy that a sweep removes meanwhile
MIN_SNAPSHOT_INTERVAL = timedelta(microseconds=1)
SNAPSHOT_ROOTS = {"workspace": WORKSPACE, "data": DATA}  # older snapshots may have both parts, new ones have `workspace`


class StateLost(Exception):
    """No copy of the state exists, neither locally nor in the store, as missing_snapshots.is_lost decides."""


class CorruptSnapshot(Exception):
    """A copy does not match its digest, or (`absent`) is missing in the store."""

    def __init__(self, message: str, *, absent: bool) -> None:
        self.absent = absent
        super().__init__(message)


@contextmanager
def persist(
    sandbox: Sandbox,
    provider: Provider,
    *,
    kind: SnapshotKind = SnapshotKind.SLEEP,
    name: str = "",
    measured_bytes: int | None = None,
    now: datetime,
) -> Iterator[Snapshot]:
    """Store the sandbox's files. Yield an unsaved Snapshot: the body inserts it under its claim by `insert`.

    `measured_bytes` is the size of /workspace if the caller has just measured it. Raise WorkspaceFull if the workspace exceeds
    its pool's limit by more than the slack of compute_max_tar_bytes. Raise ProviderError or StoreError. After an error no row
    points to the stored objects, and no local copy is left."""
    assert sandbox.holder is not None
    snapshot = Snapshot(
        sandbox=sandbox, incarnation=sandbox.incarnation, holder=sandbox.holder, kind=kind, name=name, size_bytes=0,
        at=next_snapshot_time(sandbox.holder, now), host_id=sandbox.host_id,
    )  # fmt: skip
    snapshot.key = f"snapshots/{sandbox.holder}/{format_key_timestamp(now)}-{snapshot.pk.hex}"
    size = provider.size(sandbox.ref, WORKSPACE) if measured_bytes is None else measured_bytes
    max_bytes = compute_max_tar_bytes(sandbox.pool.workspace_limit_mib << 20)
    if not sandbox.excludes and size > max_bytes:
        raise _build_size_error(sandbox, size)
    disk_space.require_state_space(0 if sandbox.excludes else size)
    with uploads.claim_keys([f"{snapshot.key}/workspace"], clock=clock_from(now)):
        _store(snapshot, sandbox, provider, max_bytes)
        yield snapshot


def _store(snapshot: Snapshot, sandbox: Sandbox, provider: Provider, max_bytes: int) -> None:
    try:
        files = provider.get_files(sandbox.ref, WORKSPACE, exclude=sandbox.excludes, exact=True, max_bytes=max_bytes)
        _write_local_copy(snapshot, disk_space.check_while_writing(files))
        with (local_directory(snapshot) / "workspace").open("rb") as source:
            snapshot.omitted = read_omissions(source)
            get_store().upload(f"{snapshot.key}/workspace", track_transfer(source))
    except TooLarge as error:
        _remove_local_directory(snapshot)
        raise _build_size_error(sandbox, max(provider.size(sandbox.ref, WORKSPACE), max_bytes)) from error
    except BaseException:
        _remove_local_directory(snapshot)
        raise


def insert(snapshot: Snapshot) -> None:
    """Insert the row of a snapshot that `persist` has stored. Call in a transaction. Raise StoreError if its claim is lost."""
    uploads.end_claims([f"{snapshot.key}/workspace"])
    snapshot.save(force_insert=True)


def compute_max_tar_bytes(limit_bytes: int) -> int:
    """Return the maximum size of a tar of files that may hold `limit_bytes`.

    The slack of a half and 32 MiB covers the headers of many small files, 1.5 KiB each. It also covers an honest workspace that
    outgrew its limit during the last command: commands are refused above the limit, but the state is still stored."""
    return limit_bytes + limit_bytes // 2 + (32 << 20)


def _build_size_error(sandbox: Sandbox, size: int) -> WorkspaceFull:
    limit = sandbox.pool.workspace_limit_mib
    return WorkspaceFull(
        f"The workspace holds {size >> 20} MiB, the limit is {limit} MiB. Delete files through the files API, then try again.",
        workspace_bytes=size,
        limit_bytes=limit << 20,
    )


def has_unsaved_state(sandbox: Sandbox) -> bool:
    """Return whether a Run of this incarnation began after its state was stored. False if the incarnation has had no Run."""
    return not sandbox.persisted and Run.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation).exists()


def find_stored_time(sandbox: Sandbox) -> datetime | None:
    """Return the time of the last snapshot of all state of this incarnation, or None. No run was open at that time."""
    own = Snapshot.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation, kind=SnapshotKind.SLEEP)
    return own.order_by("-at").values_list("at", flat=True).first()


def persist_claimed(sandbox: Sandbox, provider: Provider, claim: Claim, *, clock: Clock) -> bool:
    """Store the files of a sandbox that this worker has claimed, and record the snapshot. Return False if the claim was lost.

    The Snapshot row becomes the pointer to the state in the transaction that marks the incarnation as persisted, so an
    incarnation's state is recorded once. Raise the errors of `persist`, and ClaimLost."""
    note_progress()
    size = provider.size(sandbox.ref, WORKSPACE)
    note_progress()
    with persist(sandbox, provider, measured_bytes=size, now=clock()) as snapshot:
        checkpoint("objects stored", sandbox)
        sandbox.workspace_bytes = size
        with claim.lock, transaction.atomic():
            claimed = claim.update(workspace_bytes=size, measured_at=clock(), persisted=True, unreadable_tries=0)
            if claimed:
                insert(snapshot)
    if claimed:
        _forget_superseded(snapshot.holder, now=clock())
    return claimed


def _forget_superseded(holder: UUID, *, now: datetime) -> None:
    """Delete superseded snapshots. A failure leaves objects to the prune sweep: the new state is stored either way."""
    try:
        forget_older(holder, now=now)
    except StoreError as failed:
        log.warning("old snapshots not deleted", lease=str(holder), error=str(failed))


def find_by_holder(holder: UUID) -> QuerySet[Snapshot]:
    """Return a holder's snapshots that are not forgotten, newest first."""
    return Snapshot.objects.filter(holder=holder, forgotten_at__isnull=True).order_by("-at", "-pk")


def find_latest(holder: UUID) -> Snapshot | None:
    """Return the snapshot that a wake restores; None if the holder has none."""
    return find_by_holder(holder).first()


def require_within_reach(holder: UUID) -> None:
    """Raise WrongHost if the newest state of a holder is only in the state directory of another host. Raise StoreError.

    That is so if the store is a directory that the hosts do not share. A wake here would find the state lost."""
    newest = find_by_holder(holder).select_related("host").first()
    if newest is None or newest.host is None or newest.host.lost_at or newest.host_id in registry.find_local_host_ids():
        return
    if not all(get_store().has(f"{newest.key}/{part}") for part in newest.digests):
        raise WrongHost(
            f'The stored state is on the host "{newest.host}", and the store of this server does not have it. '
            "Nothing was changed.",
            host=newest.host.name,
        )


def hydrate(snapshot: Snapshot, ref: str, provider: Provider, *, now: datetime) -> tuple[str, Snapshot]:
    """Unpack a snapshot into a sandbox. Return the source, "local" or "cloud", and the snapshot that was used.

    A corrupt copy is reported as an event, and the next copy is tried: the local one, the store's, then the holder's older
    snapshots. A copy that is missing in the store is passed over only once it counts as lost: an older one in its place would
    discard changes. Raise StateLost if all copies count as lost; StoreError if an operator may repair one, which is corrupt or
    missing for a shorter time. Other errors of the store or the provider are raised as they are. After any error the content of
    the sandbox is undefined."""
    corrupt: list[CorruptSnapshot] = []
    for candidate in [snapshot, *find_by_holder(snapshot.holder).exclude(pk=snapshot.pk).filter(at__lte=snapshot.at)]:
        try:
            source = _unpack(candidate, ref, provider, now=now)
        except CorruptSnapshot as error:
            if error.absent and not missing_snapshots.is_lost(candidate, now=now):
                raise StoreError(get_store().name, "hydrate", str(error)) from error
            corrupt.append(error)
            continue
        if candidate.pk != snapshot.pk:
            detail = f"The newest copy is unreadable ({corrupt[0]}). Restored the copy of {candidate.at:%Y-%m-%d %H:%M:%S} UTC."
            record_event(candidate, DataEvent.Kind.OLDER, detail, now=now)
        return source, candidate
    if all(error.absent for error in corrupt):
        detail = f"The state of {snapshot.at:%Y-%m-%d %H:%M:%S} UTC ({snapshot.size_bytes} bytes) is lost: {corrupt[0]}"
        record_event(snapshot, DataEvent.Kind.DROPPED, detail, now=now)
        raise StateLost(str(corrupt[0]))
    raise StoreError(get_store().name, "hydrate", str(min(corrupt, key=lambda error: error.absent)))


def _unpack(snapshot: Snapshot, ref: str, provider: Provider, *, now: datetime) -> str:
    sources = set()
    for part in snapshot.digests:
        with open_snapshot(snapshot, part, now=now) as (tar, source):
            sources.add(source)
            provider.put_files(ref, SNAPSHOT_ROOTS[part], track_transfer(tar))
    return "cloud" if "cloud" in sources else "local"


@contextmanager
def open_snapshot(snapshot: Snapshot, part: str = "workspace", *, now: datetime) -> Iterator[tuple[BinaryIO, str]]:
    """Open a snapshot's verified tar. Yields the file and its source, "local" or "cloud". Raise CorruptSnapshot if no copy
    matches."""
    tar, source = _open_verified(snapshot, part, now=now)
    with tar:
        yield tar, source


def _open_verified(snapshot: Snapshot, part: str, *, now: datetime) -> tuple[BinaryIO, str]:
    """Return an open local file, and its source. A sweep may remove the local copy at any time before the file is open."""
    for _ in range(MAX_FETCHES):
        with suppress(FileNotFoundError):
            path, source = _fetch_verified(snapshot, part, now=now)
            return path.open("rb"), source
    raise StoreError("local copy", "hydrate", "The local copy was removed while it was read.")


def forget_local(snapshot: Snapshot) -> None:
    """Remove the local copy. The objects in the store stay."""
    shutil.rmtree(local_directory(snapshot), ignore_errors=True)
    Snapshot.objects.filter(key=snapshot.key).update(local=False)


def is_own(snapshot: Snapshot) -> bool:
    """Return whether the snapshot was stored from a sandbox of its holder. False for a fork's first snapshot."""
    return snapshot.key.startswith(f"snapshots/{snapshot.holder}/")


def next_snapshot_time(holder: UUID, now: datetime) -> datetime:
    """Return `now`, but later than the newest snapshot: the order of snapshots must not depend on clock skew."""
    newest = find_latest(holder)
    return max(now, newest.at + MIN_SNAPSHOT_INTERVAL) if newest else now


def date_before_newest(snapshot: Snapshot) -> None:
    """Date a new snapshot before the newest one of its holder, if there is any, so that no wake reads the new one by itself."""
    if newest := find_latest(snapshot.holder):
        snapshot.at = newest.at - MIN_SNAPSHOT_INTERVAL


def forget_older(holder: UUID, *, now: datetime) -> int:
    """Forget all but the newest snapshots of a holder. Return the number forgotten.

    Requested snapshots and found ones each have a quota of their own (LEASEHOLD_KEEP_ASKED_SNAPSHOTS), so that they and those
    taken at sleep do not displace each other."""
    snapshots = list(find_by_holder(holder))
    requested = [snapshot for snapshot in snapshots if snapshot.kind == SnapshotKind.ASKED]
    found = [snapshot for snapshot in snapshots if snapshot.kind == SnapshotKind.FOUND]
    others = [snapshot for snapshot in snapshots if snapshot.kind not in (SnapshotKind.ASKED, SnapshotKind.FOUND)]
    limit = settings.KEEP_ASKED_SNAPSHOTS
    older = [*others[settings.KEEP_SNAPSHOTS :], *requested[limit:], *found[limit:]]
    return sum(forget(old, now=now) for old in older if old != snapshots[0] and not _is_being_restored(old, now))


def _is_being_restored(snapshot: Snapshot, now: datetime) -> bool:
    """Return whether a restore of this snapshot is in progress. The snapshot becomes the newest once the sandbox sleeps."""
    if snapshot.kind != SnapshotKind.RESTORED:
        return False
    evicting = Sandbox.objects.filter(holder=snapshot.holder, state=SandboxState.EVICTING)
    return snapshot.at > now - RESTORE_TIMEOUT or evicting.exists()


def forget(snapshot: Snapshot, *, now: datetime) -> bool:
    """Mark a snapshot forgotten. Its objects are removed once no other row points to them. The row stays as history."""
    with transaction.atomic():  # ordered by primary key to avoid deadlocks: a fork locks the row that it copies
        rows = Snapshot.objects.filter(key=snapshot.key)
        list(rows.select_for_update(no_key=True).order_by("pk").values_list("pk"))
        forgotten = rows.filter(pk=snapshot.pk, forgotten_at__isnull=True).update(forgotten_at=now)
        # Checked after the locks are held: a copy inserted while we waited is not among the locked rows.
        if rows.filter(forgotten_at__isnull=True).exists():
            return bool(forgotten)
    with suppress(DeleteRefused):  # in observe mode; the prune sweep deletes the objects later
        get_store().remove_many([f"{snapshot.key}/{part}" for part in snapshot.digests])
        forget_local(snapshot)
    return bool(forgotten)


def copy_snapshot(source: Snapshot, *, holder: UUID, kind: SnapshotKind, now: datetime) -> Snapshot:
    """Insert a snapshot of a holder as the newest of another: a second row for the same objects.

    Raise SnapshotNotFound if the source was forgotten. Call inside a transaction; until it ends the copy cannot be
    forgotten."""
    copy = Snapshot.objects.select_for_update(no_key=True).filter(pk=source.pk, forgotten_at__isnull=True).first()
    if copy is None:
        raise SnapshotNotFound()
    copy.pk, copy.holder, copy.kind, copy.at = uuid.uuid4(), holder, kind, now
    copy.vendor_snapshot, copy.vendor_host, copy.vendor_digest, copy.vendor_expires_at = "", None, "", None  # the source has it
    copy._state.adding = True
    copy.save(force_insert=True)
    return copy


def local_directory(snapshot: Snapshot) -> Path:
    return settings.STATE_DIR / snapshot.key


def _fetch_verified(snapshot: Snapshot, part: str, *, now: datetime) -> tuple[Path, str]:
    """Return a local file with a verified part of a snapshot, and its source, "local" or "cloud"."""
    path, digest = local_directory(snapshot) / part, snapshot.digests[part]
    if path.is_file():
        if digest_file(path) == digest:
            return path, "local"
        path.unlink(missing_ok=True)
        record_event(snapshot, DataEvent.Kind.CORRUPT, "The local copy does not match its digest.", now=now)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY_PREFIX)
        os.close(descriptor)
    except OSError as error:
        raise StoreError("local copy", "hydrate", str(error)) from error
    temporary = Path(name)
    try:
        for _ in range(MAX_DOWNLOADS):
            with temporary.open("wb") as target:
                exists = get_store().download(f"{snapshot.key}/{part}", track_transfer(target))
            is_intact = exists and digest_file(temporary) == digest
            if is_intact or not exists:
                break
        if not is_intact:
            detail = f"{snapshot.key}/{part} " + ("does not match its digest" if exists else "is missing in the store")
            if exists or missing_snapshots.note_missing(snapshot, now=now):
                record_event(snapshot, DataEvent.Kind.CORRUPT, detail, now=now)
            raise CorruptSnapshot(detail, absent=not exists)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    worker_host = registry.find_worker_host(now=now)
    found = {"local": True, "host": worker_host or snapshot.host, "missing_since": None}
    Snapshot.objects.filter(key=snapshot.key).update(**found)  # the copy exists again
    return path, "cloud"


def _write_local_copy(snapshot: Snapshot, chunks: Iterable[bytes]) -> None:
    path = local_directory(snapshot) / "workspace"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError("local copy", "persist", str(error)) from error
    snapshot.size_bytes, snapshot.digests["workspace"] = write_file(path, chunks)


def _remove_local_directory(snapshot: Snapshot) -> None:
    """Remove what an aborted `persist` has written."""
    directory = local_directory(snapshot)
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):  # the holder has other local copies
        directory.parent.rmdir()


def record_event(snapshot: Snapshot, kind: DataEvent.Kind, detail: str, *, now: datetime) -> None:
    """Record a DataEvent of a snapshot's holder, and log it as an error."""
    agents = Sandbox.objects.filter(holder=snapshot.holder).exclude(agent_did="").values_list("agent_did", flat=True)
    did = agents.first() or snapshot.sandbox.agent_did  # a fork's first snapshot belongs to the first agent's sandbox
    DataEvent.objects.create(holder=snapshot.holder, agent_did=did, at=now, kind=kind, detail=detail)
    log.error("snapshot", kind=kind.value, snapshot=str(snapshot.pk), detail=detail)
