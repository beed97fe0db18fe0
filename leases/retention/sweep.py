"""Sweep that deletes rows past their retention in short transactions, which wait for no other process."""

from collections import deque
from datetime import datetime
from typing import NamedTuple

from django.db import transaction

from leases.retention.kinds import ExpiredRows, find_expired
from sandboxes.claims import note_progress
from sandboxes.db.clock import clock_from
from sandboxes.lifecycle import checkpoint
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

BATCH_SIZE = 1000  # rows of one transaction, which holds the write lock of SQLite


class Batch(NamedTuple):
    selected: int
    changed: int


def delete_expired(*, now: datetime, batch_size: int = BATCH_SIZE) -> SweepResult:
    """Delete expired rows for up to PASS_TIME_LIMIT, one batch of each kind in turn, until no kind has any.

    A kind whose last batch was incomplete is left out until the others are done. Then all kinds are looked at again: rows to
    which the deleted ones referred may have expired. An error of one kind does not delay the others."""
    result, clock = SweepResult(), clock_from(now)
    kinds = find_expired(now=now)
    pending, failed, has_changed = deque(kinds), set[str](), False
    while clock() <= now + PASS_TIME_LIMIT:
        if not pending:
            if not has_changed:
                break
            pending.extend(kind for kind in kinds if kind.kind not in failed)
            has_changed = False
        expired, batch = pending.popleft(), None
        note_progress()
        with result.catching(expired.kind):
            batch = handle_batch(expired, batch_size)
        if batch is None:
            failed.add(expired.kind)
            continue
        result.note(expired.outcome, batch.changed)
        has_changed = has_changed or batch.changed > 0
        if batch.changed and batch.selected == batch_size:
            pending.append(expired)
    return result


def handle_batch(expired: ExpiredRows, size: int) -> Batch:
    """Delete up to `size` rows of a kind, or clear their columns, in one transaction.

    Rows that another process has locked are left to the next pass. The condition is checked again once the rows are locked: no
    row that refers to a locked row can be committed, and one that was committed before is visible then."""
    with transaction.atomic():
        free = expired.select().select_for_update(skip_locked=True, of=("self",))
        selected = [*free.values_list("pk", flat=True)[:size]]
        if not selected:
            return Batch(0, 0)
        checkpoint("expired rows locked", expired)
        keys = [*expired.select().filter(pk__in=selected).order_by().values_list("pk", flat=True)]
        rows = expired.rows.model._base_manager.filter(pk__in=keys)
        if expired.cleared:
            changed = rows.update(**expired.cleared)
        else:
            changed = rows.only("pk").delete()[1].get(expired.rows.model._meta.label, 0)
    checkpoint("expired rows deleted", expired)
    return Batch(len(selected), changed)
