"""Marks of the installation in its store and its state directory: detection of a restored or copied database.

The prune and reconcile sweeps delete objects and sandboxes that have no row. A database that was restored from a backup or
copied to another environment lacks the newest rows. Each minute a sweep therefore increases a generation in the database, and
then writes it as a mark to the store and to the state directory. A mark of another installation, or with a higher generation
than the database's, was written by another database or by a later state of this one. Destructive sweeps are then refused until
an operator confirms (`manage.py installation confirm`)."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models import F

from sandboxes.models import Installation
from sandboxes.models.installation import MARK_NAME
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
MARK_INTERVAL = timedelta(minutes=1)


@dataclass(frozen=True)
class Mark:
    """Identity and generation in the mark of the store or of the state directory."""

    identity: str
    generation: int


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
    row = get_installation()  # read after the marks: another host may increase the generation and write a mark meanwhile
    reasons = []
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


def mark_places(*, now: datetime) -> SweepResult:
    """Increase the generation and write it to the store and the state directory, unless there is a mismatch. A sweep."""
    result = SweepResult()
    if mismatch := find_mismatch():
        result.failures.append(mismatch)
        return result
    _write_marks(now=now)
    result.note("marked")
    return result


def run_destructive(sweep: Callable[[], SweepResult]) -> SweepResult:
    """Run a sweep that destroys or deletes, unless the installation does not match. A refusal is a failure of the sweep."""
    result = SweepResult()
    try:
        mismatch = find_mismatch()
    except StoreError as failed:
        result.failures.append(f"Refused: the mark in the store cannot be read: {failed}")
        return result
    if mismatch:
        result.failures.append(f"Refused: {mismatch} See `manage.py installation`.")
        return result
    return sweep()


def confirm(*, now: datetime, actor: str) -> Installation:
    """Accept the present store and state directory as those of this database, so that destructive sweeps run again.

    The generation becomes higher than every mark: another copy of the database is refused from now on."""
    marks = [mark for mark in (read_store_mark(), read_directory_mark()) if mark]
    row = get_installation()
    highest = max([row.generation, *(mark.generation for mark in marks)])
    Installation.objects.filter(pk=row.pk).update(generation=highest, mismatch="", confirmed_at=now, confirmed_by=actor[:255])
    _write_marks(now=now)
    log.warning("installation confirmed", actor=actor, generation=highest + 1)
    return get_installation()


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


def _write_marks(*, now: datetime) -> None:
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
    path = _get_mark_path()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError("state directory", "write", str(error)) from error


def _format_mark(row: Installation) -> bytes:
    return json.dumps({"identity": str(row.identity), "generation": row.generation}).encode()


def _get_mark_path() -> Path:
    return Path(settings.STATE_DIR) / MARK_NAME
