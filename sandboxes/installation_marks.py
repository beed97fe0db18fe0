"""Marks of the installation in its store and its state directory: detection of a restored or copied database.

A database that was restored from a backup or copied to another environment lacks the newest rows, and has work that was done
since. Each minute a sweep therefore increases a generation in the database, and then writes it as a mark to the store and to
the state directory. A mark of another installation, or with a higher generation than the database's, was written by another
database or by a later state of this one.

A minute is too long for a fail-over to a standby that lacks the last seconds. Each start, wake and sleep of a sandbox is
therefore noted in the state directory as well, once it is committed: a row that is behind the last note has lost changes.

Until an operator confirms (`manage.py installation confirm`), destructive sweeps are refused, no queued run or task begins,
nothing is delivered, and a wake first stores the files of any later incarnation (sandboxes.state.unrecorded)."""

import json
import os
import threading
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from uuid import UUID

import structlog
from django.conf import settings
from django.db.models import F, Subquery

from sandboxes.models import Installation, Sandbox, SandboxState
from sandboxes.models.installation import MARK_NAME
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
CHANGE_NAME = "last-change.json"  # of the last noted change, in the state directory
# Order of the states within an incarnation. A sandbox changes between states of equal rank, but never to a lower one.
STATE_RANKS = {
    SandboxState.WARMING: 0, SandboxState.WARM: 1, SandboxState.RUNNING: 1, SandboxState.WAITING: 1, SandboxState.SUSPENDED: 1,
    SandboxState.EVICTING: 1, SandboxState.COLD: 2, SandboxState.DESTROYING: 3, SandboxState.DESTROYED: 3,
}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """Identity and generation in the mark of the store or of the state directory."""

    identity: str
    generation: int


@dataclass(frozen=True)
class Change:
    """Committed state of one sandbox, noted by a process of this host. Rows of sandboxes are never deleted."""

    identity: str  # of the installation
    generation: int  # of the installation at the time of the note
    sandbox: str
    incarnation: int
    rank: int


def get_installation() -> Installation:
    return Installation.objects.get_or_create(pk=1)[0]


def has_recorded_mismatch() -> bool:
    """Return whether the last check found a mismatch, in one query and without a call to the store."""
    return Installation.objects.filter(pk=1).exclude(mismatch="").exists()


def find_mismatch() -> str:
    """Return the reason why the store or the state directory does not belong to this database, or "". Stores the reason.

    A missing mark in the store is a mismatch, unless this installation was never marked. A missing mark in the state directory
    is not: a new host has none. Raises StoreError if the store does not respond or the state directory cannot be read."""
    was_marked = get_installation().generation > 0  # read before the marks: another worker may write the first mark meanwhile
    marks = (("store", read_store_mark()), ("state directory", read_directory_mark()))
    row, lost = _look_for_lost_change()  # after the marks: another host may increase the generation and write a mark meanwhile
    reasons = [lost] if lost else []
    for place, mark in marks:
        if mark is None:
            if place == "store" and was_marked:
                reasons.append(f"The {place} has no mark of an installation, but this database has written one before.")
        elif mark.identity != str(row.identity):
            reasons.append(f"The {place} belongs to another installation: {mark.identity}. This one is {row.identity}.")
        elif mark.generation > row.generation:
            reasons.append(
                f"The {place} was marked by a later state of this database (generation {mark.generation}; the database has "
                f"{row.generation}). The database was restored from a backup, or a copy of it is in use elsewhere."
            )
    mismatch = " ".join(reasons)
    if mismatch != row.mismatch:
        Installation.objects.filter(pk=row.pk).update(mismatch=mismatch)
        if mismatch:
            log.error("installation mismatch", reason=mismatch)
    return mismatch


class FirstCheck:
    """Comparison of the marks before the first act of this process. Afterwards the sweep `mark` repeats it each minute.

    The result that a restored database has recorded is that of the time of the backup."""

    def __init__(self) -> None:
        self._is_done = False

    def find_refusal(self) -> str:
        """Return the reason for which this process may not act on sandboxes or services outside now, or ""."""
        if settings.OBSERVE:
            return "Observe mode (LEASEHOLD_OBSERVE)."
        if not self._is_done:
            mismatch, self._is_done = _find_mismatch_or_error()
            return mismatch
        row, lost = _look_for_lost_change()
        return row.mismatch or (_find_mismatch_or_error()[0] if lost else "")


FIRST_CHECK = FirstCheck()


def _find_mismatch_or_error() -> tuple[str, bool]:
    """Return the mismatch, or the error of the store, and whether the store has responded."""
    try:
        return find_mismatch(), True
    except StoreError as failed:
        return f"The mark in the store cannot be read: {failed}", False


def find_refusal() -> str:
    """Return the reason for which no queued run, task or delivery may begin now, or "". One query after the first call."""
    return FIRST_CHECK.find_refusal()


