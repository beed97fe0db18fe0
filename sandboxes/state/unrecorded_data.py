"""Changes of an agent's /data that a database does not know any more: kept as copies in `.conflicts`.

The versions that the database records stay the current ones, as with /workspace (sandboxes.state.unrecorded). A sandbox or an
object in the store has a directory of its own, written in one transaction. Its rows, those of removed files included, tell that
its files were kept: a copy that the agent has removed does not return."""

import hashlib
import tarfile
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime
from typing import IO, BinaryIO, cast
from uuid import UUID

import structlog
from django.conf import settings

from sandboxes.claims import track_transfer
from sandboxes.errors import DataFull
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataStorageMode
from sandboxes.providers.base import DATA, FileStat, Provider
from sandboxes.providers.errors import SandboxUnreadable, TooLarge
from sandboxes.state import changes, data_editing, data_sync, data_tree, disk_space, uploads
from sandboxes.state.changes import MAX_PATH_BYTES, ChangedFile
from sandboxes.state.merge import CONFLICTS_DIRECTORY, record_event
from sandboxes.state.pruning import DATA_OBJECTS, find_orphans
from sandboxes.state.spool import FileSlice, open_spool
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES, StoreError
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
NOT_KEPT = (DataFull, data_editing.InvalidDataPath)  # the agent's data has no room for the copies
OBJECT_MODE = 0o644  # of a file in an object of the store, which does not record modes


def keep_from_sandbox(row: Sandbox, ref: str, name: str, provider: Provider, *, now: datetime) -> int:
    """Keep the files and links below /data of a sandbox that the database does not record. Return their number. Idempotent.

    `row` is the row that the name states. A version that is current, or that the row's sandbox had when it was last stored, is
    not kept again; a removal of a file is not repeated. Raise ProviderError or StoreError, and one of NOT_KEPT if the agent's
    data has no room for them."""
    assert row.holder is not None
    directory = f"{CONFLICTS_DIRECTORY}/{name}"
    data = data_sync.ensure_agent_data(row.agent_did, now=now)
    if data.keeping == DataStorageMode.MOUNT or _is_kept(data, directory):
        return 0
    try:
        manifest = provider.manifest(ref, DATA, max_entries=settings.DATA_MOST_FILES)
    except TooLarge:
        raise DataFull(f"/data of {name} has more than {settings.DATA_MOST_FILES} files, which is the limit.") from None
    base = {path: entry[1] for path, entry in _read_base(row).items()}
    files = [path for path, stat in manifest.items() if stat.kind == "file"]
    with ExitStack() as stack:
        tar = stack.enter_context(open_spool())
        contents = _fetch(ref, files, provider, tar) if files else {}
        copies = [
            (path, stat, contents.get(path))
            for path, stat in manifest.items()
            if stat.kind == "link" or (path in contents and contents[path].digest != base.get(path))
        ]
        return _keep(data, row.holder, directory, copies, tar, stack, f"/data of {name},", now=now)


def keep_all_from_store(*, now: datetime) -> SweepResult:
    """Keep the files in the objects without a row of all agents' data. Idempotent.

    An agent whose data has no room for them is a failure. Raise StoreError."""
    result = SweepResult()
    for agent_did in sorted({key.split("/")[1] for key in find_orphans(DATA_OBJECTS, now)}):
        try:
            result.note("files", keep_from_store(agent_did, None, now=now))
        except NOT_KEPT as failed:
            result.failures.append(f"{agent_did}: {failed}")
    return result


def keep_from_store(agent_did: str, holder: UUID | None, *, now: datetime) -> int:
    """Keep the files in the objects of an agent's data that have no row. Return their number. Idempotent.

    Raise StoreError, and one of NOT_KEPT if the agent's data has no room for them."""
    data = data_sync.ensure_agent_data(agent_did, now=now)
    if data.keeping == DataStorageMode.MOUNT:
        return 0
    keys = {each.key for each in get_store().entries(f"agents/{agent_did}/") if DATA_OBJECTS.key_pattern.fullmatch(each.key)}
    unrecorded = keys - DATA_OBJECTS.find_recorded(keys)
    return sum(_keep_object(data, holder, key, now=now) for key in sorted(unrecorded - uploads.find_claimed(unrecorded)))


