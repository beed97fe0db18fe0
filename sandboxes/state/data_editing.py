"""Changes to an agent's data by an operator, without a sandbox.

The order is the same as when a sandbox's changes are stored: objects first, then the rows in one transaction under the lock of
the agent's data. Live sandboxes pull the new versions at their next use. The last writer of a path wins."""

import gzip
import hashlib
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
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

from sandboxes import audit
from sandboxes.audit import Actor
from sandboxes.db.clock import clock_from
from sandboxes.errors import DataFull, SandboxError
from sandboxes.lifecycle import checkpoint
from sandboxes.models.state import AgentData, DataFile, DataObject, DataSize, DataStorageMode
from sandboxes.state import changes, data_sync, data_tree, uploads
from sandboxes.state.changes import ChangedFile, list_parents
from sandboxes.state.merge import UPSERT_COLUMNS
from sandboxes.state.spool import open_spool
from sandboxes.storage.base import CHUNK_BYTES, StoreError

log = structlog.get_logger(__name__)
TAR_ERRORS = (tarfile.TarError, EOFError, KeyError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
PERMISSION_BITS = 0o777  # other mode bits are not written into sandboxes


class InvalidDataPath(SandboxError):
    """This path cannot be stored in an agent's data."""

    code = "bad_path"


class DataPathNotFound(SandboxError):
    """There is no such file or directory in the agent's data."""

    code = "file_not_found"


class DataMounted(SandboxError):
    """This agent's data is mounted: its files are objects of the bucket below agents/DID/files. Edit them there."""

    code = "data_mounted"


class StagedChanges:
    """Unsaved rows, and a spooled tar with the content of the regular files among them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.spool = stack, stack.enter_context(open_spool())
        self._tar = tarfile.open(fileobj=self.spool, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed by `upload`
        self.rows: dict[str, DataFile] = {}
        self.changed_files: dict[str, ChangedFile] = {}
        self._size = 0

    def add(self, row: DataFile, source: IO[bytes] | None = None) -> None:
        """Add one path. It replaces an earlier entry of the same path. Raise InvalidDataPath or DataFull."""
        if reason := data_tree.describe_path_error(row.path) or data_tree.describe_text_error(row.target):
            raise InvalidDataPath(f"{row.path!r} cannot be stored: {reason}.")
        self._size += row.size_bytes
        if self._size > settings.DATA_MOST_BYTES:
            raise DataFull(f"The data exceeds the limit of {settings.DATA_MOST_BYTES} bytes per agent.")
        self.changed_files.pop(row.path, None)
        if source is not None:
            self.changed_files[row.path] = changed_file = self._copy_to_tar(row.path, row.size_bytes, source)
            row.digest = changed_file.digest
        row.mode &= PERMISSION_BITS
        self.rows[row.path] = row

    def _copy_to_tar(self, path: str, size: int, source: IO[bytes]) -> ChangedFile:
        member, digesting = tarfile.TarInfo(path), _DigestingReader(source)
        member.size = size
        self._tar.addfile(member, digesting)
        offset = self.spool.tell() - (size + -size % tarfile.BLOCKSIZE)
        return ChangedFile(path, offset, size, digesting.digest.hexdigest())

    def upload(self, data: AgentData, now: datetime) -> None:
        """Upload the content and set the object of each changed file."""
        self._tar.close()
        self.spool.flush()  # file slices bypass the write buffer
        if self.changed_files:
            to_upload = list(self.changed_files.values())
            changes.upload_tar(data, self.spool, self.spool.tell(), to_upload, clock_from(now), self._stack)


class _DigestingReader:
    """Reader that computes the SHA-256 of the bytes read."""

    def __init__(self, source: IO[bytes]) -> None:
        self.source, self.digest = source, hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        chunk = self.source.read(size)
        self.digest.update(chunk)
        return chunk


def put_file(
    agent_did: str, path: str, source: IO[bytes], *, mode: int = 0o644, now: datetime, actor: Actor = audit.CONTROL_PLANE
) -> int:
    """Store the rest of `source` as the newest version of a file. Return 1, or 0 if content and mode are unchanged."""
    with ExitStack() as stack:
        spool = stack.enter_context(open_spool())
        copyfileobj(source, spool, CHUNK_BYTES)
        size = spool.tell()
        spool.seek(0)
        staged = StagedChanges(stack)
        staged.add(DataFile(path=path, kind="file", mode=mode, mtime=int(now.timestamp()), size_bytes=size), spool)
        return _store_edit(agent_did, staged, "Store file", path, now=now, actor=actor)


def load_tar(agent_did: str, source: IO[bytes], *, now: datetime, actor: Actor = audit.CONTROL_PLANE) -> int:
    """Store the members of a tar beside the existing data. Return the number of new or changed paths.

    All or nothing. Raise InvalidDataPath if a member is not a file, directory or link, or has an invalid path."""
    with ExitStack() as stack:
        staged = StagedChanges(stack)
        try:
            tar = stack.enter_context(tarfile.open(fileobj=source, mode="r:*"))
            for member in tar:
                _add_member(staged, tar, member)
        except TAR_ERRORS as error:
            raise InvalidDataPath(f"The tar is invalid or truncated: {error}.") from error
        return _store_edit(agent_did, staged, "Import files", f"{len(staged.rows)} paths of a tar", now=now, actor=actor)


def _add_member(staged: StagedChanges, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    path = "/" * member.name.startswith("/") + "/".join(part for part in member.name.split("/") if part not in ("", "."))
    if not path:
        return  # the root
    row = DataFile(path=path, mode=member.mode, mtime=int(member.mtime))
    content_member = tar.getmember(member.linkname) if member.islnk() else member  # a hard link is stored as a separate file
    if member.isdir():
        row.kind = "directory"
        staged.add(row)
    elif member.issym():
        row.kind, row.target = "link", member.linkname
        staged.add(row)
    elif content_member.isreg():
        row.kind, row.size_bytes = "file", content_member.size
        staged.add(row, tar.extractfile(content_member))
    else:
        raise InvalidDataPath(f"{path!r} cannot be stored: it is not a regular file, directory or link.")


def load_directory(agent_did: str, root: Path, *, now: datetime, actor: Actor = audit.CONTROL_PLANE) -> int:
    """Store the content of a local directory beside the existing data, like load_tar. Links are stored, not followed."""
    with ExitStack() as stack:
        staged = StagedChanges(stack)
        for entry in _walk(root):
            path, status = entry.relative_to(root).as_posix(), entry.lstat()
            row = DataFile(path=path, mode=status.st_mode, mtime=int(status.st_mtime))
            if entry.is_symlink():
                row.kind, row.target = "link", str(entry.readlink())
                staged.add(row)
            elif entry.is_dir():
                row.kind = "directory"
                staged.add(row)
            elif entry.is_file():
                row.kind, row.size_bytes = "file", status.st_size
                with entry.open("rb") as source:
                    staged.add(row, source)
            else:
                raise InvalidDataPath(f"{path!r} cannot be stored: it is not a regular file, directory or link.")
        return _store_edit(agent_did, staged, "Import files", f"{len(staged.rows)} paths of a directory", now=now, actor=actor)


def _store_edit(agent_did: str, staged: StagedChanges, action: str, detail: str, *, now: datetime, actor: Actor) -> int:
    """Store the staged changes, and record the action with the agent's data in their transaction."""
    return store_staged(
        agent_did, staged, now,
        record=lambda: audit.record(AgentData.objects.get(agent_did=agent_did), action, detail, actor=actor, now=now),
    )  # fmt: skip


def _walk(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def store_staged(agent_did: str, staged: StagedChanges, now: datetime, *, record: Callable[[], None] | None = None) -> int:
    """Upload the staged content and update the rows. Return the number of changed paths.

    `record` is called in the transaction that changes rows."""
    data = _require_synced(data_sync.ensure_agent_data(agent_did, now=now))
    if not _select_changed(staged.rows, _load_live_rows(data)):
        return 0
    staged.upload(data, now)
    checkpoint("edit stored", data)
    with transaction.atomic():
        data = _lock_synced(data)
        live = _load_live_rows(data)
        _check_placement(staged.rows, live)
        rows = _select_changed(staged.rows, live)
        mtime = int(now.timestamp())
        for parent in {parent for path in rows for parent in list_parents(path)} - live.keys() - staged.rows.keys():
            rows[parent] = DataFile(path=parent, kind="directory", mode=0o755, mtime=mtime)
        if rows:
            _upsert_rows(data, rows, staged.changed_files, now)
            if record:
                record()
    _collect_outdated(data)
    return len(rows)


def remove_path(
    agent_did: str, path: str, *, recursive: bool = False, now: datetime, actor: Actor = audit.CONTROL_PLANE
) -> int:
    """Remove a path, with `recursive` also everything below it. Return the number of removed paths.

    Raise DataPathNotFound, or InvalidDataPath for a non-empty directory without `recursive`."""
    if reason := data_tree.describe_path_error(path):
        raise InvalidDataPath(f"{path!r} is not a valid path: {reason}.")
    data = get_synced_data(agent_did)
    with transaction.atomic():
        data = _lock_synced(data)
        below = data_tree.find_files_below(data, path)
        if below.exists() and not recursive:
            raise InvalidDataPath(f"{path!r} is a non-empty directory.")
        removable = DataFile.objects.filter(Q(pk__in=below.values("pk")) | Q(data=data, path=path, removed=False))
        removed = removable.update(
            removed=True, stored_in=None, size_bytes=0, digest="", revision=data.revision + 1, holder=None, at=now
        )
        if not removed:
            raise DataPathNotFound(f"There is no {path!r} in the agent's data.")
        _update_totals(data, now)
        audit.record(data, "Remove files", f"{path}: {removed} paths", actor=actor, now=now)
    _collect_outdated(data)
    return removed


def get_synced_data(agent_did: str) -> AgentData:
    """Return an agent's data. Raise DataPathNotFound if none was ever stored, DataMounted if the data is mounted."""
    data = AgentData.objects.filter(agent_did=agent_did).first()
    if data is None:
        raise DataPathNotFound(f"No data is stored for {agent_did}.")
    return _require_synced(data)


def _require_synced(data: AgentData) -> AgentData:
    if data.keeping == DataStorageMode.MOUNT:
        raise DataMounted()
    return data


def _lock_synced(data: AgentData) -> AgentData:
    return _require_synced(AgentData.objects.select_for_update(no_key=True).get(pk=data.pk))


def _load_live_rows(data: AgentData) -> dict[str, DataFile]:
    return {row.path: row for row in data_tree.find_live_files(data)}


def _select_changed(rows: Mapping[str, DataFile], live: Mapping[str, DataFile]) -> dict[str, DataFile]:
    """Return the rows that differ from the stored ones."""
    columns = ("kind", "mode", "target", "digest")
    return {
        path: row
        for path, row in rows.items()
        if path not in live or any(getattr(row, name) != getattr(live[path], name) for name in columns)
    }


def _check_placement(rows: Mapping[str, DataFile], live: Mapping[str, DataFile]) -> None:
    """Raise InvalidDataPath where a path would lie below a file, or would change a file into a directory or vice versa."""
    directories = {parent for path in live for parent in list_parents(path)}  # includes directories whose own row is removed
    for path, row in rows.items():
        for parent in list_parents(path):
            ancestor = rows.get(parent) or live.get(parent)
            if ancestor and ancestor.kind != "directory":
                raise InvalidDataPath(f"{path!r} cannot be stored: {parent!r} is a {ancestor.kind}. Remove it first.")
        current_kind = "directory" if path in directories else live[path].kind if path in live else row.kind
        if (current_kind == "directory") != (row.kind == "directory"):
            raise InvalidDataPath(f"{path!r} cannot be stored: it is currently a {current_kind}. Remove it first.")


def _upsert_rows(
    data: AgentData, rows: Mapping[str, DataFile], changed_files: Mapping[str, ChangedFile], now: datetime
) -> None:
    objects: dict[str, DataObject] = {}
    for path, row in rows.items():
        row.data, row.revision, row.at = data, data.revision + 1, now
        if path in changed_files:
            stored = changed_files[path].object
            assert stored is not None  # set by `upload`
            row.stored_in, row.offset = objects.setdefault(stored.key, stored), changed_files[path].offset
    uploads.insert_objects(objects.values())
    DataFile.objects.bulk_create(
        rows.values(), update_conflicts=True, unique_fields=["data", "path"], update_fields=UPSERT_COLUMNS
    )
    count, size = _update_totals(data, now)
    if count > settings.DATA_MOST_FILES or size > settings.DATA_MOST_BYTES:
        raise DataFull(
            f"/data would have {count} paths and {size} bytes; "
            f"the limits are {settings.DATA_MOST_FILES} paths and {settings.DATA_MOST_BYTES} bytes."
        )


def _update_totals(data: AgentData, now: datetime) -> tuple[int, int]:
    """Recompute and store the totals after a change. Return the number of live paths and their size in bytes."""
    live = data_tree.find_live_files(data).aggregate(
        all=Count("pk"), files=Count("pk", filter=Q(kind="file")), size=Coalesce(Sum("size_bytes"), 0)
    )
    AgentData.objects.filter(pk=data.pk).update(
        revision=data.revision + 1, files=live["files"], size_bytes=live["size"], changed_at=now
    )
    DataSize.note(data.agent_did, live["size"], now=now)
    return live["all"], live["size"]


def _collect_outdated(data: AgentData) -> None:
    try:
        data_sync.remove_outdated_objects(data_sync.find_outdated_objects().filter(data=data))
    except StoreError as error:  # the edit is committed; the prune sweep removes the outdated objects
        log.warning("outdated objects left", agent=data.agent_did, error=str(error))
