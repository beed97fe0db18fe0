"""Error reporting shared by the management commands of all apps."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from django.core.management.base import CommandError
from django.db import Error as DatabaseError

from sandboxes.db import dialect, migrations
from sandboxes.errors import SandboxError
from sandboxes.providers.errors import ProviderError

log = structlog.get_logger(__name__)
EXIT_INTERRUPTED = 130


@contextmanager
def report_errors(verbosity: int) -> Iterator[None]:
    """Turn known errors of the block into CommandError; an interrupt exits with code 130.

    Below verbosity 2 only errors are logged, since stderr carries the output of the command or of its sandbox."""
    root = logging.getLogger()
    level = root.level
    if verbosity < 2:
        root.setLevel(max(level, logging.ERROR))
    try:
        yield
    except (SandboxError, ProviderError) as error:
        raise CommandError(str(error)) from error
    except DatabaseError as error:
        raise build_command_error(error) from error
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        root.setLevel(level)


def build_command_error(error: DatabaseError) -> CommandError:
    """Return the error with which a command ends. A fault of the code or of the schema is logged with its traceback."""
    if not dialect.is_unavailable(error) and not dialect.is_lock_conflict(error) and not find_schema_error():
        log.error("database error", exc_info=error)
    return CommandError(explain_database_error(error))


def explain_database_error(error: DatabaseError) -> str:
    """Return the cause of a database error as one line.

    Migrations in progress, another version's database, or the database's own message."""
    if migrations.is_in_progress():
        return migrations.MIGRATIONS_IN_PROGRESS
    try:
        status = migrations.read_status()
    except DatabaseError:
        status = migrations.SchemaStatus()
    if reason := status.explain_error():
        return reason
    is_unavailable = dialect.is_unavailable(error)
    cause = "does not respond" if is_unavailable else f"reports an error: {type(error).__name__}"
    line = f"The database {cause}: {first_line(error)}"
    newer = "" if is_unavailable else status.explain_newer()
    return f"{line}. {newer}" if newer else line


def find_schema_error() -> str:
    """Return the reason why this version cannot use the database, or "". "" if the database does not respond."""
    try:
        return migrations.read_status().explain_error()
    except DatabaseError:
        return ""


def require_migrated() -> None:
    """Raise CommandError if this version cannot use the database, and DatabaseError if it does not respond.

    A database of the next version is only logged: this version serves on it until it is replaced."""
    status = migrations.read_status()
    if reason := status.explain_error():
        raise CommandError(migrations.MIGRATIONS_IN_PROGRESS if migrations.is_in_progress() else reason)
    if newer := status.explain_newer():
        log.warning("database is newer", reason=newer)


def refuse_unmigrated() -> None:
    """Like require_migrated, for processes that start without a database and wait for it."""
    try:
        require_migrated()
    except DatabaseError as error:
        log.warning("migrations not checked", error=first_line(error))


def require_utf8(option: str, text: str) -> str:
    """Return the text. Raise CommandError, naming the option, if it has bytes that are not UTF-8: PostgreSQL stores none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CommandError(f"{option}: must be UTF-8.") from None
    return text


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
