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

from sandboxes.db.clock import clock_from
from sandboxes.errors import DataFull, SandboxError
from sandboxes.lifecycle import checkpoint
from sandboxes.models.state import AgentData, DataFile, DataObject, DataSize, DataStorageMode
from sandboxes.state import changes, data_sync, data_tree
from sandboxes.state.changes import ChangedFile, list_parents
from sandboxes.state.merge import UPSERT_COLUMNS
from sandboxes.state.spool import open_spool
from sandboxes.storage.base import CHUNK_BYTES, StoreError

log = structlog.get_logger(__name__)
TAR_ERRORS = (tarfile.TarError, EOFError, KeyError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
PERMISSION_BITS = 0o777  # the bits that are written into sandboxes


class InvalidDataPath(SandboxError):
    """That cannot be put into an agent's data."""

    code = "bad_path"


class DataPathNotFound(SandboxError):
    """There is no such file or directory in the agent's data."""

    code = "file_not_found"


class DataMounted(SandboxError):
    """This agent's data is mounted: its files lie as they are in the bucket, below agents/DID/files. Use them there."""

    code = "data_mounted"


class Bundle:
    """What is to be written: rows that are not saved yet, and a spooled tar with the bytes of those that are files."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.spool = stack, stack.enter_context(open_spool())
        self._tar = tarfile.open(fileobj=self.spool, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - `upload` ends it
        self.rows: dict[str, DataFile] = {}
        self.pieces: dict[str, ChangedFile] = {}
        self._size = 0

    def add(self, row: DataFile, source: IO[bytes] | None = None) -> None:
        """Add one path, in the place of what was added under it before. Unfit, DataFull."""
        if why := data_tree.describe_path_error(row.path) or data_tree.describe_text_error(row.target):
            raise InvalidDataPath(f"{row.path!r} cannot be stored: {why}.")
        self._size += row.size_bytes
        if self._size > settings.DATA_MOST_BYTES:
            raise DataFull(f"That is more than the {settings.DATA_MOST_BYTES} bytes that are kept of one agent.")
        self.pieces.pop(row.path, None)
        if source is not None:
            self.pieces[row.path] = piece = self._copy_to_tar(row.path, row.size_bytes, source)
            row.digest = piece.digest
        row.mode &= PERMISSION_BITS
        self.rows[row.path] = row

    def _copy_to_tar(self, path: str, size: int, source: IO[bytes]) -> ChangedFile:
        member, digesting = tarfile.TarInfo(path), _DigestingReader(source)
        member.size = size
        self._tar.addfile(member, digesting)
        offset = self.spool.tell() - (size + -size % tarfile.BLOCKSIZE)
        return ChangedFile(path, offset, size, digesting.digest.hexdigest())

    def upload(self, mine: AgentData, now: datetime) -> None:
        """Have the bytes in the store; then the pieces know their objects."""
        self._tar.close()
        self.spool.flush()  # its parts may be read by their place in the file
        if self.pieces:
            fresh = list(self.pieces.values())
            changes.upload_tar(mine, self.spool, self.spool.tell(), fresh, clock_from(now), self._stack)


class _DigestingReader:
    """A file that is read, and the SHA-256 of what was read of it."""

    def __init__(self, source: IO[bytes]) -> None:
        self.source, self.digest = source, hashlib.sha256()

    def read(self, most: int = -1, /) -> bytes:
        chunk = self.source.read(most)
        self.digest.update(chunk)
        return chunk


def put_file(agent_did: str, path: str, source: IO[bytes], *, mode: int = 0o644, now: datetime) -> int:
    """Have the rest of `source` as the newest version of a file; 1, or 0 if it is that already."""
    with ExitStack() as stack:
        whole = stack.enter_context(open_spool())
        copyfileobj(source, whole, CHUNK_BYTES)
        size = whole.tell()
        whole.seek(0)
        bundle = Bundle(stack)
        bundle.add(DataFile(path=path, kind="file", mode=mode, mtime=int(now.timestamp()), size_bytes=size), whole)
        return _store_bundle(agent_did, bundle, now)


def load_tar(agent_did: str, source: IO[bytes], *, now: datetime) -> int:
    """Have what a tar holds in the agent's data, beside what is there; how many paths are new or changed.

    All of it or nothing: Unfit if anything in it is no file, directory or link, or has no fit path."""
    with ExitStack() as stack:
        bundle = Bundle(stack)
        try:
            tar = stack.enter_context(tarfile.open(fileobj=source, mode="r:*"))
            for member in tar:
                _add_member(bundle, tar, member)
        except TAR_ERRORS as bad:
            raise InvalidDataPath(f"That is no whole tar: {bad}.") from bad
        return _store_bundle(agent_did, bundle, now)


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
        raise InvalidDataPath(f"{path!r} cannot be stored: it is no regular file, directory or link.")


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
                raise InvalidDataPath(f"{path!r} cannot be stored: it is no regular file, directory or link.")
        return _store_bundle(agent_did, bundle, now)


def _walk(root: Path) -> Iterator[Path]:
    for found in sorted(root.iterdir()):
        yield found
        if found.is_dir() and not found.is_symlink():
            yield from _walk(found)


def _store_bundle(agent_did: str, bundle: Bundle, now: datetime) -> int:
    """Store what the bundle holds and move the rows to it; how many were moved."""
    mine = _require_synced(data_sync.ensure_agent_data(agent_did, now=now))
    if not _select_changed(bundle.rows, _load_live_rows(mine)):
        return 0
    bundle.upload(mine, now)
    checkpoint("edit stored", mine)
    with transaction.atomic():
        mine = _lock_synced(mine)
        there = _load_live_rows(mine)
        _check_placement(bundle.rows, there)
        rows = _select_changed(bundle.rows, there)
        moment = int(now.timestamp())
        for parent in {parent for path in rows for parent in list_parents(path)} - there.keys() - bundle.rows.keys():
            rows[parent] = DataFile(path=parent, kind="directory", mode=0o755, mtime=moment)
        if rows:
            _upsert_rows(mine, rows, bundle.pieces, now)
    _collect_outdated(mine)
    return len(rows)


def remove_path(agent_did: str, path: str, *, recursive: bool = False, now: datetime) -> int:
    """Have a path removed, and with `recursive` what is below it; how many. NotThere, Unfit for a directory that holds
    something without it."""
    if why := data_tree.describe_path_error(path):
        raise InvalidDataPath(f"{path!r} names nothing: {why}.")
    mine = get_synced_data(agent_did)
    with transaction.atomic():
        mine = _lock_synced(mine)
        inside = data_tree.find_files_below(mine, path)
        if inside.exists() and not recursive:
            raise InvalidDataPath(f"{path!r} is a directory that is not empty.")
        gone = DataFile.objects.filter(Q(pk__in=inside.values("pk")) | Q(data=mine, path=path, removed=False))
        removed = gone.update(
            removed=True, stored_in=None, size_bytes=0, digest="", revision=mine.revision + 1, holder=None, at=now
        )
        if not removed:
            raise DataPathNotFound(f"There is no {path!r} in its data.")
        _update_totals(mine, now)
    _collect_outdated(mine)
    return removed


def get_synced_data(agent_did: str) -> AgentData:
    """What is kept of an agent. NotThere if nothing ever was, Mounted if it is not in the store's rows."""
    mine = AgentData.objects.filter(agent_did=agent_did).first()
    if mine is None:
        raise DataPathNotFound(f"Nothing is kept of {agent_did}.")
    return _require_synced(mine)


def _require_synced(mine: AgentData) -> AgentData:
    if mine.keeping == DataStorageMode.MOUNT:
        raise DataMounted()
    return mine


def _lock_synced(mine: AgentData) -> AgentData:
    return _require_synced(AgentData.objects.select_for_update(no_key=True).get(pk=mine.pk))


def _load_live_rows(mine: AgentData) -> dict[str, DataFile]:
    return {row.path: row for row in data_tree.find_live_files(mine)}


def _select_changed(rows: Mapping[str, DataFile], there: Mapping[str, DataFile]) -> dict[str, DataFile]:
    """Those that are not there as they are."""
    columns = ("kind", "mode", "target", "digest")
    return {
        path: row
        for path, row in rows.items()
        if path not in there or any(getattr(row, name) != getattr(there[path], name) for name in columns)
    }


def _check_placement(rows: Mapping[str, DataFile], there: Mapping[str, DataFile]) -> None:
    """Unfit where a file would lie below a file, or take the place of a directory, or the other way round."""
    holding = {parent for path in there for parent in list_parents(path)}  # also where a directory's own row was removed
    for path, row in rows.items():
        for parent in list_parents(path):
            found = rows.get(parent) or there.get(parent)
            if found and found.kind != "directory":
                raise InvalidDataPath(f"{path!r} cannot be stored: {parent!r} is a {found.kind}. Remove that first.")
        now = "directory" if path in holding else there[path].kind if path in there else row.kind
        if (now == "directory") != (row.kind == "directory"):
            raise InvalidDataPath(f"{path!r} cannot be stored: it is a {now} now. Remove that first.")


def _upsert_rows(mine: AgentData, rows: Mapping[str, DataFile], pieces: Mapping[str, ChangedFile], now: datetime) -> None:
    objects: dict[str, DataObject] = {}
    for path, row in rows.items():
        row.data, row.revision, row.at = mine, mine.revision + 1, now
        if path in pieces:
            stored = pieces[path].object
            assert stored is not None  # it was uploaded
            row.stored_in, row.offset = objects.setdefault(stored.key, stored), pieces[path].offset
    DataObject.objects.bulk_create(objects.values())
    DataFile.objects.bulk_create(
        rows.values(), update_conflicts=True, unique_fields=["data", "path"], update_fields=UPSERT_COLUMNS
    )
    number, size = _update_totals(mine, now)
    if number > settings.DATA_MOST_FILES or size > settings.DATA_MOST_BYTES:
        raise DataFull(
            f"Then /data would have {number} files and directories of {size} bytes; "
            f"{settings.DATA_MOST_FILES} of {settings.DATA_MOST_BYTES} are kept."
        )


def _update_totals(mine: AgentData, now: datetime) -> tuple[int, int]:
    """Say what there is after a change: how many paths, and their bytes."""
    live = data_tree.find_live_files(mine).aggregate(
        all=Count("pk"), files=Count("pk", filter=Q(kind="file")), size=Coalesce(Sum("size_bytes"), 0)
    )
    AgentData.objects.filter(pk=mine.pk).update(
        revision=mine.revision + 1, files=live["files"], size_bytes=live["size"], changed_at=now
    )
    DataSize.note(mine.agent_did, live["size"], now=now)
    return live["all"], live["size"]


def _collect_outdated(mine: AgentData) -> None:
    try:
        data_sync.remove_outdated_objects(data_sync.find_outdated_objects().filter(data=mine))
    except StoreError as failed:  # what is stored is stored: the prune sweep removes the rest
        log.warning("outdated objects left", agent=mine.agent_did, error=str(failed))
