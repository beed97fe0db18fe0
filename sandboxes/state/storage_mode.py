"""How an agent's data is kept, changed from one way to the other while no sandbox of it has a process.

What it has is stored the new way first, then one transaction turns it over, then what was stored the old way goes."""

import stat
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from shutil import copyfileobj
from typing import Any

from django.db import transaction
from django.db.models import Count, F, Sum

from sandboxes.errors import SandboxBusy
from sandboxes.image import files
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox, SandboxState
from sandboxes.models.state import AgentData, DataFile, DataObject, DataSize, DataStorageMode
from sandboxes.providers.base import Rejected
from sandboxes.state import data_sync, data_tree, mounts, pull, s3fs
from sandboxes.state.data_editing import Bundle
from sandboxes.state.merge import UPSERT_COLUMNS
from sandboxes.state.spool import FileSlice, open_spool, run_parallel
from sandboxes.storage import get_store
from sandboxes.storage.base import CHUNK_BYTES, StoreError
from sandboxes.storage.s3 import S3Store

IncarnationCounts = dict[str, Any]
FILE_TYPE_BITS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "link": stat.S_IFLNK}
REMOVED_COLUMNS = {"removed": True, "stored_in": None, "size_bytes": 0, "digest": ""}


def convert_to_mount(mine: AgentData, *, now: datetime) -> int:
    """Have an agent's files in the bucket as an object each, to be mounted from now on; how many paths. Safe to repeat.

    Busy while it has a sandbox with a process, or if its data was changed meanwhile; Rejected where nothing can be
    mounted. A name with a control character, which only some stores take, is a StoreError."""
    if why := mounts.find_missing_requirement():
        raise Rejected(f"Its data cannot be mounted: {why}.")
    with _lock_while_cold(mine, DataStorageMode.SYNC) as since:
        rows = list(data_tree.find_live_files(mine).select_related("stored_in", "data"))
    get_store().clear(s3fs.build_key_prefix(mine.agent_did))  # of an earlier try
    with ExitStack() as stack:
        content = pull.fetch_contents([row for row in rows if row.kind == "file"], stack, now=now)
        run_parallel(lambda row: _upload_path(row, content.get(row.path)), rows)
    checkpoint("data copied", mine)
    with _lock_while_cold(mine, DataStorageMode.SYNC, since):
        DataFile.objects.filter(data=mine).update(**REMOVED_COLUMNS)  # that there was a skill is still known
        AgentData.objects.filter(pk=mine.pk).update(keeping=DataStorageMode.MOUNT, revision=F("revision") + 1, changed_at=now)
    data_sync.remove_outdated_objects(DataObject.objects.filter(data=mine))
    return len(rows)


def convert_to_sync(mine: AgentData, *, now: datetime) -> int:
    """Have an agent's mounted files copied into its sandboxes from now on; how many paths. Safe to repeat.

    Busy as for to_mount, DataFull if that is more than is kept so, StoreError if they cannot be read. Whatever is
    neither file nor directory nor link is left out."""
    with _lock_while_cold(mine, DataStorageMode.MOUNT) as since:
        pass
    with ExitStack() as stack:
        bundle, tar = Bundle(stack), stack.enter_context(open_spool())
        with mounts.open_mount(mine.agent_did) as directory:
            try:
                files.pack(str(directory), tar)
            except OSError as failed:
                raise StoreError("mount", "read", str(failed)) from failed
        tar.seek(0)
        with tarfile.open(fileobj=tar, mode="r:") as members:
            for member in members:
                row = DataFile(path=member.name, kind="file", mode=member.mode, mtime=int(member.mtime))
                if not member.isreg():
                    row.kind, row.target = ("link", member.linkname) if member.issym() else ("directory", "")
                row.size_bytes = member.size
                bundle.add(row, members.extractfile(member) if member.isreg() else None)
        bundle.upload(mine, now)
        checkpoint("data copied", mine)
        with _lock_while_cold(mine, DataStorageMode.MOUNT, since):
            _replace_rows(mine, bundle, mine.revision + 1, now)
    get_store().clear(s3fs.build_key_prefix(mine.agent_did))
    return len(bundle.rows)


