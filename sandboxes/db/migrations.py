"""Check for migrations of this code that the database lacks."""

import fcntl
import os
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

MIGRATIONS_MISSING = "Migrations are not applied: run manage.py migrate."
MIGRATIONS_IN_PROGRESS = "Migrations are being applied by another process. Try again when manage.py migrate has ended."
LOCK_FILE = "migrate.lock"  # in the state directory; the kernel releases the lock of a process that dies

_lock_descriptors: list[int] = []

_migrations_applied: list[bool] = []


def find_unapplied_migrations() -> list[str]:
    """Return the names of unapplied migrations. Once all are applied, this process does not query again."""
    if not _migrations_applied:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        if plan:
            return [str(migration) for migration, _ in plan]
        _migrations_applied.append(True)
    return []


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
