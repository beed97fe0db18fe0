"""Conversion of an agent's data between the storage modes `sync` and `mount`, and measurement of mounted data.

A conversion requires that no sandbox of the agent has a process. It copies the data to the new form, switches the mode in one
transaction, then removes the old form."""

import stat
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from shutil import copyfileobj
from typing import Any

from django.db import transaction
from django.db.models import Count, F, Sum

from sandboxes import audit
from sandboxes.audit import Actor
from sandboxes.errors import SandboxBusy
from sandboxes.image import files
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox, SandboxState
from sandboxes.models.state import AgentData, DataFile, DataObject, DataSize, DataStorageMode
from sandboxes.providers.errors import Rejected
from sandboxes.state import data_sync, data_tree, mounts, pull, s3fs, uploads
from sandboxes.state.data_editing import StagedChanges
from sandboxes.state.merge import UPSERT_COLUMNS
from sandboxes.state.spool import FileSlice, open_spool, run_parallel
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES, StoreError

IncarnationCounts = dict[str, Any]
FILE_TYPE_BITS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "link": stat.S_IFLNK}
REMOVED_COLUMNS = {"removed": True, "stored_in": None, "size_bytes": 0, "digest": ""}


def convert_to_mount(data: AgentData, *, now: datetime, actor: Actor = audit.CONTROL_PLANE) -> int:
    """Store an agent's files as one object each and switch to mode `mount`. Return the number of paths. Idempotent.

    Raise SandboxBusy if a sandbox of the agent has a process or the data changed meanwhile, Rejected if this installation
    cannot mount. A path with a control character, which not every store accepts as a key, raises StoreError."""
    if reason := mounts.find_missing_requirement():
        raise Rejected(f"The data cannot be mounted: {reason}.")
    with _lock_while_cold(data, DataStorageMode.SYNC) as counts:
        rows = list(data_tree.find_live_files(data).select_related("stored_in", "data"))
    get_store().clear(s3fs.build_key_prefix(data.agent_did))  # objects left by a failed conversion
    with ExitStack() as stack:
        content = pull.fetch_contents([row for row in rows if row.kind == "file"], stack, now=now)
        run_parallel(lambda row: _upload_path(row, content.get(row.path)), rows)
    checkpoint("data copied", data)
    with _lock_while_cold(data, DataStorageMode.SYNC, counts):
        # The rows stay, marked as removed: the rows of a removed skill prevent seeding the skill again.
        DataFile.objects.filter(data=data).update(**REMOVED_COLUMNS)
        AgentData.objects.filter(pk=data.pk).update(keeping=DataStorageMode.MOUNT, revision=F("revision") + 1, changed_at=now)
        audit.record(data, "Set storage mode", "sync → mount", actor=actor, now=now)
    data_sync.remove_outdated_objects(DataObject.objects.filter(data=data))
    return len(rows)


def convert_to_sync(data: AgentData, *, now: datetime, actor: Actor = audit.CONTROL_PLANE) -> int:
    """Store an agent's mounted files as synced data and switch to mode `sync`. Return the number of paths. Idempotent.

    Raise SandboxBusy in the same cases as convert_to_mount, DataFull above the limits of synced data, StoreError if the files
    cannot be read. Paths that are not files, directories or links are skipped."""
    with _lock_while_cold(data, DataStorageMode.MOUNT) as counts:
        pass
    with ExitStack() as stack:
        staged, tar = StagedChanges(stack), stack.enter_context(open_spool())
        with mounts.open_mount(data.agent_did) as directory:
            try:
                files.pack(str(directory), tar)
            except OSError as error:
                raise StoreError("mount", "read", str(error)) from error
        tar.seek(0)
        with tarfile.open(fileobj=tar, mode="r:") as members:
            for member in members:
                row = DataFile(path=member.name, kind="file", mode=member.mode, mtime=int(member.mtime))
                if not member.isreg():
                    row.kind, row.target = ("link", member.linkname) if member.issym() else ("directory", "")
                row.size_bytes = member.size
                staged.add(row, members.extractfile(member) if member.isreg() else None)
        staged.upload(data, now)
        checkpoint("data copied", data)
        with _lock_while_cold(data, DataStorageMode.MOUNT, counts):
            _replace_rows(data, staged, data.revision + 1, now)
            audit.record(data, "Set storage mode", "mount → sync", actor=actor, now=now)
    get_store().clear(s3fs.build_key_prefix(data.agent_did))
    return len(staged.rows)


