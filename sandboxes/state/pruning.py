"""Sweeps over what is stored: what could not be stored is tried again, what is mounted is weighed, and what nothing points to
is removed."""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models import QuerySet

from sandboxes import providers
from sandboxes.db.clock import clock_from
from sandboxes.errors import DataFull
from sandboxes.models import DataObject, Snapshot
from sandboxes.models.state import AgentData, DataStorageMode, parse_key_timestamp
from sandboxes.providers.base import Missing, ProviderError
from sandboxes.state import data_sync, mounts, storage_mode
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
KEY_BATCH_SIZE = 500  # keys looked up at once
ORPHAN_GRACE = timedelta(hours=1)  # an object this young may belong to somebody who is about to write its row


def persist_unsaved(*, now: datetime, limit: int = 100) -> SweepResult:
    """Store what could not be stored when it was changed, the longest waiting first."""
    swept, later = SweepResult(), clock_from(now)
    for here in data_sync.find_unsaved()[:limit]:
        if later() > now + PASS_TIME_LIMIT:
            break
        try:
            data_sync.persist(here, here.sandbox, providers.get_provider(here.sandbox.provider), now=later())
        except Missing:
            swept.note("gone")  # reconcile decides what that means
        except (StoreError, ProviderError, DataFull) as failed:
            data_sync.mark_unsaved(here, failed, now=later())
            swept.failures.append(f"{here.pk}: {failed}")
        else:
            swept.note("stored")
    return swept


def measure_mounted(*, now: datetime) -> SweepResult:
    """Look how large mounted data is, in no order: where there is more than one pass gets to, each has its turn."""
    swept, later = SweepResult(), clock_from(now)
    for mine in find_mounted().order_by("?"):
        if later() > now + PASS_TIME_LIMIT:
            break
        try:
            swept.note("weighed", storage_mode.measure_mounted_data(mine, now=later()))
        except StoreError as failed:
            swept.failures.append(f"{mine}: {failed}")
    return swept


def find_mounted() -> QuerySet[AgentData]:
    return AgentData.objects.filter(keeping=DataStorageMode.MOUNT)


def remove_orphans(*, now: datetime, grace: timedelta = ORPHAN_GRACE) -> SweepResult:
    """Remove objects that no row points to: of writers that died between the object and its row, and of rows that went.

    Only what is older than `grace` goes, by the moment in its key: a young one's row may be on its way. A listing that
    fails removes nothing of that kind."""
    swept, before = SweepResult(), now - grace
    for name, act in (
        ("outdated data", lambda: data_sync.remove_outdated_objects(data_sync.find_outdated_objects())),
        ("orphaned data", lambda: _remove_objects(find_orphans(DATA_OBJECTS, before))),
        ("orphaned snapshots", lambda: _remove_objects(find_orphans(SNAPSHOT_OBJECTS, before))),
        ("local leftovers", lambda: _remove_local_copies(before)),
        ("unfinished writes", lambda: get_store().sweep_leftovers(before)),
        ("mounts left behind", lambda: len(mounts.clear_leftovers())),
    ):
        try:
            swept.note(name, act())
        except (StoreError, OSError) as failed:
            log.error("prune failed", of=name, error=str(failed))
            swept.failures.append(f"{name}: {failed}")
    return swept


@dataclass(frozen=True)
class ObjectCategory:
    """Where objects of one sort lie, and which of them rows point to."""

    prefix: str
    shape: re.Pattern[str]  # group 1 is what rows know it by, group 2 its moment
    known: Callable[[set[str]], set[str]]


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


OBJECT_CATEGORIES = (DATA_OBJECTS, SNAPSHOT_OBJECTS)


def find_orphans(shelf: ObjectCategory, before: datetime) -> Iterator[str]:
    """Keys of objects stored before a moment that no row points to. What has another shape is not ours to judge."""
    listed = get_store().list(shelf.prefix)
    while keys := [*islice(listed, KEY_BATCH_SIZE)]:
        found = {key: match for key in keys if (match := shelf.shape.fullmatch(key)) and parse_key_timestamp(match[2]) < before}
        # The rows are read after the listing: what they point to is not missed in it.
        known = shelf.known({match[1] for match in found.values()})
        yield from (key for key, match in found.items() if match[1] not in known)


def _remove_objects(keys: Iterable[str]) -> int:
    keys = [*keys]
    get_store().remove_many(keys)
    return len(keys)


def _remove_local_copies(before: datetime) -> int:
    """Local copies whose snapshot was never recorded, or is forgotten."""
    removed = 0
    for holder in _list_directory(settings.STATE_DIR / "snapshots"):
        for copy in _list_directory(holder):
            key = f"snapshots/{holder.name}/{copy.name}"
            match = SNAPSHOT_OBJECTS.shape.fullmatch(f"{key}/workspace")
            if match and parse_key_timestamp(match[2]) < before and not SNAPSHOT_OBJECTS.known({key}):
                shutil.rmtree(copy, ignore_errors=True)
                removed += 1
        with suppress(OSError):  # not empty
            holder.rmdir()
    return removed


def _list_directory(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
