"""Stored output of runs: in the row of the run, and later in the object store if it is large.

An ended run keeps its output in its row for MOVE_AFTER, in which clients usually read the output. Then a sweep moves the
outputs of many runs into one object. The columns of the row are NULL from then on: code that ignores the object fails."""

import uuid
from collections.abc import Collection
from datetime import datetime, timedelta
from io import BytesIO
from typing import NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from sandboxes.claims import note_progress
from sandboxes.db.clock import Clock, clock_from
from sandboxes.lifecycle import checkpoint
from sandboxes.models import OutputObject, Run, StoredOutput
from sandboxes.models.runs import HAS_LARGE_OUTPUT, LARGE_OUTPUT_BYTES
from sandboxes.models.state import format_key_timestamp
from sandboxes.state import uploads
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

MOVE_AFTER = timedelta(hours=1)  # after the end of the run
MAX_RUNS_PER_OBJECT = 200
MAX_OBJECT_BYTES = 8 << 20  # held in memory while the object is written; the last output of an object may exceed it
DELETE_BATCH_SIZE = 100  # objects
COLUMNS = ("pk", "stdout", "stderr")


class RunOutput(NamedTuple):
    """Stored beginning of both output streams of a run."""

    stdout: bytes
    stderr: bytes


class OutputSizes(NamedTuple):
    """Bytes of each stream that are stored."""

    stdout: int
    stderr: int


class OutputUnavailable(StoreError):
    """The object with the output of a run cannot be read now."""

    def __init__(self, reason: str, *, key: str = "") -> None:
        super().__init__("store", "download", reason, key=key)


def load_output(run: Run) -> RunOutput:
    """Return the stored output of a run. Raise StoreError if it is in the object store and cannot be read."""
    if run.stdout is not None and run.stderr is not None:
        return RunOutput(bytes(run.stdout), bytes(run.stderr))
    part = _find_part(run)
    length, content = part.stdout_bytes + part.stderr_bytes, BytesIO()
    key = part.stored_in.key
    if not get_store().download(key, content, start=part.offset, length=length):
        raise OutputUnavailable("the object does not exist", key=key)
    output = content.getvalue()
    if len(output) != length:
        raise OutputUnavailable(f"{len(output)} of {length} bytes", key=key)
    return RunOutput(output[: part.stdout_bytes], output[part.stdout_bytes :])


def get_stored_sizes(run: Run) -> OutputSizes:
    """Return the sizes of the stored output without reading the object. Raise StoreError if the run was deleted meanwhile."""
    if run.stdout is not None and run.stderr is not None:
        return OutputSizes(len(run.stdout), len(run.stderr))
    part = _find_part(run)
    return OutputSizes(part.stdout_bytes, part.stderr_bytes)


def _find_part(run: Run) -> StoredOutput:
    """Return the place of a moved output. Without a query if the run was read with its `stored_output__stored_in`."""
    try:
        return run.stored_output
    except StoredOutput.DoesNotExist:
        raise OutputUnavailable("the run was deleted") from None


def move_large_outputs(*, now: datetime) -> SweepResult:
    """Move the large outputs of runs that ended long enough ago into the object store, and remove unreferenced objects."""
    result, clock, until = SweepResult(), clock_from(now), now + PASS_TIME_LIMIT
    with result.catching("outputs of runs"):
        while clock() <= until and (moved := _move_some(clock, now)) is not None:
            note_progress()
            result.note("outputs moved", moved)
    with result.catching("unreferenced objects"):
        while clock() <= until and (deleted := _remove_some_objects()):
            note_progress()
            result.note("objects deleted", deleted)
    return result


def find_movable(*, now: datetime) -> QuerySet[Run]:
    """Return the runs whose output is large, in their row, and due to move, oldest end first.

    None while the rows keep little of any output (LEASEHOLD_RUN_OUTPUT_KEPT_BYTES)."""
    if settings.RUN_OUTPUT_KEPT <= LARGE_OUTPUT_BYTES:
        return Run.objects.none()
    return Run.objects.filter(HAS_LARGE_OUTPUT, ended_at__lte=now - MOVE_AFTER).order_by("ended_at")


def find_outdated_objects() -> QuerySet[OutputObject]:
    """Return the objects whose runs are all deleted, oldest first."""
    return OutputObject.objects.filter(outputs__isnull=True).order_by("at")


def _move_some(clock: Clock, now: datetime) -> int | None:
    """Move outputs into one object. Return the number moved; None if there are none. Raise StoreError.

    Order: claim the key, write the object, then point to it and clear the rows in one transaction. A crash before leaves an
    object without a row, which the pruning sweep removes."""
    runs = _select_group(now)
    if not runs:
        return None
    at, pk = clock(), uuid.uuid4()
    stored = OutputObject(id=pk, key=f"outputs/{format_key_timestamp(at)}-{pk.hex}", at=at)
    content, parts = bytearray(), dict[uuid.UUID, StoredOutput]()
    for run in runs:
        output = load_output(run)
        parts[run.pk] = StoredOutput(
            run=run, stored_in=stored, offset=len(content), stdout_bytes=len(output.stdout), stderr_bytes=len(output.stderr)
        )
        content += output.stdout + output.stderr
    stored.size_bytes = len(content)
    with uploads.claim_keys([stored.key], clock=clock):
        get_store().set(stored.key, bytes(content))
        checkpoint("outputs stored", stored)
        return _record(stored, parts)


def _select_group(now: datetime) -> list[Run]:
    """Return the runs of the next object."""
    runs, size = list[Run](), 0
    for run in find_movable(now=now).only(*COLUMNS)[:MAX_RUNS_PER_OBJECT].iterator(chunk_size=20):
        runs.append(run)
        size += sum(get_stored_sizes(run))
        if size >= MAX_OBJECT_BYTES:
            break
    return runs


def _record(stored: OutputObject, parts: dict[uuid.UUID, StoredOutput]) -> int:
    """Point to the object from those of its runs that still exist, and clear their columns. Return their number."""
    with transaction.atomic():
        present = [*_lock_unmoved(parts).values_list("pk", flat=True)]
        if not present:
            return 0
        uploads.end_claims([stored.key])
        stored.save(force_insert=True)
        StoredOutput.objects.bulk_create([parts[pk] for pk in present])
        Run.objects.filter(pk__in=present).update(stdout=None, stderr=None)
    checkpoint("outputs moved", stored)
    return len(present)


def _lock_unmoved(keys: Collection[uuid.UUID]) -> QuerySet[Run]:
    """Return the runs whose output is in their rows, locked until the transaction ends."""
    return Run.objects.filter(pk__in=keys, stdout__isnull=False).order_by("pk").select_for_update(no_key=True)


def _remove_some_objects() -> int:
    """Remove objects of deleted runs, from the store and then from the database. Return their number.

    Only the transaction that inserts an object points to it: an object without a run never gets one again."""
    outdated = dict(find_outdated_objects().values_list("pk", "key")[:DELETE_BATCH_SIZE])
    get_store().remove_many(outdated.values())
    return OutputObject.objects.filter(pk__in=outdated).delete()[0]
