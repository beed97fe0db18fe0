"""Error reporting shared by the management commands of all apps."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from django.core.management.base import CommandError
from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError

from sandboxes.db import migrations
from sandboxes.errors import SandboxError
from sandboxes.providers.errors import ProviderError

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
        raise CommandError(explain_database_error(error)) from error
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        root.setLevel(level)


def explain_database_error(error: DatabaseError) -> str:
    """Return the cause of a database error as one line: migrations in progress or missing, or the database's own message."""
    if migrations.is_in_progress():
        return migrations.MIGRATIONS_IN_PROGRESS
    if lacks_migrations():
        return migrations.MIGRATIONS_MISSING
    is_unavailable = isinstance(error, OperationalError | InterfaceError)
    return f"The database {'does not respond' if is_unavailable else 'reports an error'}: {first_line(error)}"


def lacks_migrations() -> bool:
    """Return whether the database lacks migrations. False if the database does not respond."""
    try:
        return bool(migrations.find_unapplied_migrations())
    except DatabaseError:
        return False


def require_migrated() -> None:
    """Raise CommandError if the database lacks migrations, and DatabaseError if it does not respond."""
    if migrations.find_unapplied_migrations():
        raise CommandError(_describe_unmigrated())


def refuse_unmigrated() -> None:
    """Like require_migrated, for processes that start without a database and wait for it."""
    if lacks_migrations():
        raise CommandError(_describe_unmigrated())


def _describe_unmigrated() -> str:
    return migrations.MIGRATIONS_IN_PROGRESS if migrations.is_in_progress() else migrations.MIGRATIONS_MISSING


def require_utf8(option: str, text: str) -> str:
    """Return the text. Raise CommandError, naming the option, if it has bytes that are not UTF-8: PostgreSQL stores none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CommandError(f"{option}: must be UTF-8.") from None
    return text


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
