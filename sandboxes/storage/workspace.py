"""A sandbox's files, into the store and back: persist, hydrate, forget.

Objects first, the Snapshot row after them, older objects last: a crash leaves at worst something that can be listed.
Each snapshot also stays as plain files in the state directory of this machine, from which a wake is quicker."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from uuid import UUID

import structlog
from django.conf import settings

from sandboxes.models import Sandbox, Snapshot
from sandboxes.providers.base import DATA, WORKSPACE, Provider
from sandboxes.storage import store
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
PLACES = {"workspace": WORKSPACE, "data": DATA}


class StateLost(Exception):
    """The snapshot's objects are in no place where they should be."""


def persist(sandbox: Sandbox, provider: Provider, *, now: datetime) -> Snapshot:
    """Store the sandbox's files and say so in a Snapshot that is not saved yet: the caller saves it under its claim.

    ProviderError or StoreError when it did not work; then nothing points at what was stored."""
    assert sandbox.holder is not None
    snapshot = Snapshot(sandbox=sandbox, incarnation=sandbox.incarnation, holder=sandbox.holder, at=now, size_bytes=0)
    directory = local_of(snapshot)
    directory.mkdir(parents=True, exist_ok=True)
    for place, root in PLACES.items():
        path = directory / place
        size, digest = _write(path, provider.get_files(sandbox.ref, root))
        snapshot.size_bytes += size
        snapshot.digests[place] = digest
        with path.open("rb") as source:
            store().upload(f"{snapshot.key}/{place}", source)
    return snapshot


def latest(holder: UUID) -> Snapshot | None:
    """The copy that a wake would read."""
    return Snapshot.objects.filter(holder=holder, forgotten_at__isnull=True).order_by("-at").first()


def hydrate(snapshot: Snapshot, ref: str, provider: Provider) -> str:
    """Unpack a snapshot into a sandbox, and say where it came from: "local" or "cloud".

    StateLost when neither has it; StoreError and ProviderError may pass, and the sandbox then holds anything."""
    sources = set()
    for place, root in PLACES.items():
        path, source = _fetched(snapshot, place)
        sources.add(source)
        with path.open("rb") as tar:
            provider.put_files(ref, root, tar)
    if "cloud" not in sources:
        return "local"
    Snapshot.objects.filter(pk=snapshot.pk).update(local=True)  # there is a copy here again
    return "cloud"


def forget_local(snapshot: Snapshot) -> None:
    """Remove this machine's copy; the store keeps its own."""
    shutil.rmtree(local_of(snapshot), ignore_errors=True)
    Snapshot.objects.filter(pk=snapshot.pk).update(local=False)


def forget_older(snapshot: Snapshot, *, now: datetime) -> int:
    """Remove every older copy of the same holder, from the store too; how many."""
    older = Snapshot.objects.filter(holder=snapshot.holder, forgotten_at__isnull=True, at__lt=snapshot.at)
    return sum(forget(old, now=now) for old in older)


def forget(snapshot: Snapshot, *, now: datetime) -> bool:
    """Remove a copy from everywhere. The row stays, as history."""
    for place in PLACES:
        store().remove(f"{snapshot.key}/{place}")
    forget_local(snapshot)
    return bool(Snapshot.objects.filter(pk=snapshot.pk, forgotten_at__isnull=True).update(forgotten_at=now))


def local_of(snapshot: Snapshot) -> Path:
    return Path(settings.STATE_DIR) / "snapshots" / snapshot.holder.hex / snapshot.pk.hex


def _fetched(snapshot: Snapshot, place: str) -> tuple[Path, str]:
    """A local file with this object, and where it had to come from."""
    path = local_of(snapshot) / place
    if path.is_file():
        return path, "local"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    fetched = Path(name)
    with open(descriptor, "wb") as target:
        there = store().download(f"{snapshot.key}/{place}", target)
    if not there:
        fetched.unlink()
        raise StateLost(f"{snapshot.key}/{place} is in no store")
    if _digest(fetched) != snapshot.digests[place]:
        fetched.unlink()
        raise StoreError(f"{snapshot.key}/{place} is not what was stored")
    os.replace(fetched, path)
    return path, "cloud"


def _write(path: Path, chunks: Iterable[bytes]) -> tuple[int, str]:
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
        raise StoreError(str(failed)) from failed
    return size, digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
