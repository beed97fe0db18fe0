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
from sandboxes.db.clock import ticking
from sandboxes.errors import DataFull
from sandboxes.models import DataObject, Snapshot
from sandboxes.models.state import AgentData, Keeping, moment_of
from sandboxes.providers.base import Missing, ProviderError
from sandboxes.state import data_modes, data_sync, mounts
from sandboxes.storage import store
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import BUDGET, Swept

log = structlog.get_logger(__name__)
ROWS = 500  # keys looked up at once
GRACE = timedelta(hours=1)  # an object this young may belong to somebody who is about to write its row


def persist(*, now: datetime, limit: int = 100) -> Swept:
    """Store what could not be stored when it was changed, the longest waiting first."""
    swept, later = Swept(), ticking(now)
    for here in data_sync.unsaved()[:limit]:
        if later() > now + BUDGET:
            break
        try:
            data_sync.persist(here, here.sandbox, providers.get(here.sandbox.provider), now=later())
        except Missing:
            swept.note("gone")  # reconcile decides what that means
        except (StoreError, ProviderError, DataFull) as failed:
            data_sync.mark_unsaved(here, failed, now=later())
            swept.failures.append(f"{here.pk}: {failed}")
        else:
            swept.note("stored")
    return swept


def weigh(*, now: datetime) -> Swept:
    """Look how large mounted data is, in no order: where there is more than one pass gets to, each has its turn."""
    swept, later = Swept(), ticking(now)
    for mine in mounted().order_by("?"):
        if later() > now + BUDGET:
            break
        try:
            swept.note("weighed", data_modes.weigh(mine, now=later()))
        except StoreError as failed:
            swept.failures.append(f"{mine}: {failed}")
    return swept


def mounted() -> QuerySet[AgentData]:
    return AgentData.objects.filter(keeping=Keeping.MOUNT)


def prune(*, now: datetime, grace: timedelta = GRACE) -> Swept:
    """Remove objects that no row points to: of writers that died between the object and its row, and of rows that went.

    Only what is older than `grace` goes, by the moment in its key: a young one's row may be on its way. A listing that
    fails removes nothing of that kind."""
    swept, before = Swept(), now - grace
    for name, act in (
        ("outdated data", lambda: data_sync.drop_outdated(data_sync.outdated())),
        ("orphaned data", lambda: _remove(orphans(DATA, before))),
        ("orphaned snapshots", lambda: _remove(orphans(SNAPSHOTS, before))),
        ("local leftovers", lambda: _remove_local(before)),
        ("unfinished writes", lambda: store().sweep_leftovers(before)),
        ("mounts left behind", lambda: len(mounts.leftovers())),
    ):
        try:
            swept.note(name, act())
        except (StoreError, OSError) as failed:
            log.error("prune failed", of=name, error=str(failed))
            swept.failures.append(f"{name}: {failed}")
    return swept


@dataclass(frozen=True)
class Shelf:
    """Where objects of one sort lie, and which of them rows point to."""

    prefix: str
    shape: re.Pattern[str]  # group 1 is what rows know it by, group 2 its moment
    known: Callable[[set[str]], set[str]]


DATA = Shelf(
    "agents/",
    re.compile(r"(agents/[^/]+/(\d{8}T\d{6}Z)-[0-9a-f]{32}\.tar)"),
    lambda keys: {*DataObject.objects.filter(key__in=keys).values_list("key", flat=True)},
)
SNAPSHOTS = Shelf(
    "snapshots/",
    re.compile(r"(snapshots/[^/]+/(\d{8}T\d{6}Z)-[0-9a-f]{32})/[a-z]+"),
    lambda keys: {*Snapshot.objects.filter(key__in=keys, forgotten_at__isnull=True).values_list("key", flat=True)},
)


SHELVES = (DATA, SNAPSHOTS)


def orphans(shelf: Shelf, before: datetime) -> Iterator[str]:
    """Keys of objects stored before a moment that no row points to. What has another shape is not ours to judge."""
    listed = store().list(shelf.prefix)
    while keys := [*islice(listed, ROWS)]:
        found = {key: match for key in keys if (match := shelf.shape.fullmatch(key)) and moment_of(match[2]) < before}
        # The rows are read after the listing: what they point to is not missed in it.
        known = shelf.known({match[1] for match in found.values()})
        yield from (key for key, match in found.items() if match[1] not in known)


def _remove(keys: Iterable[str]) -> int:
    keys = [*keys]
    store().remove_many(keys)
    return len(keys)


def _remove_local(before: datetime) -> int:
    """Local copies whose snapshot was never recorded, or is forgotten."""
    removed = 0
    for holder in _below(settings.STATE_DIR / "snapshots"):
        for copy in _below(holder):
            key = f"snapshots/{holder.name}/{copy.name}"
            match = SNAPSHOTS.shape.fullmatch(f"{key}/workspace")
            if match and moment_of(match[2]) < before and not SNAPSHOTS.known({key}):
                shutil.rmtree(copy, ignore_errors=True)
                removed += 1
        with suppress(OSError):  # not empty
            holder.rmdir()
    return removed


def _below(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
