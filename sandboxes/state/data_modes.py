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

from sandboxes.errors import Busy
from sandboxes.image import files
from sandboxes.lifecycle import step
from sandboxes.models import Sandbox, State
from sandboxes.models.state import AgentData, DataFile, DataObject, DataSize, Keeping
from sandboxes.providers.base import Rejected
from sandboxes.state import data_sync, data_tree, mounts, pull
from sandboxes.state.data_editing import Bundle
from sandboxes.state.merge import WRITTEN
from sandboxes.state.spool import Slice, side_by_side, spool
from sandboxes.storage import store
from sandboxes.storage.base import CHUNK, StoreError
from sandboxes.storage.s3 import S3Store

Wakes = dict[str, Any]
KINDS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "link": stat.S_IFLNK}
GONE = {"removed": True, "stored_in": None, "size_bytes": 0, "digest": ""}


def to_mount(mine: AgentData, *, now: datetime) -> int:
    """Have an agent's files in the bucket as an object each, to be mounted from now on; how many paths. Safe to repeat.

    Busy while it has a sandbox with a process, or if its data was changed meanwhile; Rejected where nothing can be
    mounted. A name with a control character, which only some stores take, is a StoreError."""
    if why := mounts.lacking():
        raise Rejected(f"Its data cannot be mounted: {why}.")
    with _asleep(mine, Keeping.SYNC) as since:
        rows = list(data_tree.live(mine).select_related("stored_in", "data"))
    store().clear(mounts.prefix_of(mine.agent_did))  # of an earlier try
    with ExitStack() as stack:
        content = pull.fetch([row for row in rows if row.kind == "file"], stack, now=now)
        side_by_side(lambda row: _put(row, content.get(row.path)), rows)
    step("data copied", mine)
    with _asleep(mine, Keeping.SYNC, since):
        DataFile.objects.filter(data=mine).update(**GONE)  # that there was a skill is still known
        AgentData.objects.filter(pk=mine.pk).update(keeping=Keeping.MOUNT, revision=F("revision") + 1, changed_at=now)
    data_sync.drop_outdated(DataObject.objects.filter(data=mine))
    return len(rows)


def to_sync(mine: AgentData, *, now: datetime) -> int:
    """Have an agent's mounted files copied into its sandboxes from now on; how many paths. Safe to repeat.

    Busy as for to_mount, DataFull if that is more than is kept so, StoreError if they cannot be read. Whatever is
    neither file nor directory nor link is left out."""
    with _asleep(mine, Keeping.MOUNT) as since:
        pass
    with ExitStack() as stack:
        bundle, tar = Bundle(stack), stack.enter_context(spool())
        with mounts.opened(mine.agent_did) as directory:
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
        step("data copied", mine)
        with _asleep(mine, Keeping.MOUNT, since):
            _record(mine, bundle, mine.revision + 1, now)
    store().clear(mounts.prefix_of(mine.agent_did))
    return len(bundle.rows)


def weigh(mine: AgentData, *, now: datetime) -> bool:
    """Write down how large an agent's mounted data is: nobody tells, so its objects are listed. Whether it is mounted still.
    StoreError."""
    prefix = mounts.prefix_of(mine.agent_did)
    sizes = [entry.size or 0 for entry in store().entries(prefix) if not entry.key.endswith("/")]  # no directories
    step("data listed", mine)
    with transaction.atomic():
        same = AgentData.objects.select_for_update(no_key=True).filter(pk=mine.pk, keeping=Keeping.MOUNT)
        if same.first() is None:
            return False
        same.update(files=len(sizes), size_bytes=sum(sizes))
        DataSize.note(mine.agent_did, sum(sizes), now=now)
    return True


@contextmanager
def _asleep(mine: AgentData, kept: Keeping, since: Wakes | None = None) -> Iterator[Wakes]:
    """With the agent's data locked, and how often its sandboxes had been started. Busy if one has a process, if one had
    since then, or if the data is not as `mine` was read any more."""
    with transaction.atomic():
        same = AgentData.objects.select_for_update(no_key=True).filter(pk=mine.pk, keeping=kept, revision=mine.revision)
        its = Sandbox.objects.filter(agent_did=mine.agent_did)
        wakes = its.aggregate(sandboxes=Count("pk"), incarnations=Sum("incarnation"))
        if same.first() is None or (since is not None and wakes != since):
            raise Busy("Its data was used or changed meanwhile, or is kept otherwise by now.")
        if its.exclude(state__in=(State.COLD, State.DESTROYED)).exists():
            raise Busy("It has a sandbox that is not asleep. Its data can be kept otherwise once all are, or are gone.")
        yield wakes


def _put(row: DataFile, content: Slice | None) -> None:
    """Store one path as s3fs does: what it is stands in the object's metadata."""
    bucket = store()
    assert isinstance(bucket, S3Store)
    key = mounts.prefix_of(row.data.agent_did) + row.path + "/" * (row.kind == "directory")
    known = {
        "mode": str(KINDS[row.kind] | row.mode),
        "uid": str(mounts.AGENT),
        "gid": str(mounts.AGENT),
        "mtime": str(row.mtime),
    }
    with spool() as whole:
        if content:
            copyfileobj(content, whole, CHUNK)
        whole.write(row.target.encode())
        whole.seek(0)
        bucket.upload(key, whole, known)


def _record(mine: AgentData, bundle: Bundle, revision: int, now: datetime) -> None:
    objects: dict[str, DataObject] = {}
    for path, row in bundle.rows.items():
        row.data, row.revision, row.at = mine, revision, now
        if piece := bundle.pieces.get(path):
            assert piece.object is not None  # it was uploaded
            row.stored_in, row.offset = objects.setdefault(piece.object.key, piece.object), piece.offset
    DataObject.objects.bulk_create(objects.values())
    DataFile.objects.filter(data=mine).update(**GONE, revision=revision, at=now)
    DataFile.objects.bulk_create(
        bundle.rows.values(), update_conflicts=True, unique_fields=["data", "path"], update_fields=WRITTEN
    )
    sizes = [row.size_bytes for row in bundle.rows.values() if row.kind == "file"]
    AgentData.objects.filter(pk=mine.pk).update(
        keeping=Keeping.SYNC, revision=revision, files=len(sizes), size_bytes=sum(sizes), changed_at=now
    )
    DataSize.note(mine.agent_did, sum(sizes), now=now)
