"""Which version of each changed path counts, and the rows moved to it in one transaction."""

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
from sandboxes.state import data_tree
from sandboxes.state.changes import MAX_PATH_BYTES, ChangedFile, ManifestDiff, list_parents

log = structlog.get_logger(__name__)
CONFLICTS_DIRECTORY = ".conflicts"
MAX_EVENTS_PER_SCAN = 20  # of one look: a thousand sockets are told of as twenty
UPSERT_COLUMNS = (
    "kind", "mode", "size_bytes", "mtime", "digest", "target", "stored_in", "offset", "revision", "holder", "at", "removed",
)  # fmt: skip


class ConcurrentChange(Exception):
    """Somebody else has stored for the same sandbox meanwhile: look again."""


def record_changes(
    here: Attachment, sandbox: Sandbox, change: ManifestDiff, pieces: Mapping[str, ChangedFile], now: datetime, *, last: bool
) -> bool:
    """Move the rows to what was stored, in one transaction. True if any was."""
    with transaction.atomic():
        alive = Sandbox.objects.select_for_update(of=("self",), no_key=True).filter(
            pk=sandbox.pk, incarnation=sandbox.incarnation, holder=here.holder
        )
        state = alive.values_list("state", flat=True).first()
        if state is None or state == SandboxState.DESTROYED or (state in GONE_STATES and not last):
            return False  # the lease has ended: whoever destroys the sandbox stores what is left
        data = AgentData.objects.select_for_update(no_key=True).get(pk=here.data_id)
        verdict = DataMerge(here, data.revision + 1, now)
        verdict.judge(change, pieces)
        if verdict.changed:
            DataObject.objects.bulk_create(verdict.objects.values())
            DataFile.objects.bulk_create(
                verdict.written.values(), update_conflicts=True, unique_fields=["data", "path"], update_fields=UPSERT_COLUMNS
            )
        if verdict.news:
            live = DataFile.objects.filter(data=data, removed=False).aggregate(
                files=Count("pk", filter=Q(kind="file")), size=Coalesce(Sum("size_bytes"), 0)
            )
            AgentData.objects.filter(pk=data.pk).update(
                revision=verdict.revision, files=live["files"], size_bytes=live["size"], changed_at=now
            )
            DataSize.note(data.agent_did, live["size"], now=now)
        seen = verdict.revision if verdict.news and data.revision == here.revision else here.revision
        base = verdict.base
        if not Attachment.objects.filter(pk=here.pk, version=here.version).update(
            version=F("version") + 1, base=base, look=change.look, revision=seen, unsaved_since=None, last_error="", full=False
        ):
            raise ConcurrentChange
        verdict.tell(change)
    here.version, here.base, here.look, here.revision = here.version + 1, base, change.look, seen
    here.unsaved_since = None
    checkpoint("data recorded", here)
    return verdict.changed


