"""Snapshots whose objects the store did not find: since when, and when their state counts as lost.

"No such key" is also the answer of a bucket that is restored or replicated with a delay, of a wrong prefix, and of a directory
that is not mounted. One such answer therefore ends nothing: the start fails and is repeated by the next use. The state counts
as lost only after LOSS_TIMEOUT, in which an operator is warned, and if the listing of the store confirms the absence."""

from datetime import datetime, timedelta

from django.db.models import QuerySet

from sandboxes.models import Installation
from sandboxes.models.installation import MARK_NAME
from sandboxes.models.state import Snapshot
from sandboxes.storage import get_store

LOSS_TIMEOUT = timedelta(days=3)  # a weekend, in which an operator can bring the objects back


def find_missing() -> QuerySet[Snapshot]:
    """Return the snapshots, not forgotten, that the store did not find at the last attempt."""
    return Snapshot.objects.filter(missing_since__isnull=False, forgotten_at__isnull=True)


def note_missing(snapshot: Snapshot, *, now: datetime) -> bool:
    """Record that the store does not find an object of a snapshot. Return whether the snapshot was not missing before."""
    return bool(Snapshot.objects.filter(key=snapshot.key, missing_since__isnull=True).update(missing_since=now))


def is_lost(snapshot: Snapshot, *, now: datetime) -> bool:
    """Return whether the state of a snapshot counts as lost: missing for long enough, and confirmed. Raise StoreError.

    A store without the mark of this installation is another one, or is not mounted: it confirms nothing."""
    is_due = Snapshot.objects.filter(pk=snapshot.pk, missing_since__lte=now - LOSS_TIMEOUT).exists()
    return is_due and _is_own_store() and get_store().is_empty(f"{snapshot.key}/")


def _is_own_store() -> bool:
    """Return whether the store has the mark of this installation, unless none was written yet."""
    row = Installation.objects.filter(pk=1).first()
    if row is None or not row.generation:
        return True
    return not row.mismatch and get_store().has(MARK_NAME)