def measure_mounted_data(data: AgentData, *, now: datetime) -> bool:
    """Record the size of an agent's mounted data. Return False if the data is no longer mounted. Raise StoreError.

    s3fs reports no changes, so the agent's objects are listed."""
    prefix = s3fs.build_key_prefix(data.agent_did)
    # s3fs stores a directory as a marker object whose key ends with "/".
    sizes = [entry.size or 0 for entry in get_store().entries(prefix) if not entry.key.endswith("/")]
    checkpoint("data listed", data)
    with transaction.atomic():
        rows = AgentData.objects.select_for_update(no_key=True).filter(pk=data.pk, keeping=DataStorageMode.MOUNT)
        if rows.first() is None:
            return False
        rows.update(files=len(sizes), size_bytes=sum(sizes))
        DataSize.note(data.agent_did, sum(sizes), now=now)
    return True


@contextmanager
def _lock_while_cold(
    data: AgentData, mode: DataStorageMode, expected: IncarnationCounts | None = None
) -> Iterator[IncarnationCounts]:
    """Lock the agent's data while none of its sandboxes has a process. Yield the numbers of sandboxes and incarnations.

    Raise SandboxBusy if a sandbox has a process, if the numbers differ from `expected` (a sandbox was started meanwhile), or if
    the stored row differs from `data`."""
    with transaction.atomic():
        rows = AgentData.objects.select_for_update(no_key=True).filter(pk=data.pk, keeping=mode, revision=data.revision)
        sandboxes = Sandbox.objects.filter(agent_did=data.agent_did)
        counts = sandboxes.aggregate(sandboxes=Count("pk"), incarnations=Sum("incarnation"))
        if rows.first() is None or (expected is not None and counts != expected):
            raise SandboxBusy("The agent's data was used, changed or converted meanwhile. Retry the conversion.")
        if sandboxes.exclude(state__in=(SandboxState.COLD, SandboxState.DESTROYED)).exists():
            raise SandboxBusy(
                "A sandbox of this agent has a process. Convert its data once all its sandboxes are cold or destroyed."
            )
        yield counts


def _upload_path(row: DataFile, content: FileSlice | None) -> None:
    """Store one path in s3fs format: type, mode, owner and mtime are object metadata; the content of a link is its target."""
    from sandboxes.storage.s3 import S3Store  # imports boto3, which other backends do not need

    bucket = get_store()
    assert isinstance(bucket, S3Store)
    key = s3fs.build_key_prefix(row.data.agent_did) + row.path + "/" * (row.kind == "directory")
    metadata = {
        "mode": str(FILE_TYPE_BITS[row.kind] | row.mode),
        "uid": str(s3fs.AGENT_UID),
        "gid": str(s3fs.AGENT_UID),
        "mtime": str(row.mtime),
    }
    with open_spool() as spool:
        if content:
            copyfileobj(content, spool, CHUNK_BYTES)
        spool.write(row.target.encode())
        spool.seek(0)
        bucket.upload(key, spool, metadata)


def _replace_rows(data: AgentData, staged: StagedChanges, revision: int, now: datetime) -> None:
    objects: dict[str, DataObject] = {}
    for path, row in staged.rows.items():
        row.data, row.revision, row.at = data, revision, now
        if changed_file := staged.changed_files.get(path):
            assert changed_file.object is not None  # set by `upload`
            row.stored_in, row.offset = objects.setdefault(changed_file.object.key, changed_file.object), changed_file.offset
    uploads.insert_objects(objects.values())
    DataFile.objects.filter(data=data).update(**REMOVED_COLUMNS, revision=revision, at=now)
    DataFile.objects.bulk_create(
        staged.rows.values(), update_conflicts=True, unique_fields=["data", "path"], update_fields=UPSERT_COLUMNS
    )
    sizes = [row.size_bytes for row in staged.rows.values() if row.kind == "file"]
    AgentData.objects.filter(pk=data.pk).update(
        keeping=DataStorageMode.SYNC, revision=revision, files=len(sizes), size_bytes=sum(sizes), changed_at=now
    )
    DataSize.note(data.agent_did, sum(sizes), now=now)
