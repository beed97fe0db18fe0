"""Sweep that marks the installation's store and state directory, the refusal of destructive sweeps, and the confirmation.

The prune and reconcile sweeps delete objects and sandboxes that have no row (sandboxes.installation_marks)."""

from collections.abc import Callable
from datetime import datetime

import structlog
from django.db import transaction

from sandboxes import audit
from sandboxes.installation_marks import (
    find_mismatch,
    forget_change,
    get_installation,
    read_directory_mark,
    read_store_mark,
    write_marks,
)
from sandboxes.models import Installation
from sandboxes.storage.base import StoreError
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)


def mark_places(*, now: datetime) -> SweepResult:
    """Increase the generation and write it to the store and the state directory, unless there is a mismatch. A sweep."""
    result = SweepResult()
    if mismatch := find_mismatch():
        result.failures.append(mismatch)
        return result
    write_marks(now=now)
    result.note("marked")
    return result


def run_if_matching(sweep: Callable[[], SweepResult]) -> SweepResult:
    """Run a sweep that acts outside the database, unless the installation does not match.

    A refusal is a failure of the sweep."""
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


def confirm(*, now: datetime, actor: audit.Actor) -> Installation:
    """Accept the present store and state directory as those of this database, so that destructive sweeps run again.

    The generation becomes higher than every mark: another copy of the database is refused from now on."""
    marks = [mark for mark in (read_store_mark(), read_directory_mark()) if mark]
    row = get_installation()
    highest = max([row.generation, *(mark.generation for mark in marks)])
    changes = {"generation": highest, "mismatch": "", "confirmed_at": now, "confirmed_by": actor}
    with transaction.atomic():
        Installation.objects.filter(pk=row.pk).update(**changes)
        audit.record(row, "Confirm installation", f"accepted: {row.mismatch or 'no mismatch'}", actor=actor, now=now)
    write_marks(now=now)
    forget_change()
    log.warning("installation confirmed", actor=actor, generation=highest + 1)
    return get_installation()
