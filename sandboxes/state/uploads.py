"""Claims on the keys of objects that are being stored, for uploads of any length.

A key is claimed before the first byte of its object is sent. The claim ends in the transaction that inserts the row of the
object. The prune sweep removes an object only if its key has neither a claim nor a row. The sweep deletes expired claims first,
and an upload whose claim was deleted is not recorded: a removed object never gets a row."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, BinaryIO

import structlog
from django.db import Error as DatabaseError

from sandboxes.claims import CLAIM_TTL, Claim, get_held_claims, hold, track_transfer
from sandboxes.db.clock import Clock
from sandboxes.lifecycle import checkpoint
from sandboxes.models.state import DataObject, ObjectUpload
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)


class UploadClaim(Claim):
    """Claim on the keys of one upload."""

    def __init__(self, keys: Collection[str], *, clock: Clock) -> None:
        self.keys = frozenset(keys)
        super().__init__(ObjectUpload.objects.filter(pk__in=self.keys), deadline=clock() + CLAIM_TTL, clock=clock)
        self.recorded = frozenset[str]()  # keys whose claims the transaction with their rows has ended

    def note_progress(self) -> None:
        """Count one more step. Raises StoreError once the claim is lost: the upload may be repeated with other keys."""
        if self.lost:
            raise _build_lost_error(self.keys)
        super().note_progress()

    def beat(self) -> None:
        if not self.recorded:
            super().beat()

    def _write(self, deadline: datetime, **changes: Any) -> bool:
        is_held = super()._write(deadline, **changes)
        if not is_held and self.recorded:  # the transaction with the row has been committed meanwhile
            self.lost = False
        return is_held or bool(self.recorded)


@contextmanager
def claim_keys(keys: Collection[str], *, clock: Clock) -> Iterator[None]:
    """Claim the keys of new objects while the body uploads and records them. Call outside of a transaction.

    Each key has to be unique, such as by a random id. A crash leaves the claim to its deadline."""
    claim = UploadClaim(keys, clock=clock)
    rows = [ObjectUpload(key=key, deadline_at=claim.deadline) for key in sorted(claim.keys)]
    if len(rows) == 1:
        rows[0].save(force_insert=True)  # without the transaction of bulk_create: two round trips less for each snapshot
    else:
        ObjectUpload.objects.bulk_create(rows)
    try:
        with hold(claim):
            checkpoint("keys claimed", claim)
            yield
    except Exception:
        _release(claim.keys)
        raise
    if unrecorded := claim.keys - claim.recorded:
        _release(unrecorded)


def _release(keys: Collection[str]) -> None:
    """End the claims of objects that no row points to. Without a database they end at their deadline."""
    try:
        ObjectUpload.objects.filter(pk__in=keys).delete()
    except DatabaseError as error:
        log.warning("claim not ended", keys=sorted(keys), error=str(error))


def end_claims(keys: Collection[str]) -> None:
    """End the claims of stored objects, in the transaction that inserts their rows. Raise StoreError if a claim is lost.

    Objects whose entry is in the store end their claims after the entry is written."""
    keys = frozenset(keys)
    if ObjectUpload.objects.filter(pk__in=keys).delete()[0] != len(keys):
        raise _build_lost_error(keys)
    for claim in get_held_claims():
        if isinstance(claim, UploadClaim) and keys & claim.keys:
            claim.recorded |= keys & claim.keys


class ContentUploads:
    """Claims on the content of artifacts (sandboxes.stores.artifacts.ContentClaims)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @contextmanager
    def claim(self, key: str, source: BinaryIO) -> Iterator[BinaryIO]:
        with claim_keys([key], clock=self._clock):
            yield track_transfer(source)

    def end(self, key: str) -> None:
        end_claims([key])

    def find(self, keys: Collection[str]) -> set[str]:
        return find_claimed(keys)


def insert_objects(objects: Collection[DataObject]) -> None:
    """Insert the rows of stored objects, and end their claims. Call in a transaction. Raise StoreError if a claim is lost."""
    if objects:
        end_claims([stored.key for stored in objects])
        DataObject.objects.bulk_create(objects)


def end_expired(*, now: datetime) -> int:
    """Delete the claims of uploads that made no progress until their deadline. Return the number deleted."""
    return ObjectUpload.objects.filter(deadline_at__lt=now).delete()[0]


def find_claimed(keys: Collection[str]) -> set[str]:
    """Return those of the keys that are claimed. An expired claim counts until `end_expired` has deleted it."""
    return {*ObjectUpload.objects.filter(pk__in=keys).values_list("pk", flat=True)}


def _build_lost_error(keys: Collection[str]) -> StoreError:
    return StoreError("store", "upload", "the upload made no progress for too long and was given up", key=min(keys, default=""))