def _keep_object(data: AgentData, holder: UUID | None, key: str, *, now: datetime) -> int:
    stem = key.rpartition("/")[2].removesuffix(".tar")
    directory = f"{CONFLICTS_DIRECTORY}/stored-{stem}"
    if _is_kept(data, directory):
        return 0
    with ExitStack() as stack:
        tar = stack.enter_context(open_spool())
        if not get_store().download(key, track_transfer(tar)):
            raise StoreError(get_store().name, "recover", "is listed, and is not there", key=key)
        try:
            files = changes.index_tar(tar)
        except (SandboxUnreadable, tarfile.TarError) as failed:
            detail = f"Object {key}, which the database does not record, is not readable: {failed}"
            _report_unreadable(data, holder, detail, now)
            return 0
        mtime = int(now.timestamp())
        copies = [(path, FileStat("file", OBJECT_MODE, file.size, mtime, ""), file) for path, file in files.items()]
        subject = f"an object of /data, stored at {stem.partition('-')[0]},"
        return _keep(data, holder, directory, copies, tar, stack, subject, now=now)


def _report_unreadable(data: AgentData, holder: UUID | None, detail: str, now: datetime) -> None:
    reported = DataEvent.objects.filter(agent_did=data.agent_did, kind=DataEvent.Kind.CORRUPT, detail=detail)
    if not reported.exists():
        record_event(data.agent_did, holder, DataEvent.Kind.CORRUPT, detail=detail, now=now)


def _is_kept(data: AgentData, directory: str) -> bool:
    return DataFile.objects.filter(data=data, path=directory).exists()


def _read_base(row: Sandbox) -> dict[str, list[str]]:
    """Return the versions at the last synchronization of the row's sandbox with the agent's data."""
    return Attachment.objects.filter(pk=row.pk).values_list("base", flat=True).first() or {}


def _fetch(ref: str, files: list[str], provider: Provider, tar: BinaryIO) -> dict[str, ChangedFile]:
    max_bytes = settings.DATA_MOST_BYTES + (len(files) << 13) + CHUNK_BYTES
    try:
        for chunk in disk_space.check_while_writing(provider.get_files(ref, DATA, only=files, max_bytes=max_bytes)):
            tar.write(chunk)
    except TooLarge:
        raise DataFull(f"/data exceeds the limit of {settings.DATA_MOST_BYTES} bytes.") from None
    return changes.index_tar(tar, wanted={*files})


def _keep(
    data: AgentData,
    holder: UUID | None,
    directory: str,
    copies: Iterable[tuple[str, FileStat, ChangedFile | None]],
    tar: BinaryIO,
    stack: ExitStack,
    subject: str,
    *,
    now: datetime,
) -> int:
    """Store copies that differ from the current versions and from other copies, and record that. Return their number."""
    current = {row.path: row for row in data_tree.find_live_files(data)}
    copied = {
        (path.split("/", 2)[-1], row.digest) for path, row in current.items() if path.startswith(f"{CONFLICTS_DIRECTORY}/")
    }
    staged, left_out = data_editing.StagedChanges(stack), 0
    for path, stat, file in copies:
        digest = file.digest if file else ""
        name, known = _choose_name(path, directory), current.get(path)
        if file and (name, digest) in copied:
            continue
        if known and (known.kind, known.digest, known.target) == (stat.kind, digest, stat.target):
            continue
        copy = DataFile(
            path=f"{directory}/{name}", kind=stat.kind, mode=stat.mode, mtime=stat.mtime, target=stat.target, holder=holder,
            size_bytes=file.size if file else 0,
        )  # fmt: skip
        try:
            staged.add(copy, cast(IO[bytes], FileSlice(tar, file.offset, file.size)) if file else None)
        except data_editing.InvalidDataPath:
            left_out += 1
    if not (kept := len(staged.rows)) and not left_out:
        return 0

    def record() -> None:
        detail = f"{kept} files of {subject} which the database does not record, were kept in /data/{directory}."
        if left_out:
            detail += f" {left_out} could not be kept: their names are not UTF-8."
        record_event(data.agent_did, holder, DataEvent.Kind.FOUND, detail=detail, now=now)

    staged.rows[directory] = DataFile(path=directory, kind="directory", mode=0o755, mtime=int(now.timestamp()))
    data_editing.store_staged(data.agent_did, staged, now, record=record)
    return kept


def _choose_name(path: str, directory: str) -> str:
    """Return the path below a directory of copies. One that would be too long, or a copy of a copy, is named by its digest."""
    encoded = path.encode(errors="surrogateescape")
    is_nested = path == CONFLICTS_DIRECTORY or path.startswith(f"{CONFLICTS_DIRECTORY}/")
    if is_nested or len(encoded) + len(directory) + 1 > MAX_PATH_BYTES:
        return hashlib.sha256(encoded).hexdigest()
    return path
