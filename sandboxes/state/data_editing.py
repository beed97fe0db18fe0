"""An agent's data, changed by an operator without a sandbox.

Objects first, then the rows in one transaction under the lock of the agent's data, as when a sandbox's changes are
stored: live sandboxes pull what is new at their next use. Whoever writes a path last is who wrote it."""

import gzip
import hashlib
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from shutil import copyfileobj
from typing import IO

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Q, Sum
from django.db.models.functions import Coalesce

from sandboxes.db.clock import ticking
from sandboxes.errors import DataFull, SandboxError
from sandboxes.lifecycle import step
from sandboxes.models.state import AgentData, DataFile, DataObject, DataSize, Keeping
from sandboxes.state import changes, data_sync, data_tree
from sandboxes.state.changes import Piece, above
from sandboxes.state.merge import WRITTEN
from sandboxes.state.spool import spool
from sandboxes.storage.base import CHUNK, StoreError

log = structlog.get_logger(__name__)
BROKEN = (tarfile.TarError, EOFError, KeyError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
PERMISSIONS = 0o777  # the bits that are written into sandboxes


class Unfit(SandboxError):
    """That cannot be put into an agent's data."""

    code = "bad_path"


class NotThere(SandboxError):
    """There is no such file or directory in the agent's data."""

    code = "file_not_found"


class Mounted(SandboxError):
    """This agent's data is mounted: its files lie as they are in the bucket, below agents/DID/files. Use them there."""

    code = "data_mounted"


class Bundle:
    """What is to be written: rows that are not saved yet, and a spooled tar with the bytes of those that are files."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.spool = stack, stack.enter_context(spool())
        self._tar = tarfile.open(fileobj=self.spool, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - `upload` ends it
        self.rows: dict[str, DataFile] = {}
        self.pieces: dict[str, Piece] = {}
        self._size = 0

    def add(self, row: DataFile, source: IO[bytes] | None = None) -> None:
        """Add one path, in the place of what was added under it before. Unfit, DataFull."""
        if why := data_tree.why_not(row.path) or data_tree.why_no_text(row.target):
            raise Unfit(f"{row.path!r} cannot be stored: {why}.")
        self._size += row.size_bytes
        if self._size > settings.DATA_MOST_BYTES:
            raise DataFull(f"That is more than the {settings.DATA_MOST_BYTES} bytes that are kept of one agent.")
        self.pieces.pop(row.path, None)
        if source is not None:
            self.pieces[row.path] = piece = self._copied(row.path, row.size_bytes, source)
            row.digest = piece.digest
        row.mode &= PERMISSIONS
        self.rows[row.path] = row

    def _copied(self, path: str, size: int, source: IO[bytes]) -> Piece:
        member, digesting = tarfile.TarInfo(path), _Digesting(source)
        member.size = size
        self._tar.addfile(member, digesting)
        offset = self.spool.tell() - (size + -size % tarfile.BLOCKSIZE)
        return Piece(path, offset, size, digesting.digest.hexdigest())

    def upload(self, mine: AgentData, now: datetime) -> None:
        """Have the bytes in the store; then the pieces know their objects."""
        self._tar.close()
        self.spool.flush()  # its parts may be read by their place in the file
        if self.pieces:
            fresh = list(self.pieces.values())
            changes.upload(mine, self.spool, self.spool.tell(), fresh, ticking(now), self._stack)


class _Digesting:
    """A file that is read, and the SHA-256 of what was read of it."""

    def __init__(self, source: IO[bytes]) -> None:
        self.source, self.digest = source, hashlib.sha256()

    def read(self, most: int = -1, /) -> bytes:
        chunk = self.source.read(most)
        self.digest.update(chunk)
        return chunk


def put(agent_did: str, path: str, source: IO[bytes], *, mode: int = 0o644, now: datetime) -> int:
    """Have the rest of `source` as the newest version of a file; 1, or 0 if it is that already."""
    with ExitStack() as stack:
        whole = stack.enter_context(spool())
        copyfileobj(source, whole, CHUNK)
        size = whole.tell()
        whole.seek(0)
        bundle = Bundle(stack)
        bundle.add(DataFile(path=path, kind="file", mode=mode, mtime=int(now.timestamp()), size_bytes=size), whole)
        return _write(agent_did, bundle, now)


def load_tar(agent_did: str, source: IO[bytes], *, now: datetime) -> int:
    """Have what a tar holds in the agent's data, beside what is there; how many paths are new or changed.

    All of it or nothing: Unfit if anything in it is no file, directory or link, or has no fit path."""
    with ExitStack() as stack:
        bundle = Bundle(stack)
        try:
            tar = stack.enter_context(tarfile.open(fileobj=source, mode="r:*"))
            for member in tar:
                _add_member(bundle, tar, member)
        except BROKEN as bad:
            raise Unfit(f"That is no whole tar: {bad}.") from bad
        return _write(agent_did, bundle, now)


def _add_member(bundle: Bundle, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    path = "/" * member.name.startswith("/") + "/".join(part for part in member.name.split("/") if part not in ("", "."))
    if not path:
        return  # the directory itself
    row = DataFile(path=path, mode=member.mode, mtime=int(member.mtime))
    named = tar.getmember(member.linkname) if member.islnk() else member  # a second name of a file becomes a file
    if member.isdir():
        row.kind = "directory"
        bundle.add(row)
    elif member.issym():
        row.kind, row.target = "link", member.linkname
        bundle.add(row)
    elif named.isreg():
        row.kind, row.size_bytes = "file", named.size
        bundle.add(row, tar.extractfile(named))
    else:
        raise Unfit(f"{path!r} cannot be stored: it is no regular file, directory or link.")


def load_directory(agent_did: str, root: Path, *, now: datetime) -> int:
    """Have what a directory holds in the agent's data, like load_tar. No link is followed."""
    with ExitStack() as stack:
        bundle = Bundle(stack)
        for found in _walk(root):
            path, status = found.relative_to(root).as_posix(), found.lstat()
            row = DataFile(path=path, mode=status.st_mode, mtime=int(status.st_mtime))
            if found.is_symlink():
                row.kind, row.target = "link", str(found.readlink())
                bundle.add(row)
            elif found.is_dir():
                row.kind = "directory"
                bundle.add(row)
            elif found.is_file():
                row.kind, row.size_bytes = "file", status.st_size
                with found.open("rb") as source:
                    bundle.add(row, source)
            else:
                raise Unfit(f"{path!r} cannot be stored: it is no regular file, directory or link.")
        return _write(agent_did, bundle, now)


def _walk(root: Path) -> Iterator[Path]:
    for found in sorted(root.iterdir()):
        yield found
        if found.is_dir() and not found.is_symlink():
            yield from _walk(found)


def _write(agent_did: str, bundle: Bundle, now: datetime) -> int:
    """Store what the bundle holds and move the rows to it; how many were moved."""
    mine = _synced(data_sync.data_of(agent_did, now=now))
    if not _changed(bundle.rows, _there(mine)):
        return 0
    bundle.upload(mine, now)
    step("edit stored", mine)
    with transaction.atomic():
        mine = _locked(mine)
        there = _there(mine)
        _require_place(bundle.rows, there)
        rows = _changed(bundle.rows, there)
        moment = int(now.timestamp())
        for parent in {parent for path in rows for parent in above(path)} - there.keys() - bundle.rows.keys():
            rows[parent] = DataFile(path=parent, kind="directory", mode=0o755, mtime=moment)
        if rows:
            _move(mine, rows, bundle.pieces, now)
    _let_go(mine)
    return len(rows)


def remove(agent_did: str, path: str, *, recursive: bool = False, now: datetime) -> int:
    """Have a path removed, and with `recursive` what is below it; how many. NotThere, Unfit for a directory that holds
    something without it."""
    if why := data_tree.why_not(path):
        raise Unfit(f"{path!r} names nothing: {why}.")
    mine = kept(agent_did)
    with transaction.atomic():
        mine = _locked(mine)
        inside = data_tree.below(mine, path)
        if inside.exists() and not recursive:
            raise Unfit(f"{path!r} is a directory that is not empty.")
        gone = DataFile.objects.filter(Q(pk__in=inside.values("pk")) | Q(data=mine, path=path, removed=False))
        removed = gone.update(
            removed=True, stored_in=None, size_bytes=0, digest="", revision=mine.revision + 1, holder=None, at=now
        )
        if not removed:
            raise NotThere(f"There is no {path!r} in its data.")
        _count(mine, now)
    _let_go(mine)
    return removed


def kept(agent_did: str) -> AgentData:
    """What is kept of an agent. NotThere if nothing ever was, Mounted if it is not in the store's rows."""
    mine = AgentData.objects.filter(agent_did=agent_did).first()
    if mine is None:
        raise NotThere(f"Nothing is kept of {agent_did}.")
    return _synced(mine)


def _synced(mine: AgentData) -> AgentData:
    if mine.keeping == Keeping.MOUNT:
        raise Mounted()
    return mine


def _locked(mine: AgentData) -> AgentData:
    return _synced(AgentData.objects.select_for_update(no_key=True).get(pk=mine.pk))


def _there(mine: AgentData) -> dict[str, DataFile]:
    return {row.path: row for row in data_tree.live(mine)}


def _changed(rows: Mapping[str, DataFile], there: Mapping[str, DataFile]) -> dict[str, DataFile]:
    """Those that are not there as they are."""
    columns = ("kind", "mode", "target", "digest")
    return {
        path: row
        for path, row in rows.items()
        if path not in there or any(getattr(row, name) != getattr(there[path], name) for name in columns)
    }


def _require_place(rows: Mapping[str, DataFile], there: Mapping[str, DataFile]) -> None:
    """Unfit where a file would lie below a file, or take the place of a directory, or the other way round."""
    holding = {parent for path in there for parent in above(path)}  # also where a directory's own row was removed
    for path, row in rows.items():
        for parent in above(path):
            found = rows.get(parent) or there.get(parent)
            if found and found.kind != "directory":
                raise Unfit(f"{path!r} cannot be stored: {parent!r} is a {found.kind}. Remove that first.")
        now = "directory" if path in holding else there[path].kind if path in there else row.kind
        if (now == "directory") != (row.kind == "directory"):
            raise Unfit(f"{path!r} cannot be stored: it is a {now} now. Remove that first.")


def _move(mine: AgentData, rows: Mapping[str, DataFile], pieces: Mapping[str, Piece], now: datetime) -> None:
    objects: dict[str, DataObject] = {}
    for path, row in rows.items():
        row.data, row.revision, row.at = mine, mine.revision + 1, now
        if path in pieces:
            stored = pieces[path].object
            assert stored is not None  # it was uploaded
            row.stored_in, row.offset = objects.setdefault(stored.key, stored), pieces[path].offset
    DataObject.objects.bulk_create(objects.values())
    DataFile.objects.bulk_create(rows.values(), update_conflicts=True, unique_fields=["data", "path"], update_fields=WRITTEN)
    number, size = _count(mine, now)
    if number > settings.DATA_MOST_FILES or size > settings.DATA_MOST_BYTES:
        raise DataFull(
            f"Then /data would have {number} files and directories of {size} bytes; "
            f"{settings.DATA_MOST_FILES} of {settings.DATA_MOST_BYTES} are kept."
        )


def _count(mine: AgentData, now: datetime) -> tuple[int, int]:
    """Say what there is after a change: how many paths, and their bytes."""
    live = data_tree.live(mine).aggregate(
        all=Count("pk"), files=Count("pk", filter=Q(kind="file")), size=Coalesce(Sum("size_bytes"), 0)
    )
    AgentData.objects.filter(pk=mine.pk).update(
        revision=mine.revision + 1, files=live["files"], size_bytes=live["size"], changed_at=now
    )
    DataSize.note(mine.agent_did, live["size"], now=now)
    return live["all"], live["size"]


def _let_go(mine: AgentData) -> None:
    try:
        data_sync.drop_outdated(data_sync.outdated().filter(data=mine))
    except StoreError as failed:  # what is stored is stored: the prune sweep removes the rest
        log.warning("outdated objects left", agent=mine.agent_did, error=str(failed))
