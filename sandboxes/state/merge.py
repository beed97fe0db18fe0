"""Three-way merge of concurrent /data changes, committed in one transaction."""

import hashlib
import uuid
from collections.abc import Mapping
from datetime import datetime
from itertools import chain, count, islice
from typing import Any

import structlog
from django.db import transaction
from django.db.models import Count, F, Q, Sum
from django.db.models.functions import Coalesce

from sandboxes.lifecycle import checkpoint
from sandboxes.models import GONE_STATES, Sandbox, SandboxState
from sandboxes.models.state import AgentData, Attachment, DataEvent, DataFile, DataObject, DataSize
from sandboxes.providers.base import FileStat
from sandboxes.state import data_tree, uploads
from sandboxes.state.changes import MAX_PATH_BYTES, ChangedFile, ManifestDiff, list_parents

log = structlog.get_logger(__name__)
CONFLICTS_DIRECTORY = ".conflicts"
MAX_EVENTS_PER_SCAN = 20  # a scan with a thousand sockets does not record a thousand events
UPSERT_COLUMNS = (
    "kind", "mode", "size_bytes", "mtime", "digest", "target", "stored_in", "offset", "revision", "holder", "at", "removed",
)  # fmt: skip


class ConcurrentChange(Exception):
    """The attachment or a stored file changed since the manifest was read: scan the sandbox again."""


def record_changes(
    attachment: Attachment,
    sandbox: Sandbox,
    diff: ManifestDiff,
    changed_files: Mapping[str, ChangedFile],
    now: datetime,
    *,
    last: bool,
) -> bool:
    """Merge the changes into the rows in one transaction. Return whether any row was written.

    Raise ConcurrentChange if another process wrote the attachment since it was read."""
    with transaction.atomic():
        held_sandbox = Sandbox.objects.select_for_update(of=("self",), no_key=True).filter(
            pk=sandbox.pk, incarnation=sandbox.incarnation, holder=attachment.holder
        )
        state = held_sandbox.values_list("state", flat=True).first()
        if state is None or state == SandboxState.DESTROYED or (state in GONE_STATES and not last):
            return False  # the lease has ended: the process that destroys the sandbox stores the rest
        data = AgentData.objects.select_for_update(no_key=True).get(pk=attachment.data_id)
        merge = DataMerge(attachment, data.revision + 1, now)
        merge.resolve(diff, changed_files)
        _write_rows(merge, data, now)
        is_latest = merge.changes_data and data.revision == attachment.revision
        columns = {
            "base": merge.base, "look": diff.digest, "revision": merge.revision if is_latest else attachment.revision,
            "unsaved_since": None,
        }  # fmt: skip
        unchanged = Attachment.objects.filter(pk=attachment.pk, version=attachment.version)
        if not unchanged.update(version=F("version") + 1, last_error="", full=False, **columns):
            raise ConcurrentChange
        merge.record_events(diff)
    attachment.version += 1
    for name, value in columns.items():
        setattr(attachment, name, value)
    checkpoint("data recorded", attachment)
    return merge.writes_rows


def _write_rows(merge: "DataMerge", data: AgentData, now: datetime) -> None:
    if merge.writes_rows:
        uploads.insert_objects(merge.objects.values())
        DataFile.objects.bulk_create(
            merge.written.values(), update_conflicts=True, unique_fields=["data", "path"], update_fields=UPSERT_COLUMNS
        )
    if merge.changes_data:
        live = DataFile.objects.filter(data=data, removed=False).aggregate(
            files=Count("pk", filter=Q(kind="file")), size=Coalesce(Sum("size_bytes"), 0)
        )
        AgentData.objects.filter(pk=data.pk).update(
            revision=merge.revision, files=live["files"], size_bytes=live["size"], changed_at=now
        )
        DataSize.note(data.agent_did, live["size"], now=now)


