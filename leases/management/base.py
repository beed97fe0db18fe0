"""What commands have in common: one verb, one line, and an exit code that means something."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from uuid import UUID

from django.core.management.base import CommandError
from django.db import Error as DatabaseError

from leases.models import Lease
from sandboxes.db import durations
from sandboxes.errors import SandboxError
from sandboxes.providers.base import ProviderError

EXIT_INTERRUPTED = 130


@contextmanager
def report_errors(verbosity: int) -> Iterator[None]:
    """What goes wrong in this block is one line on stderr and exit code 1. The log is quiet, unless verbosity is above
    1: stderr is for what the command, or its sandbox, has to say."""
    root = logging.getLogger()
    level = root.level
    if verbosity < 2:
        root.setLevel(max(level, logging.ERROR))
    try:
        yield
    except (SandboxError, ProviderError) as failed:
        raise CommandError(str(failed)) from failed
    except Lease.DoesNotExist:
        raise CommandError("There is no such lease.") from None
    except DatabaseError as error:
        raise CommandError(f"The database does not answer: {first_line(error)}") from error
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        root.setLevel(level)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def parse_lease_id(text: str) -> UUID:
    """The id of a lease; CommandError."""
    try:
        return UUID(text)
    except ValueError:
        raise CommandError(f"{text[:80]!r} is not the id of a lease.") from None


def parse_duration(option: str, text: str) -> timedelta:
    """A duration; CommandError naming the option."""
    try:
        return durations.parse_duration(text)
    except ValueError as wrong:
        raise CommandError(f"{option}: {wrong}") from None
