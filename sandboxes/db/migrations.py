"""Comparison of the migrations of this code with those that the database has."""

import fcntl
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

MIGRATIONS_MISSING = "Migrations are not applied: run manage.py migrate."
DATABASE_NEWER = "The database is newer than this version, which does not know the migration {}. Upgrade, or restore a backup."
HISTORY_DIFFERS = (
    "The migrations of this database are not those of this version or of one before: {}. They cannot be carried over: use the "
    "version that created the database, or start with an empty one (docs/operations.md, Upgrade)."
)
MIGRATIONS_IN_PROGRESS = "Migrations are being applied by another process. Try again when manage.py migrate has ended."
LOCK_FILE = "migrate.lock"  # in the state directory; the kernel releases the lock of a process that dies

_lock_descriptors: list[int] = []

Key = tuple[str, str]  # app, name of a migration
# Migrations of histories that new initial ones replaced (docs/decisions/0011): one of each that no later version has again.
RETIRED: frozenset[Key] = frozenset()

_found_tables: list[bool] = []  # this process has seen the table of the migrations


@dataclass(frozen=True)
class KnownMigrations:
    """Migrations of this code. It does not change while the process lives."""

    parents: dict[Key, frozenset[Key]]
    replaces: dict[Key, frozenset[Key]]  # those with names that were replaced by one migration

    @property
    def apps(self) -> set[str]:
        return {app for app, _ in self.parents}


@dataclass(frozen=True)
class SchemaStatus:
    """Differences between the migrations of this code and those of the database."""

    unapplied: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # applied by a later version
    conflict: str = ""  # the history is another one, with a migration as evidence

    def explain_error(self) -> str:
        """Return the reason why this code cannot serve, or ""."""
        if self.conflict:
            return HISTORY_DIFFERS.format(self.conflict)
        return MIGRATIONS_MISSING if self.unapplied else ""

    def explain_newer(self) -> str:
        """Return the line on a database of a later version, or "". The version before that one serves on it."""
        return DATABASE_NEWER.format(self.unknown[-1]) if self.unknown and not self.explain_error() else ""


def read_status() -> SchemaStatus:
    """Compare the database with this code, by one short query. Raise DatabaseError if the database does not respond."""
    known, applied = load_known(), _read_applied()
    for key, replaced in known.replaces.items():
        if replaced <= applied:
            applied.add(key)
    expected = known.parents.keys() | frozenset().union(*known.replaces.values())
    unknown = sorted(key for key in applied - expected if key[0] in known.apps)
    unapplied = sorted(known.parents.keys() - applied)
    return SchemaStatus(
        tuple(map(".".join, unapplied)), tuple(map(".".join, unknown)), _find_conflict(known, applied, unapplied, unknown)
    )


def _read_applied() -> set[Key]:
    recorder = MigrationRecorder(connection)
    if not _found_tables and recorder.has_table():
        _found_tables.append(True)
    return {*recorder.migration_qs.values_list("app", "name")} if _found_tables else set()


def _find_conflict(known: KnownMigrations, applied: set[Key], unapplied: list[Key], unknown: list[Key]) -> str:
    """Return a migration that no earlier or later version can have applied, or "".

    A later version has all migrations of this one, and its own have higher numbers."""
    for key in sorted(applied & known.parents.keys()):
        if missing := sorted(known.parents[key] - applied):
            return f"{'.'.join(key)} was applied before {'.'.join(missing[0])}"
    last = {app: max(name for known_app, name in known.parents if known_app == app) for app in known.apps}
    for app, name in unknown:
        if name <= last[app] or (app, name) in RETIRED or any(app == behind for behind, _ in unapplied):
            return f"{app}.{name} is not known"
    return ""


@cache
def load_known() -> KnownMigrations:
    """Read the migrations of this code, without the database."""
    graph = MigrationLoader(None).graph
    return KnownMigrations(
        {key: frozenset(parent.key for parent in node.parents) for key, node in graph.node_map.items()},
        {key: frozenset(node.replaces) for key, node in graph.nodes.items() if node.replaces},
    )


def note_begin(**kwargs: Any) -> None:
    """Record that this process applies migrations (signal pre_migrate). Messages of other processes depend on it, and no more.

    Without effect if another process has recorded it, or if the state directory cannot be written to."""
    note_end()
    try:
        descriptor = os.open(_get_lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    _lock_descriptors.append(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        note_end()


def note_end(**kwargs: Any) -> None:
    """Record that this process has applied all migrations (signal post_migrate). Its end records that as well."""
    while _lock_descriptors:
        os.close(_lock_descriptors.pop())


def is_in_progress() -> bool:
    """Return whether another process with this state directory applies migrations. False in the process that does."""
    if _lock_descriptors:
        return False
    try:
        descriptor = os.open(_get_lock_path(), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _get_lock_path() -> Path:
    return Path(settings.STATE_DIR) / LOCK_FILE
