"""What is newer in the store than in a sandbox's /data, written into it."""

import hashlib
import tarfile
import uuid
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any, BinaryIO

from django.db.models import F, Q

from sandboxes.db.clock import Clock
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject
from sandboxes.providers.base import DATA, FileStat, Provider
from sandboxes.state.changes import digest_manifest, is_unchanged, list_parents
from sandboxes.state.merge import record_event
from sandboxes.state.spool import FileSlice, open_spool, run_parallel
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES, StoreError

MAX_RANGE_REQUESTS = 8  # parts of one object that are fetched by themselves: each takes a request, and a file that is open
PULL_TIMEOUT = timedelta(minutes=5)  # whoever takes longer has died


class ObjectMissing(StoreError):
    """An object is not there: another sandbox may have stored something newer since the rows were read."""


def claim_pull(here: Attachment, *, now: datetime) -> bool:
    free = Q(pull_until__isnull=True) | Q(pull_until__lt=now)
    claimed = Attachment.objects.filter(free, pk=here.pk, version=here.version).update(
        version=F("version") + 1, pull_until=now + PULL_TIMEOUT
    )
    here.version += bool(claimed)
    return bool(claimed)


def pull(here: Attachment, sandbox: Sandbox, provider: Provider, later: Clock) -> None:
    """Write what is newer than what this sandbox was given, except where it has changes of its own: those versions it
    has not seen yet, and is given them once `persist` has decided."""
    try:
        revision = AgentData.objects.values_list("revision", flat=True).get(pk=here.data_id)
        newer = DataFile.objects.filter(data=here.data_id, revision__gt=here.revision).select_related("stored_in")
        wanted = [row for row in newer if here.base.get(row.path, [0])[0] != row.revision]
        forced = set(here.pulling)
        if forced:  # a pull that died has left anything there
            wanted += DataFile.objects.filter(data=here.data_id, path__in=forced - {row.path for row in wanted})
        there = provider.manifest(sandbox.ref, DATA)
        unseen = {row.path: row for row in wanted if row.path not in forced and _is_changed_in_sandbox(row, here, there)}
        wanted = [row for row in wanted if row.path not in unseen]
        blocked = _find_blocked_paths(wanted, there)
        unseen |= {row.path: row for row in wanted if row.path in blocked}
        wanted = [row for row in wanted if row.path not in unseen]
        revision = min([revision, *(row.revision - 1 for row in unseen.values())])
        with open_spool() as tar:
            write_tar([row for row in wanted if not row.removed], tar, now=later())
            _update_attachment(
                here, pulling=sorted(row.path for row in wanted)
            )  # not before all of it is here: a store may fail for long
            checkpoint("pull decided", here)
            _write_to_sandbox(sandbox, provider, wanted, there, tar)
        checkpoint("pulled", here)
        there = provider.manifest(sandbox.ref, DATA) if wanted else there
    except BaseException:
        Attachment.objects.filter(pk=here.pk, version=here.version).update(pull_until=None)
        raise
    for row in wanted:
        if row.removed:
            here.base.pop(row.path, None)
        else:
            here.base[row.path] = [row.revision, row.digest, _stamp_if_written(row, there.get(row.path))]
    clean = all(is_unchanged(path, stat, here) for path, stat in there.items()) and here.base.keys() <= there.keys()
    _update_attachment(
        here, pulling=[], pull_until=None, base=here.base, revision=revision, look=digest_manifest(there) if clean else ""
    )


def _stamp_if_written(row: DataFile, stat: FileStat | None) -> str:
    """What this version looks like in the sandbox; "" if a program was quicker than our look and has changed it again."""
    if stat is None or (row.kind, row.size_bytes, row.target) != (stat.kind, stat.size, stat.target):
        return ""
    return stat.stamp if row.kind != "file" or row.mtime == stat.mtime else ""


def _is_changed_in_sandbox(row: DataFile, here: Attachment, there: Mapping[str, FileStat]) -> bool:
    stat = there.get(row.path)
    if stat is None:
        return row.path in here.base  # it was removed in the sandbox, and that is not stored yet
    if stat.kind == row.kind == "directory":
        return False
    return not is_unchanged(row.path, stat, here)