class DataMerge:
    """Result of the merge for each changed path, computed under the lock of the agent's data."""

    def __init__(self, attachment: Attachment, revision: int, now: datetime) -> None:
        self.attachment, self.revision, self.now = attachment, revision, now
        self.base = dict(attachment.base)
        self.written: dict[str, DataFile] = {}
        self.objects: dict[uuid.UUID, DataObject] = {}
        self.conflicts: list[tuple[str, str]] = []  # path, and path of its conflict copy
        self.changes_data = False  # the agent's data changes, so its revision grows
        self.writes_rows = False  # some row is written

    def resolve(self, diff: ManifestDiff, changed_files: Mapping[str, ChangedFile]) -> None:
        self.manifest = diff.manifest
        self.stored_rows = self._load_rows([*diff.files, *diff.non_files, *diff.removed])
        for path in diff.non_files:
            self._merge_non_file(path, diff.manifest[path])
        for path in diff.files:
            if path in changed_files:
                self._merge_file(path, diff.manifest[path], changed_files[path])
            else:  # the file was removed between the manifest and the read: the next scan compares every path
                diff.digest = ""
        for path in diff.removed:
            self._merge_removed(path)
        for row in [*self.written.values()]:
            if not row.removed:
                self._remove_obstructions(row)
        self._restore_nonempty_directories()
        self.writes_rows = bool(self.written)

    def _load_rows(self, paths: list[str]) -> dict[str, DataFile]:
        rows = DataFile.objects.filter(data=self.attachment.data_id)
        return {row.path: row for row in (rows if len(paths) > 500 else rows.filter(path__in=paths))}

    def _find_unseen_version(self, path: str) -> DataFile | None:
        """Return the stored version if another sandbox wrote it after this sandbox's base, else None."""
        row = self.stored_rows.get(path)
        return row if row and row.revision != self.base.get(path, [0])[0] else None

    def _merge_file(self, path: str, stat: FileStat, changed_file: ChangedFile) -> None:
        row, base_entry, unseen = self.stored_rows.get(path), self.base.get(path), self._find_unseen_version(path)
        if row and not row.removed and row.kind == "file" and row.digest == changed_file.digest and row.mode == stat.mode:
            if changed_file.object:  # repacked, or uploaded twice: the older object becomes outdated
                row.stored_in, row.offset = self._register_object(changed_file), changed_file.offset
                self.written[path] = row
            self.base[path] = [row.revision, row.digest, stat.stamp]
            return
        if unseen and base_entry and base_entry[1] == changed_file.digest:
            self.base[path] = [
                *base_entry[:2],
                stat.stamp,
            ]  # touched here, changed elsewhere: the next attach pulls the newer version
            return
        if unseen and unseen.digest != changed_file.digest:
            self._keep_conflict_copy(unseen)
        has_same_content = row and not row.removed and row.digest == changed_file.digest
        stored_content = (row.stored_in_id, row.offset) if row and has_same_content else None
        new = self._build_row(path, "file", stat, size_bytes=changed_file.size, digest=changed_file.digest)
        if changed_file.object:
            new.stored_in, new.offset = self._register_object(changed_file), changed_file.offset
        elif stored_content:  # only the mode changed
            new.stored_in_id, new.offset = stored_content
        else:
            raise ConcurrentChange  # the stored content with the same digest is gone: read the file again
        self._add_written(new, stat)

    def _merge_non_file(self, path: str, stat: FileStat) -> None:
        row = self.stored_rows.get(path)
        if row and not row.removed and (row.kind, row.mode, row.target) == (stat.kind, stat.mode, stat.target):
            self.base[path] = [row.revision, "", stat.stamp]
            return
        base_entry = self.base.get(path)
        unseen = self._find_unseen_version(path)
        if unseen and base_entry and base_entry[2] == stat.stamp:
            return  # unchanged here, changed elsewhere: the next attach pulls the newer version
        if unseen:
            self._keep_conflict_copy(unseen)
        self._add_written(self._build_row(path, stat.kind, stat), stat)

    def _merge_removed(self, path: str) -> None:
        row = self.stored_rows.get(path)
        if self._find_unseen_version(
            path
        ):  # changed elsewhere: an edit wins over a removal, and the next attach pulls the edit
            self.base.pop(path)
            return
        self.base.pop(path)
        if row and not row.removed:
            self._remove(row)

    def _remove_obstructions(self, row: DataFile) -> None:
        """Remove stored paths that cannot coexist with `row`: files above it, and paths below a row that is not a directory.

        Versions that other sandboxes stored since this sandbox's base are kept as conflict copies."""
        for path in list_parents(row.path):
            ancestor = self.written.get(path) or self.stored_rows.get(path)
            if path in self.manifest and (ancestor is None or ancestor.removed or ancestor.kind != "directory"):
                if ancestor:
                    self._keep_conflict_copy(ancestor)
                self._add_written(self._build_row(path, "directory", self.manifest[path]), self.manifest[path])
        stored = self.stored_rows.get(row.path)
        if row.kind != "directory" and stored and not stored.removed and stored.kind == "directory":
            for covered in data_tree.find_files_below(self.attachment.data, row.path):
                if covered.path not in self.written:
                    self._keep_conflict_copy(covered)
                    self._remove(covered)

    def _restore_nonempty_directories(self) -> None:
        """Restore directories removed here in which other sandboxes have stored paths since."""
        removed = [row for row in self.written.values() if row.removed and row.kind == "directory"]
        if not removed:
            return
        live = {*data_tree.find_live_files(self.attachment.data).values_list("path", flat=True)}
        live = {path for path in live | {*self.written} if not (path in self.written and self.written[path].removed)}
        directories = {parent for path in live for parent in list_parents(path)}
        for row in removed:
            if row.path in directories:
                row.removed = False

    def _remove(self, row: DataFile) -> None:
        row.removed, row.stored_in, row.size_bytes, row.digest = True, None, 0, ""
        row.revision, row.holder, row.at = self.revision, self.attachment.holder, self.now
        self.written[row.path] = row
        self.changes_data = True

    def _keep_conflict_copy(self, row: DataFile) -> None:
        """Keep a copy of a version that this sandbox replaces without having seen it."""
        if row.removed or row.kind == "directory":
            return
        target, directories = self._choose_conflict_path(row)
        for path in directories:
            self.written[path] = self._build_copy(row, path=path, kind="directory", mode=0o755)
        self.written[target] = self._build_copy(
            row, path=target, kind=row.kind, mode=row.mode, size_bytes=row.size_bytes, mtime=row.mtime, digest=row.digest,
            target=row.target, stored_in_id=row.stored_in_id, offset=row.offset,
        )  # fmt: skip
        self.conflicts.append((row.path, target))

    def _build_copy(self, row: DataFile, **columns: Any) -> DataFile:
        return DataFile(data_id=row.data_id, revision=self.revision, holder=row.holder, at=self.now, **columns)

    def _choose_conflict_path(self, row: DataFile) -> tuple[str, list[str]]:
        """Return the path of the conflict copy, and the directories to create for it. The path collides with no other path."""
        name, holder = row.path, row.holder or "operator"
        if name.startswith(f"{CONFLICTS_DIRECTORY}/") or len(name.encode()) > MAX_PATH_BYTES - 100:
            name = hashlib.sha256(name.encode()).hexdigest()
        candidates = (
            target
            for suffix in chain([""], (f".{number}" for number in count(2)))
            for target in (f"{CONFLICTS_DIRECTORY}/{holder}{suffix}/{name}", f"{CONFLICTS_DIRECTORY}{suffix}/{holder}/{name}")
        )
        return next(
            (target, missing) for target in candidates if (missing := self._find_missing_directories(target)) is not None
        )

    def _find_missing_directories(self, target: str) -> list[str] | None:
        """Return the missing directories above a path; None if the path is taken or a file is among its ancestors."""
        ancestry = [*list_parents(target), target]
        kinds = {path: stat.kind for path in ancestry if (stat := self.manifest.get(path))}
        kinds |= data_tree.find_live_files(self.attachment.data).filter(path__in=ancestry).values_list("path", "kind")
        kinds |= {path: row.kind for path, row in self.written.items() if path in ancestry}
        if target in kinds or any(kinds.get(path, "directory") != "directory" for path in ancestry):
            return None
        return [path for path in ancestry[:-1] if path not in kinds]

    def _build_row(self, path: str, kind: str, stat: FileStat, **columns: Any) -> DataFile:
        return DataFile(
            data_id=self.attachment.data_id, path=path, kind=kind, mode=stat.mode, mtime=stat.mtime, target=stat.target,
            revision=self.revision, holder=self.attachment.holder, at=self.now, **columns,
        )  # fmt: skip

    def _add_written(self, row: DataFile, stat: FileStat) -> None:
        self.written[row.path] = row
        self.base[row.path] = [row.revision, row.digest, stat.stamp]
        self.changes_data = True

    def _register_object(self, changed_file: ChangedFile) -> DataObject:
        assert changed_file.object is not None
        return self.objects.setdefault(changed_file.object.pk, changed_file.object)

    def record_events(self, diff: ManifestDiff) -> None:
        did, holder = self.attachment.data.agent_did, self.attachment.holder
        for path, target in self.conflicts[:MAX_EVENTS_PER_SCAN]:
            detail = f"Another sandbox of this agent changed this path; its version is kept as {target}."
            record_event(did, holder, DataEvent.Kind.CONFLICT, path=path, detail=detail, now=self.now)
        for path, reason in islice(diff.unstorable.items(), MAX_EVENTS_PER_SCAN):
            printable = path.encode(errors="surrogateescape").decode(errors="replace")
            recorded = DataEvent.objects.filter(holder=holder, kind=DataEvent.Kind.LEFT_OUT, path=printable)
            if not recorded.exists():
                detail = f"Not stored: {reason}."
                record_event(did, holder, DataEvent.Kind.LEFT_OUT, path=printable, detail=detail, now=self.now)


def record_event(did: str, holder: uuid.UUID | None, kind: DataEvent.Kind, *, now: datetime, **fields: str) -> None:
    """Record a DataEvent and log it as a warning."""
    DataEvent.objects.create(agent_did=did, holder=holder, kind=kind, at=now, **fields)
    log.warning("agent data", agent=did, kind=kind.value, **fields)
