"""What is newer in the store than in a sandbox's /data, written into it."""

import hashlib
import tarfile
import uuid
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any, BinaryIO

from django.db.models import F, Q

from sandboxes.db.clock import Later
from sandboxes.lifecycle import step
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject
from sandboxes.providers.base import DATA, Provider, Stat
from sandboxes.state.changes import above, as_given, look_of
from sandboxes.state.merge import tell
from sandboxes.state.spool import Slice, side_by_side, spool
from sandboxes.storage import store
from sandboxes.storage.base import CHUNK, StoreError

FEW = 8  # parts of one object that are fetched by themselves: each takes a request, and a file that is open
PULL_WITHIN = timedelta(minutes=5)  # whoever takes longer has died


class Outdated(StoreError):
    """An object is not there: another sandbox may have stored something newer since the rows were read."""


def claim(here: Attachment, *, now: datetime) -> bool:
    free = Q(pull_until__isnull=True) | Q(pull_until__lt=now)
    claimed = Attachment.objects.filter(free, pk=here.pk, version=here.version).update(
        version=F("version") + 1, pull_until=now + PULL_WITHIN
    )
    here.version += bool(claimed)
    return bool(claimed)


def pull(here: Attachment, sandbox: Sandbox, provider: Provider, later: Later) -> None:
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
        unseen = {row.path: row for row in wanted if row.path not in forced and _changed_there(row, here, there)}
        wanted = [row for row in wanted if row.path not in unseen]
        blocked = _blocked(wanted, there)
        unseen |= {row.path: row for row in wanted if row.path in blocked}
        wanted = [row for row in wanted if row.path not in unseen]
        revision = min([revision, *(row.revision - 1 for row in unseen.values())])
        with spool() as tar:
            assemble([row for row in wanted if not row.removed], tar, now=later())
            _note(here, pulling=sorted(row.path for row in wanted))  # not before all of it is here: a store may fail for long
            step("pull decided", here)
            _write_into(sandbox, provider, wanted, there, tar)
        step("pulled", here)
        there = provider.manifest(sandbox.ref, DATA) if wanted else there
    except BaseException:
        Attachment.objects.filter(pk=here.pk, version=here.version).update(pull_until=None)
        raise
    for row in wanted:
        if row.removed:
            here.base.pop(row.path, None)
        else:
            here.base[row.path] = [row.revision, row.digest, _stamp(row, there.get(row.path))]
    clean = all(as_given(path, stat, here) for path, stat in there.items()) and here.base.keys() <= there.keys()
    _note(here, pulling=[], pull_until=None, base=here.base, revision=revision, look=look_of(there) if clean else "")


def _stamp(row: DataFile, stat: Stat | None) -> str:
    """What this version looks like in the sandbox; "" if a program was quicker than our look and has changed it again."""
    if stat is None or (row.kind, row.size_bytes, row.target) != (stat.kind, stat.size, stat.target):
        return ""
    return stat.stamp if row.kind != "file" or row.mtime == stat.mtime else ""


def _changed_there(row: DataFile, here: Attachment, there: Mapping[str, Stat]) -> bool:
    stat = there.get(row.path)
    if stat is None:
        return row.path in here.base  # it was removed in the sandbox, and that is not stored yet
    if stat.kind == row.kind == "directory":
        return False
    return not as_given(row.path, stat, here)


def _blocked(wanted: list[DataFile], there: Mapping[str, Stat]) -> set[str]:
    """Which of these cannot be written now: a directory there holds something that stays, or a file there stays that is
    on the way. Then the sandbox has changes of its own around it."""
    going = {row.path for row in wanted if row.path in there and (row.removed or there[row.path].kind != row.kind)}
    held = {path for each in there if each not in going for path in above(each)}
    for path in sorted(going, reverse=True):  # the deepest first
        if path in held:
            going.discard(path)
            held.update(above(path))
    files = {path for path, stat in there.items() if stat.kind != "directory"} - going
    return {
        row.path
        for row in wanted
        if not row.removed and ((row.path in held and row.kind != "directory") or not files.isdisjoint(above(row.path)))
    }


def _write_into(sandbox: Sandbox, provider: Provider, wanted: list[DataFile], there: Mapping[str, Stat], tar: BinaryIO) -> None:
    kept = [row for row in wanted if not row.removed]
    gone = [row.path for row in wanted if row.removed and row.path in there]
    gone += [row.path for row in kept if row.path in there and there[row.path].kind != row.kind]
    if gone:
        provider.remove_files(sandbox.ref, DATA, gone)
    if kept:
        provider.put_files(sandbox.ref, DATA, tar)


def assemble(kept: list[DataFile], out: BinaryIO, *, now: datetime) -> None:
    """Write a tar of these versions, fetched from the store and checked."""
    with ExitStack() as stack:
        content = fetch([row for row in kept if row.kind == "file"], stack, now=now)
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


def fetch(files: Collection[DataFile], stack: ExitStack, *, now: datetime) -> dict[str, "Slice"]:
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
        if most_of_it or stored.size_bytes <= CHUNK or len(group) > FEW:
            jobs.append((stored, 0, None, group))
        else:
            jobs += [(stored, row.offset, row.size_bytes, [row]) for row in group]

    spools = [stack.enter_context(spool()) for _ in jobs]

    def one(at: int) -> None:
        stored, start, length, _ = jobs[at]
        if length != 0 and not store().download(stored.key, spools[at], start=start, length=length):
            raise Outdated(store().name, "download", "an object of an agent's data is not there", key=stored.key)

    side_by_side(one, range(len(jobs)))
    return {
        row.path: _checked(row, spools[at], row.offset - start, stored.key, now=now)
        for at, (stored, start, _, group) in enumerate(jobs)
        for row in group
    }


def _checked(row: DataFile, source: BinaryIO, start: int, key: str, *, now: datetime) -> Slice:
    source.flush()
    digest, whole = hashlib.sha256(), Slice(source, start, row.size_bytes)
    while chunk := whole.read(CHUNK):
        digest.update(chunk)
    if digest.hexdigest() != row.digest:
        tell(row.data.agent_did, None, DataEvent.Kind.CORRUPT, path=row.path, detail=f"{key} is not what was stored", now=now)
        raise StoreError(store().name, "download", f"{row.path!r} is not what was stored", key=key)
    return Slice(source, start, row.size_bytes)


def _note(here: Attachment, **columns: Any) -> None:
    """Write some columns of the attachment, if nobody else has since it was read; else StoreError, as if it failed."""
    if not Attachment.objects.filter(pk=here.pk, version=here.version).update(version=F("version") + 1, **columns):
        raise StoreError(store().name, "attach", "somebody else attached the same sandbox meanwhile")
    here.version += 1
    for name, value in columns.items():
        setattr(here, name, value)