def _find_blocked_paths(wanted: list[DataFile], there: Mapping[str, FileStat]) -> set[str]:
    """Which of these cannot be written now: a directory there holds something that stays, or a file there stays that is
    on the way. Then the sandbox has changes of its own around it."""
    going = {row.path for row in wanted if row.path in there and (row.removed or there[row.path].kind != row.kind)}
    held = {path for each in there if each not in going for path in list_parents(each)}
    for path in sorted(going, reverse=True):  # the deepest first
        if path in held:
            going.discard(path)
            held.update(list_parents(path))
    files = {path for path, stat in there.items() if stat.kind != "directory"} - going
    return {
        row.path
        for row in wanted
        if not row.removed and ((row.path in held and row.kind != "directory") or not files.isdisjoint(list_parents(row.path)))
    }


def _write_to_sandbox(
    sandbox: Sandbox, provider: Provider, wanted: list[DataFile], there: Mapping[str, FileStat], tar: BinaryIO
) -> None:
    kept = [row for row in wanted if not row.removed]
    gone = [row.path for row in wanted if row.removed and row.path in there]
    gone += [row.path for row in kept if row.path in there and there[row.path].kind != row.kind]
    if gone:
        provider.remove_files(sandbox.ref, DATA, gone)
    if kept:
        provider.put_files(sandbox.ref, DATA, tar)


def write_tar(kept: list[DataFile], out: BinaryIO, *, now: datetime) -> None:
    """Write a tar of these versions, fetched from the store and checked."""
    with ExitStack() as stack:
        content = fetch_contents([row for row in kept if row.kind == "file"], stack, now=now)
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for row in sorted(kept, key=lambda row: row.path):
                member = tarfile.TarInfo(row.path)
                member.mode, member.mtime = row.mode, row.mtime
                if row.kind == "file":
                    member.size = row.size_bytes
                    tar.addfile(member, content[row.path])
                elif row.kind == "link":
                    member.type, member.linkname = tarfile.SYMTYPE, row.target
                    tar.addfile(member)
                else:
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)
    out.seek(0)


def fetch_contents(files: Collection[DataFile], stack: ExitStack, *, now: datetime) -> dict[str, "FileSlice"]:
    """The bytes of these files, checked. An object that is wanted for the greater part is fetched whole. StoreError if
    one is missing, cut short or not what was stored."""
    by_object: dict[uuid.UUID, list[DataFile]] = {}
    for row in files:
        assert row.stored_in_id is not None
        by_object.setdefault(row.stored_in_id, []).append(row)
    jobs: list[tuple[DataObject, int, int | None, list[DataFile]]] = []
    for group in by_object.values():
        stored = group[0].stored_in
        assert stored is not None
        most_of_it = sum(row.size_bytes for row in group) * 2 >= stored.size_bytes
        if most_of_it or stored.size_bytes <= CHUNK_BYTES or len(group) > MAX_RANGE_REQUESTS:
            jobs.append((stored, 0, None, group))
        else:
            jobs += [(stored, row.offset, row.size_bytes, [row]) for row in group]

    spools = [stack.enter_context(open_spool()) for _ in jobs]

    def one(at: int) -> None:
        stored, start, length, _ = jobs[at]
        if length != 0 and not get_store().download(stored.key, spools[at], start=start, length=length):
            raise ObjectMissing(get_store().name, "download", "an object of an agent's data is not there", key=stored.key)

    run_parallel(one, range(len(jobs)))
    return {
        row.path: _verify_content(row, spools[at], row.offset - start, stored.key, now=now)
        for at, (stored, start, _, group) in enumerate(jobs)
        for row in group
    }


def _verify_content(row: DataFile, source: BinaryIO, start: int, key: str, *, now: datetime) -> FileSlice:
    source.flush()
    digest, whole = hashlib.sha256(), FileSlice(source, start, row.size_bytes)
    while chunk := whole.read(CHUNK_BYTES):
        digest.update(chunk)
    if digest.hexdigest() != row.digest:
        record_event(
            row.data.agent_did, None, DataEvent.Kind.CORRUPT, path=row.path, detail=f"{key} is not what was stored", now=now
        )
        raise StoreError(get_store().name, "download", f"{row.path!r} is not what was stored", key=key)
    return FileSlice(source, start, row.size_bytes)


def _update_attachment(here: Attachment, **columns: Any) -> None:
    """Write some columns of the attachment, if nobody else has since it was read; else StoreError, as if it failed."""
    if not Attachment.objects.filter(pk=here.pk, version=here.version).update(version=F("version") + 1, **columns):
        raise StoreError(get_store().name, "attach", "somebody else attached the same sandbox meanwhile")
    here.version += 1
    for name, value in columns.items():
        setattr(here, name, value)