def read_store_mark() -> Mark | None:
    """Return the mark in the store, or None. Raises StoreError, also if the mark is malformed."""
    return _parse_mark(get_store().get(MARK_NAME), get_store().name)


def read_directory_mark() -> Mark | None:
    """Return the mark in the state directory, or None. Raises StoreError if the mark cannot be read or is malformed."""
    try:
        content = _get_mark_path().read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError("state directory", "read", str(error)) from error
    return _parse_mark(content, "state directory")


def _parse_mark(content: bytes | None, place: str) -> Mark | None:
    if content is None:
        return None
    try:
        values = json.loads(content)
        return Mark(str(values["identity"]), int(values["generation"]))
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(place, "read", f"{MARK_NAME} is not a mark of an installation: {error}") from error


def note_change(sandbox: Sandbox, state: SandboxState) -> None:
    """Note in the state directory that a sandbox was committed in this state. Call after the commit. One query.

    A database that lacks the previous note has lost changes: the mismatch is recorded, and the note stays as the evidence. Of
    concurrent notes any may remain. A note that cannot be written leaves an older one, which is as true: the failure is logged,
    and the sandbox goes on."""
    row, lost = _look_for_lost_change()
    if lost:
        if not row.mismatch:
            Installation.objects.filter(pk=row.pk).update(mismatch=lost)
            log.error("installation mismatch", reason=lost)
        return
    content = json.dumps(
        asdict(Change(str(row.identity), row.generation, str(sandbox.pk), sandbox.incarnation, STATE_RANKS[state]))
    )
    try:
        _replace_file(Path(settings.STATE_DIR) / CHANGE_NAME, content.encode())
    except OSError as error:
        log.warning("change not noted", sandbox=str(sandbox.pk), error=str(error))


def has_lost_changes() -> bool:
    """Return whether this database does not belong to its store or state directory, as far as that is known without the store.

    One query and a small file: for each wake."""
    row, lost = _look_for_lost_change()
    return bool(row.mismatch or lost)


def _look_for_lost_change() -> tuple[Installation, str]:
    """Return the installation, and the reason if the database lacks the change that was noted last in the state directory."""
    try:
        change, unreadable = _read_change(), ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        change = None
        unreadable = f"{CHANGE_NAME} in the state directory cannot be read, so a loss of changes would not be seen: {error}"
    noted = Sandbox.objects.filter(pk=change.sandbox if change else UUID(int=0))
    rows = Installation.objects.filter(pk=1).annotate(
        noted_incarnation=Subquery(noted.values("incarnation")), noted_state=Subquery(noted.values("state"))
    )
    row = rows.first()
    if row is None:
        return get_installation(), unreadable
    if change is None or change.identity != str(row.identity):  # the mark of another installation is reported by itself
        return row, unreadable
    if change.generation < row.generation:  # committed before a mark that the database has, or given up by a confirmation
        return row, ""
    state = row.noted_state
    if state and (row.noted_incarnation, STATE_RANKS[SandboxState(state)]) >= (change.incarnation, change.rank):
        return row, ""
    return row, (
        f"This database lacks changes that were committed: incarnation {change.incarnation} of the sandbox {change.sandbox} is "
        "not there any more. A backup was restored, or a standby without the last changes took over."
    )


def _read_change() -> Change | None:
    try:
        values = json.loads((Path(settings.STATE_DIR) / CHANGE_NAME).read_bytes())
    except FileNotFoundError:
        return None
    return Change(
        str(values["identity"]), int(values["generation"]), str(UUID(values["sandbox"])), int(values["incarnation"]),
        int(values["rank"]),
    )  # fmt: skip


def forget_change() -> None:
    """Remove the noted change: this database is accepted as it is. Raises StoreError."""
    try:
        (Path(settings.STATE_DIR) / CHANGE_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError("state directory", "remove", str(error)) from error


def write_marks(*, now: datetime) -> None:
    """Increase the generation in the database, then write the marks.

    A crash in between leaves older marks, which are accepted. It must not leave a store without a mark, which is a mismatch
    once the generation is above 0: before its first increase the store gets a mark of generation 0."""
    row = get_installation()
    if not row.generation:
        get_store().set(MARK_NAME, _format_mark(row))
    Installation.objects.filter(pk=1).update(generation=F("generation") + 1, marked_at=now)
    row = get_installation()
    content = _format_mark(row)
    get_store().set(MARK_NAME, content)
    try:
        _replace_file(_get_mark_path(), content)
    except OSError as error:
        raise StoreError("state directory", "write", str(error)) from error


def _replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Threads and processes may do so at the same time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _format_mark(row: Installation) -> bytes:
    return json.dumps({"identity": str(row.identity), "generation": row.generation}).encode()


def _get_mark_path() -> Path:
    return Path(settings.STATE_DIR) / MARK_NAME
