"""Sweeps over stored state: retry unsaved changes, measure mounted data, remove orphans."""

import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, islice
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models import QuerySet

from sandboxes.claims import note_progress
from sandboxes.db.clock import clock_from
from sandboxes.engine_turns import EngineTurns, list_by_engine
from sandboxes.errors import DataFull
from sandboxes.hosts import registry
from sandboxes.models import Attachment, DataObject, OutputObject, Snapshot
from sandboxes.models.state import AgentData, DataStorageMode, parse_key_timestamp
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.state import data_sync, mounts, storage_mode, uploads, vendor_snapshots
from sandboxes.state.local_copies import TEMPORARY_PREFIX
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
KEY_BATCH_SIZE = 500  # keys per database lookup
ORPHAN_GRACE = timedelta(hours=1)  # younger objects are kept even without a claim, as a second safeguard


def persist_unsaved(*, now: datetime, limit: int = 100) -> SweepResult:
    """Retry storing unsaved changes, in random order: a failure leaves the row as it is, and must not delay the others."""
    result, clock = SweepResult(), clock_from(now)
    rows = list_by_engine(find_unsaved().order_by("?"), limit=limit, prefix="sandbox__")
    for attachment in (turns := EngineTurns(rows, clock=clock, until=now + PASS_TIME_LIMIT)):
        try:
            data_sync.persist(attachment, attachment.sandbox, registry.get_sandbox_provider(attachment.sandbox), now=clock())
        except Missing:
            result.note("gone")  # reconcile handles lost sandboxes
        except (StoreError, ProviderError, DataFull) as error:
            data_sync.mark_unsaved(attachment, error, now=clock())
            turns.note_failure()
            result.failures.append(f"{attachment.pk}: {error}")
        else:
            result.note("stored")
    return result


def find_unsaved() -> QuerySet[Attachment]:
    """Return the unsaved attachments of sandboxes on the hosts that this process reaches, oldest first."""
    return data_sync.find_unsaved().filter(registry.filter_local("sandbox__"))


def measure_mounted(*, now: datetime) -> SweepResult:
    """Measure mounted data in random order, so that every agent is measured eventually even if passes run out of time."""
    result, clock = SweepResult(), clock_from(now)
    for data in find_mounted().order_by("?"):
        if clock() > now + PASS_TIME_LIMIT:
            break
        note_progress()
        try:
            result.note("measured", storage_mode.measure_mounted_data(data, now=clock()))
        except StoreError as error:
            result.failures.append(f"{data}: {error}")
    return result


def find_mounted() -> QuerySet[AgentData]:
    return AgentData.objects.filter(keeping=DataStorageMode.MOUNT)


def remove_orphans(*, now: datetime, grace: timedelta = ORPHAN_GRACE) -> SweepResult:
    """Remove objects without rows: left by a crash between the object and its row, or by removed rows.

    An object whose key is claimed is being stored, however long that takes. Objects younger than `grace`, by the timestamp in
    their key, are kept, too. Objects are removed page by page of the listing."""
    result, cutoff = SweepResult(), now - grace
    uploads.end_expired(now=now)
    for name, remove in (
        ("outdated data", lambda: data_sync.remove_outdated_objects(data_sync.find_outdated_objects())),
        ("orphaned data", lambda: _remove_orphans(DATA_OBJECTS, cutoff)),
        ("orphaned snapshots", lambda: _remove_orphans(SNAPSHOT_OBJECTS, cutoff)),
        ("orphaned outputs", lambda: _remove_orphans(OUTPUT_OBJECTS, cutoff)),
        ("local leftovers", lambda: _remove_local_copies(cutoff)),
        ("unfinished writes", lambda: get_store().sweep_leftovers(cutoff, find_kept=_find_kept_uploads)),
        ("vendors' snapshots", lambda: vendor_snapshots.remove_unneeded(now=now)),
        ("mounts left behind", lambda: len(mounts.clear_leftovers())),
    ):
        try:
            result.note(name, remove())
        except (StoreError, OSError) as error:
            log.error("prune failed", of=name, error=str(error))
            result.failures.append(f"{name}: {error}")
    return result


@dataclass(frozen=True)
class ObjectCategory:
    """A category of objects: key prefix, key pattern, and lookup of the keys that rows point to."""

    prefix: str
    key_pattern: re.Pattern[str]  # group 1: key in the row; group 2: timestamp
    find_recorded: Callable[[set[str]], set[str]]


