"""A sandbox's own files, into the store and back: persist, hydrate, forget.

Objects first, the Snapshot row after them; the other way round when they go. A crash leaves at worst something that can
be listed. Each snapshot also stays as a plain file in the state directory of this machine, from which a wake is quicker."""

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet

from sandboxes.errors import SnapshotNotFound
from sandboxes.models import Sandbox
from sandboxes.models.state import DataEvent, Snapshot, SnapshotKind, format_key_timestamp
from sandboxes.providers.base import DATA, WORKSPACE, Provider
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
RESTORE_TIMEOUT = timedelta(minutes=10)  # whoever takes longer has died
MIN_SNAPSHOT_INTERVAL = timedelta(microseconds=1)
SNAPSHOT_ROOTS = {"workspace": WORKSPACE, "data": DATA}  # what a snapshot may have; new ones have the first


class StateLost(Exception):
    """No copy of what was stored is in any place where it should be."""


class CorruptSnapshot(Exception):
    """A copy is there and is not what was stored, or (`absent`) is not there at all."""

    def __init__(self, why: str, *, absent: bool) -> None:
        self.absent = absent
        super().__init__(why)


def persist(
    sandbox: Sandbox, provider: Provider, *, kind: SnapshotKind = SnapshotKind.SLEEP, name: str = "", now: datetime
) -> Snapshot:
    """Store the sandbox's files and say so in a Snapshot that is not saved yet: the caller saves it under its claim.

    ProviderError or StoreError when it did not work; then nothing points at what was stored."""
    assert sandbox.holder is not None
    snapshot = Snapshot(
        sandbox=sandbox, incarnation=sandbox.incarnation, holder=sandbox.holder, kind=kind, name=name, size_bytes=0,
        at=next_snapshot_time(sandbox.holder, now),
    )  # fmt: skip
    snapshot.key = f"snapshots/{sandbox.holder}/{format_key_timestamp(now)}-{snapshot.pk.hex}"
    path = local_directory(snapshot) / "workspace"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failed:
        raise StoreError("local copy", "persist", str(failed)) from failed
    files = provider.get_files(sandbox.ref, WORKSPACE, exclude=sandbox.excludes)
    snapshot.size_bytes, snapshot.digests["workspace"] = _write_file(path, files)
    with path.open("rb") as source:
        get_store().upload(f"{snapshot.key}/workspace", source)
    return snapshot


def find_by_holder(holder: UUID) -> QuerySet[Snapshot]:
    """The copies of a holder that are kept, the newest first."""
    return Snapshot.objects.filter(holder=holder, forgotten_at__isnull=True).order_by("-at", "-pk")


def find_latest(holder: UUID) -> Snapshot | None:
    """The copy that a wake would read."""
    return find_by_holder(holder).first()


def hydrate(snapshot: Snapshot, ref: str, provider: Provider, *, now: datetime) -> tuple[str, Snapshot]:
    """Unpack a snapshot into a sandbox, and say where it came from, "local" or "cloud", and which it was.

    A copy that is not what was stored is reported, and the next one is tried: this machine's, the store's, then those
    of the snapshots before it. StateLost when none is there any more; StoreError when one is and cannot be used, which
    an operator may mend. StoreError and ProviderError may pass, and the sandbox then holds anything."""
    bad: list[CorruptSnapshot] = []
    for candidate in [snapshot, *find_by_holder(snapshot.holder).exclude(pk=snapshot.pk).filter(at__lte=snapshot.at)]:
        try:
            source = _unpack(candidate, ref, provider, now=now)
        except CorruptSnapshot as found:
            bad.append(found)
            continue
        if candidate.pk != snapshot.pk:
            said = f"The newest copy cannot be read ({bad[0]}). This is the one of {candidate.at:%Y-%m-%d %H:%M:%S} UTC."
            _record_event(candidate, DataEvent.Kind.OLDER, said, now=now)
        return source, candidate
    if all(found.absent for found in bad):
        raise StateLost(str(bad[0]))
    raise StoreError(get_store().name, "hydrate", str(next(found for found in bad if not found.absent)))


def _unpack(snapshot: Snapshot, ref: str, provider: Provider, *, now: datetime) -> str:
    sources = set()
    for place in snapshot.digests:
        with open_snapshot(snapshot, place, now=now) as (tar, source):
            sources.add(source)
            provider.put_files(ref, SNAPSHOT_ROOTS[place], tar)
    return "cloud" if "cloud" in sources else "local"


@contextmanager
def open_snapshot(snapshot: Snapshot, place: str = "workspace", *, now: datetime) -> Iterator[tuple[BinaryIO, str]]:
    """A snapshot's tar, checked, and whether it is "local" or from the "cloud". Corrupt if no copy is what was stored."""
    path, source = _fetch_verified(snapshot, place, now=now)
    with path.open("rb") as tar:
        yield tar, source


def forget_local(snapshot: Snapshot) -> None:
    """Remove this machine's copy; the store keeps its own."""
    shutil.rmtree(local_directory(snapshot), ignore_errors=True)
    Snapshot.objects.filter(key=snapshot.key).update(local=False)