def measure_mounted_data(mine: AgentData, *, now: datetime) -> bool:
    """Write down how large an agent's mounted data is: nobody tells, so its objects are listed. Whether it is mounted still.
    StoreError."""
    prefix = s3fs.build_key_prefix(mine.agent_did)
    sizes = [entry.size or 0 for entry in get_store().entries(prefix) if not entry.key.endswith("/")]  # no directories
    checkpoint("data listed", mine)
    with transaction.atomic():
        same = AgentData.objects.select_for_update(no_key=True).filter(pk=mine.pk, keeping=DataStorageMode.MOUNT)
        if same.first() is None:
            return False
        same.update(files=len(sizes), size_bytes=sum(sizes))
        DataSize.note(mine.agent_did, sum(sizes), now=now)
    return True


@contextmanager
def _lock_while_cold(
    mine: AgentData, kept: DataStorageMode, since: IncarnationCounts | None = None
) -> Iterator[IncarnationCounts]:
    """With the agent's data locked, and how often its sandboxes had been started. Busy if one has a process, if one had
    since then, or if the data is not as `mine` was read any more."""
    with transaction.atomic():
        same = AgentData.objects.select_for_update(no_key=True).filter(pk=mine.pk, keeping=kept, revision=mine.revision)
        its = Sandbox.objects.filter(agent_did=mine.agent_did)
        wakes = its.aggregate(sandboxes=Count("pk"), incarnations=Sum("incarnation"))
        if same.first() is None or (since is not None and wakes != since):
            raise SandboxBusy("Its data was used or changed meanwhile, or is kept otherwise by now.")
        if its.exclude(state__in=(SandboxState.COLD, SandboxState.DESTROYED)).exists():
            raise SandboxBusy("It has a sandbox that is not asleep. Its data can be kept otherwise once all are, or are gone.")
        yield wakes


def _upload_path(row: DataFile, content: FileSlice | None) -> None:
    """Store one path as s3fs does: what it is stands in the object's metadata."""
    bucket = get_store()
    assert isinstance(bucket, S3Store)
    key = s3fs.build_key_prefix(row.data.agent_did) + row.path + "/" * (row.kind == "directory")
    known = {
        "mode": str(FILE_TYPE_BITS[row.kind] | row.mode),
        "uid": str(s3fs.AGENT_UID),
        "gid": str(s3fs.AGENT_UID),
        "mtime": str(row.mtime),
    }
    with open_spool() as whole:
        if content:
            copyfileobj(content, whole, CHUNK_BYTES)
        whole.write(row.target.encode())
        whole.seek(0)
        bucket.upload(key, whole, known)


def _replace_rows(mine: AgentData, bundle: Bundle, revision: int, now: datetime) -> None:
    objects: dict[str, DataObject] = {}
    for path, row in bundle.rows.items():
        row.data, row.revision, row.at = mine, revision, now
        if piece := bundle.pieces.get(path):
            assert piece.object is not None  # it was uploaded
            row.stored_in, row.offset = objects.setdefault(piece.object.key, piece.object), piece.offset
    DataObject.objects.bulk_create(objects.values())
    DataFile.objects.filter(data=mine).update(**REMOVED_COLUMNS, revision=revision, at=now)
    DataFile.objects.bulk_create(
        bundle.rows.values(), update_conflicts=True, unique_fields=["data", "path"], update_fields=UPSERT_COLUMNS
    )
    sizes = [row.size_bytes for row in bundle.rows.values() if row.kind == "file"]
    AgentData.objects.filter(pk=mine.pk).update(
        keeping=DataStorageMode.SYNC, revision=revision, files=len(sizes), size_bytes=sum(sizes), changed_at=now
    )
    DataSize.note(mine.agent_did, sum(sizes), now=now)