DATA_OBJECTS = ObjectCategory(
    "agents/",
    re.compile(r"(agents/[^/]+/(\d{8}T\d{6}Z)-[0-9a-f]{32}\.tar)"),
    lambda keys: {*DataObject.objects.filter(key__in=keys).values_list("key", flat=True)},
)
SNAPSHOT_OBJECTS = ObjectCategory(
    "snapshots/",
    re.compile(r"(snapshots/[^/]+/(\d{8}T\d{6}Z)-[0-9a-f]{32})/[a-z]+"),
    lambda keys: {*Snapshot.objects.filter(key__in=keys, forgotten_at__isnull=True).values_list("key", flat=True)},
)
OUTPUT_OBJECTS = ObjectCategory(
    "outputs/",
    re.compile(r"(outputs/(\d{8}T\d{6}Z)-[0-9a-f]{32})"),
    lambda keys: {*OutputObject.objects.filter(key__in=keys).values_list("key", flat=True)},
)
OBJECT_CATEGORIES = (DATA_OBJECTS, SNAPSHOT_OBJECTS, OUTPUT_OBJECTS)
LEASE_STORE_PATTERN = re.compile(r"stores/[^/]+/[0-9a-f]{32}/.+")  # artifacts
UPLOAD_PATTERNS = (*(category.key_pattern for category in OBJECT_CATEGORIES), LEASE_STORE_PATTERN)


def find_orphans(category: ObjectCategory, before: datetime) -> Iterator[str]:
    """Yield the keys of a category's objects older than `before` that have neither a row nor a claim.

    Keys of another format are ignored."""
    return chain.from_iterable(_list_orphans(category, before))


def _list_orphans(category: ObjectCategory, before: datetime) -> Iterator[list[str]]:
    """Like `find_orphans`, with the keys of one page of the listing at a time."""
    listed = get_store().list(category.prefix)
    while keys := [*islice(listed, KEY_BATCH_SIZE)]:
        note_progress()
        candidates = {
            key: match
            for key in keys
            if (match := category.key_pattern.fullmatch(key)) and parse_key_timestamp(match[2]) < before
        }
        # Read in this order, so that a row committed meanwhile is seen: the transaction that inserts a row ends the claim.
        claimed = uploads.find_claimed(candidates)
        recorded = category.find_recorded({match[1] for match in candidates.values()})
        yield [key for key, match in candidates.items() if key not in claimed and match[1] not in recorded]


def _remove_orphans(category: ObjectCategory, before: datetime) -> int:
    removed = 0
    for keys in _list_orphans(category, before):
        get_store().remove_many(keys)
        removed += len(keys)
    return removed


def _find_kept_uploads(keys: Collection[str]) -> set[str]:
    """Return the keys whose unfinished upload is in progress or not of this installation.

    Mounted files are among the latter: s3fs uploads them, in any time."""
    own = {key for key in keys if any(pattern.fullmatch(key) for pattern in UPLOAD_PATTERNS)}
    return {*keys} - own | uploads.find_claimed(own)


def _remove_local_copies(before: datetime) -> int:
    """Remove local copies of snapshots that were never recorded or are forgotten, and incomplete ones that a crash has left.

    Return the number removed. An incomplete copy beside a recorded snapshot is removed once its last write is older than
    `before`: a restore may be writing a younger one."""
    removed = 0
    for holder in _list_directory(settings.STATE_DIR / "snapshots"):
        for copy in _list_directory(holder):
            key = f"snapshots/{holder.name}/{copy.name}"
            match = SNAPSHOT_OBJECTS.key_pattern.fullmatch(f"{key}/workspace")
            if match and parse_key_timestamp(match[2]) < before and not _is_needed(key):
                shutil.rmtree(copy, ignore_errors=True)
                removed += 1
            else:
                removed += _remove_incomplete_copies(copy, before)
        with suppress(OSError):  # not empty
            holder.rmdir()
    return removed


def _is_needed(key: str) -> bool:
    """Return whether a snapshot is being stored or recorded. The claim is read first, as for objects."""
    return bool(uploads.find_claimed([f"{key}/workspace"]) or SNAPSHOT_OBJECTS.find_recorded({key}))


def _remove_incomplete_copies(copy: Path, before: datetime) -> int:
    removed = 0
    for path in _list_directory(copy):
        with suppress(FileNotFoundError):  # completed or removed by its writer
            if path.name.startswith(TEMPORARY_PREFIX) and path.lstat().st_mtime < before.timestamp():
                path.unlink()
                removed += 1
    return removed


def _list_directory(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