def is_own(snapshot: Snapshot) -> bool:
    """Was it stored from a sandbox of its holder's? Else it is a fork's beginning, with the files of another lease."""
    return snapshot.key.startswith(f"snapshots/{snapshot.holder}/")


def next_snapshot_time(holder: UUID, now: datetime) -> datetime:
    """Now, or a moment after the newest copy: which is the newest must not depend on whose clock is right."""
    newest = find_latest(holder)
    return max(now, newest.at + MIN_SNAPSHOT_INTERVAL) if newest else now


def forget_older(holder: UUID, *, now: datetime) -> int:
    """Keep the newest copies of a holder and forget the others; how many. Those that somebody asked for are counted by
    themselves (LEASEHOLD_KEEP_ASKED_SNAPSHOTS): sleeping must not push them out, nor they what a wake falls back to."""
    asked = Q(kind=SnapshotKind.ASKED)
    older = [
        *find_by_holder(holder).exclude(asked)[settings.KEEP_SNAPSHOTS :],
        *find_by_holder(holder).filter(asked)[settings.KEEP_ASKED_SNAPSHOTS :],
    ]
    newest = find_latest(holder)
    return sum(forget(old, now=now) for old in older if old != newest and not _being_restored(old, now))


def _being_restored(snapshot: Snapshot, now: datetime) -> bool:
    """It was noted for this a moment ago, and becomes the newest once what is there now sleeps."""
    return snapshot.kind == SnapshotKind.RESTORED and snapshot.at > now - RESTORE_TIMEOUT


def forget(snapshot: Snapshot, *, now: datetime) -> bool:
    """Let go of a copy. The row stays, as history; its objects are removed once no other row points to them."""
    with transaction.atomic():  # in the order of their keys: a fork locks the row that it copies
        same = Snapshot.objects.filter(key=snapshot.key)
        list(same.select_for_update(no_key=True).order_by("pk").values_list("pk"))
        forgotten = same.filter(pk=snapshot.pk, forgotten_at__isnull=True).update(forgotten_at=now)
        # Asked after the locks are held: a copy that we waited for is not in what we locked.
        if same.filter(forgotten_at__isnull=True).exists():
            return bool(forgotten)
    get_store().remove_many([f"{snapshot.key}/{place}" for place in snapshot.digests])
    forget_local(snapshot)
    return bool(forgotten)


def copy_snapshot(source: Snapshot, *, holder: UUID, kind: SnapshotKind, now: datetime) -> Snapshot:
    """Have a kept copy as the newest one of a holder: a second row for the same objects. NoSnapshot if it was forgotten.

    Call it inside a transaction; the copy cannot be forgotten before that ends."""
    kept = Snapshot.objects.select_for_update(no_key=True).filter(pk=source.pk, forgotten_at__isnull=True).first()
    if kept is None:
        raise SnapshotNotFound()
    kept.pk, kept.holder, kept.kind, kept.at = uuid.uuid4(), holder, kind, now
    kept._state.adding = True
    kept.save(force_insert=True)
    return kept


def local_directory(snapshot: Snapshot) -> Path:
    return settings.STATE_DIR / snapshot.key


def _fetch_verified(snapshot: Snapshot, place: str, *, now: datetime) -> tuple[Path, str]:
    """A local file with this object, checked, and where it had to come from."""
    path, wanted = local_directory(snapshot) / place, snapshot.digests[place]
    if path.is_file():
        if _digest_file(path) == wanted:
            return path, "local"
        path.unlink(missing_ok=True)
        _record_event(snapshot, DataEvent.Kind.CORRUPT, "This machine's copy is not what was stored.", now=now)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    except OSError as failed:
        raise StoreError("local copy", "hydrate", str(failed)) from failed
    fetched = Path(name)
    try:
        with open(descriptor, "wb") as target:
            there = get_store().download(f"{snapshot.key}/{place}", target)
        if not there or _digest_file(fetched) != wanted:
            said = f"{snapshot.key}/{place} " + ("is not what was stored" if there else "is not in the store")
            _record_event(snapshot, DataEvent.Kind.CORRUPT, said, now=now)
            raise CorruptSnapshot(said, absent=not there)
        os.replace(fetched, path)
    finally:
        fetched.unlink(missing_ok=True)
    Snapshot.objects.filter(key=snapshot.key).update(local=True)  # there is a copy here again
    return path, "cloud"


def _write_file(path: Path, chunks: Iterable[bytes]) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    temporary = path.with_name(f".new-{path.name}")
    try:
        with temporary.open("wb") as out:
            for chunk in chunks:
                size += len(chunk)
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as failed:
        temporary.unlink(missing_ok=True)
        raise StoreError("local copy", "persist", str(failed)) from failed
    return size, digest.hexdigest()


def _digest_file(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _record_event(snapshot: Snapshot, kind: DataEvent.Kind, said: str, *, now: datetime) -> None:
    holds = Sandbox.objects.filter(holder=snapshot.holder).exclude(agent_did="").values_list("agent_did", flat=True)
    did = holds.first() or snapshot.sandbox.agent_did  # of a fork's first copy it is the first agent's sandbox
    DataEvent.objects.create(holder=snapshot.holder, agent_did=did, at=now, kind=kind, detail=said[:500])
    log.error("snapshot", what=kind.value, snapshot=str(snapshot.pk), detail=said)