class DataMerge:
    """What becomes of each changed path, decided under the lock of the agent's data."""

    def __init__(self, here: Attachment, revision: int, now: datetime) -> None:
        self.here, self.revision, self.now = here, revision, now
        self.base = dict(here.base)
        self.written: dict[str, DataFile] = {}
        self.objects: dict[uuid.UUID, DataObject] = {}
        self.conflicts: list[tuple[str, str]] = []  # path, and where the version that lost is kept
        self.news = False  # something is different for other sandboxes
        self.changed = False  # some row is written

    def judge(self, change: ManifestDiff, pieces: Mapping[str, ChangedFile]) -> None:
        self.there = change.there
        self.stored = self._stored([*change.files, *change.others, *change.gone])
        for path in change.others:
            self._merge_non_file(path, change.there[path])
        for path in change.files:
            if path in pieces:  # else it went away between the listing and the reading: the next look tells
                self._file(path, change.there[path], pieces[path])
            else:
                change.look = ""
        for path in change.gone:
            self._merge_removed(path)
        for row in [*self.written.values()]:
            if not row.removed:
                self._remove_obstructions(row)
        self._restore_nonempty_directories()
        self.changed = bool(self.written)

    def _stored(self, paths: list[str]) -> dict[str, DataFile]:
        mine = DataFile.objects.filter(data=self.here.data_id)
        return {row.path: row for row in (mine if len(paths) > 500 else mine.filter(path__in=paths))}

    def _find_unseen_version(self, path: str) -> DataFile | None:
        """The version that another sandbox has stored, if it is not the one that this sandbox was given."""
        row = self.stored.get(path)
        return row if row and row.revision != self.base.get(path, [0])[0] else None

    def _file(self, path: str, stat: FileStat, piece: ChangedFile) -> None:
        row, given, unseen = self.stored.get(path), self.base.get(path), self._find_unseen_version(path)
        if row and not row.removed and row.kind == "file" and row.digest == piece.digest and row.mode == stat.mode:
            if piece.object:  # packed anew, or the same bytes stored twice: the older object may go
                row.stored_in, row.offset = self._register_object(piece), piece.offset
                self.written[path] = row
            self.base[path] = [row.revision, row.digest, stat.stamp]
            return
        if unseen and given and given[1] == piece.digest:
            self.base[path] = [given[0], given[1], stat.stamp]  # touched here, changed elsewhere: the next attach brings it
            return
        if unseen and unseen.digest != piece.digest:
            self._keep_conflict_copy(unseen)
        kept = (row.stored_in_id, row.offset) if row and not row.removed and row.digest == piece.digest else None
        new = self._row(path, "file", stat, size_bytes=piece.size, digest=piece.digest)
        if piece.object:
            new.stored_in, new.offset = self._register_object(piece), piece.offset
        elif kept:  # its mode alone was changed
            new.stored_in_id, new.offset = kept
        else:
            raise ConcurrentChange  # what it was equal to is not there any more: read it again
        self._put(new, stat)

    def _merge_non_file(self, path: str, stat: FileStat) -> None:
        row = self.stored.get(path)
        if row and not row.removed and (row.kind, row.mode, row.target) == (stat.kind, stat.mode, stat.target):
            self.base[path] = [row.revision, "", stat.stamp]
            return
        given = self.base.get(path)
        unseen = self._find_unseen_version(path)
        if unseen and given and given[2] == stat.stamp:
            return  # unchanged here, changed elsewhere: the next attach brings it
        if unseen:
            self._keep_conflict_copy(unseen)
        self._put(self._row(path, stat.kind, stat), stat)

    def _merge_removed(self, path: str) -> None:
        row = self.stored.get(path)
        if self._find_unseen_version(path):  # changed elsewhere: an edit counts more than a removal, and comes back
            self.base.pop(path)
            return
        self.base.pop(path)
        if row and not row.removed:
            self._remove(row)

    def _remove_obstructions(self, row: DataFile) -> None:
        """Nothing is below a file or a link. What others have stored below it, or above it, since this sandbox was given
        its files, loses as a file with the same name would."""
        for path in list_parents(row.path):
            top = self.written.get(path) or self.stored.get(path)
            if path in self.there and (top is None or top.removed or top.kind != "directory"):
                if top:
                    self._keep_conflict_copy(top)
                self._put(self._row(path, "directory", self.there[path]), self.there[path])
        before = self.stored.get(row.path)
        if row.kind != "directory" and before and not before.removed and before.kind == "directory":
            for lost in data_tree.find_files_below(self.here.data, row.path):
                if lost.path not in self.written:
                    self._keep_conflict_copy(lost)
                    self._remove(lost)

    def _restore_nonempty_directories(self) -> None:
        """A directory that was removed here, and in which others have stored something since, comes back with that."""
        gone = [row for row in self.written.values() if row.removed and row.kind == "directory"]
        if not gone:
            return
        live = {*data_tree.find_live_files(self.here.data).values_list("path", flat=True)}
        live = {path for path in live | {*self.written} if not (path in self.written and self.written[path].removed)}
        holding = {path for each in live for path in list_parents(each)}
        for row in gone:
            if row.path in holding:
                row.removed = False

    def _remove(self, row: DataFile) -> None:
        row.removed, row.stored_in, row.size_bytes, row.digest = True, None, 0, ""
        row.revision, row.holder, row.at = self.revision, self.here.holder, self.now
        self.written[row.path] = row
        self.news = True

    def _keep_conflict_copy(self, row: DataFile) -> None:
        """Keep a version that another sandbox has stored and this one replaces without having seen it."""
        if row.removed or row.kind == "directory":
            return
        place, directories = self._choose_conflict_path(row)
        for path in directories:
            self.written[path] = self._kept(row, path=path, kind="directory", mode=0o755)
        self.written[place] = self._kept(
            row, path=place, kind=row.kind, mode=row.mode, size_bytes=row.size_bytes, mtime=row.mtime, digest=row.digest,
            target=row.target, stored_in_id=row.stored_in_id, offset=row.offset,
        )  # fmt: skip
        self.conflicts.append((row.path, place))

    def _kept(self, row: DataFile, **columns: Any) -> DataFile:
        return DataFile(data_id=row.data_id, revision=self.revision, holder=row.holder, at=self.now, **columns)

    def _choose_conflict_path(self, row: DataFile) -> tuple[str, list[str]]:
        """Where it is kept, and which directories have to be made for that: where nothing else is."""
        name, holder = row.path, row.holder or "operator"
        if name.startswith(f"{CONFLICTS_DIRECTORY}/") or len(name.encode()) > MAX_PATH_BYTES - 100:
            name = hashlib.sha256(name.encode()).hexdigest()
        places = (
            place
            for again in chain([""], (f".{number}" for number in count(2)))
            for place in (f"{CONFLICTS_DIRECTORY}/{holder}{again}/{name}", f"{CONFLICTS_DIRECTORY}{again}/{holder}/{name}")
        )
        return next((place, made) for place in places if (made := self._find_missing_directories(place)) is not None)

    def _find_missing_directories(self, place: str) -> list[str] | None:
        """Which directories are lacking above a place; None if it is taken, or a file is in the way."""
        way = [*list_parents(place), place]
        kinds = {path: stat.kind for path in way if (stat := self.there.get(path))}
        kinds |= data_tree.find_live_files(self.here.data).filter(path__in=way).values_list("path", "kind")
        kinds |= {path: row.kind for path, row in self.written.items() if path in way}
        if place in kinds or any(kinds.get(path, "directory") != "directory" for path in way):
            return None
        return [path for path in way[:-1] if path not in kinds]

    def _row(self, path: str, kind: str, stat: FileStat, **more: Any) -> DataFile:
        return DataFile(
            data_id=self.here.data_id, path=path, kind=kind, mode=stat.mode, mtime=stat.mtime, target=stat.target,
            revision=self.revision, holder=self.here.holder, at=self.now, **more,
        )  # fmt: skip

    def _put(self, row: DataFile, stat: FileStat) -> None:
        self.written[row.path] = row
        self.base[row.path] = [row.revision, row.digest, stat.stamp]
        self.news = True

    def _register_object(self, piece: ChangedFile) -> DataObject:
        assert piece.object is not None
        return self.objects.setdefault(piece.object.pk, piece.object)

    def tell(self, change: ManifestDiff) -> None:
        did = self.here.data.agent_did
        for path, place in self.conflicts[:MAX_EVENTS_PER_SCAN]:
            said = f"Another sandbox of this agent had changed it; that version is kept as {place}."[:500]
            record_event(did, self.here.holder, DataEvent.Kind.CONFLICT, path=path, detail=said, now=self.now)
        for path, why in islice(change.left_out.items(), MAX_EVENTS_PER_SCAN):
            shown = path.encode(errors="surrogateescape").decode(errors="replace")[:1000]
            known = DataEvent.objects.filter(holder=self.here.holder, kind=DataEvent.Kind.LEFT_OUT, path=shown)
            if not known.exists():
                record_event(
                    did, self.here.holder, DataEvent.Kind.LEFT_OUT, path=shown, detail=f"Not stored: {why}.", now=self.now
                )


def record_event(did: str, holder: uuid.UUID | None, kind: DataEvent.Kind, *, now: datetime, **said: str) -> None:
    DataEvent.objects.create(agent_did=did, holder=holder, kind=kind, at=now, **said)
    log.warning("agent data", agent=did, what=kind.value, **said)
