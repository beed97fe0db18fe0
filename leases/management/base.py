"""Error reporting and option parsing shared by the management commands."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from getpass import getpass
from uuid import UUID

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError
from django.db import Error as DatabaseError

from leases.errors import InvalidRequest
from leases.models import DID_DESCRIPTION, ENVIRONMENT_ID_DESCRIPTION, ENVIRONMENT_ID_PATTERN, Lease, validate_did
from sandboxes.db import durations
from sandboxes.errors import SandboxError
from sandboxes.providers.errors import ProviderError

EXIT_INTERRUPTED = 130
MAX_SECRET_CHARS = 4000


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
    except Lease.DoesNotExist:
        raise CommandError("There is no such lease.") from None
    except DatabaseError as error:
        raise CommandError(f"The database does not respond: {first_line(error)}") from error
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        root.setLevel(level)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def read_secret() -> str:
    """Read a secret from stdin, without echo on a terminal. Raise CommandError if there is none."""
    text = getpass("Secret: ") if sys.stdin.isatty() else sys.stdin.read(MAX_SECRET_CHARS)
    secret = text.strip()
    if not secret:
        raise CommandError("No secret on stdin.")
    return secret


def parse_lease_id(text: str) -> UUID:
    """Parse a lease id. Raise CommandError if it is not a UUID."""
    try:
        return UUID(text)
    except ValueError:
        raise CommandError(f"{text[:80]!r} is not a lease id.") from None


def parse_did(text: str) -> str:
    """Return a valid DID unchanged. Raise InvalidRequest otherwise."""
    try:
        validate_did(text)
    except ValidationError:
        raise InvalidRequest("agent", f"{text[:80]!r} is not {DID_DESCRIPTION}.") from None
    return text


def parse_environment_id(text: str) -> str:
    """Return a valid environment id unchanged. Raise InvalidRequest otherwise."""
    if not re.fullmatch(ENVIRONMENT_ID_PATTERN, text, re.ASCII):
        raise InvalidRequest("environment", f"{text[:80]!r} is not {ENVIRONMENT_ID_DESCRIPTION}.")
    return text


def parse_duration(option: str, text: str) -> timedelta:
    """Parse a duration such as "90" or "5m". Raise CommandError naming the option."""
    try:
        return durations.parse_duration(text)
    except ValueError as error:
        raise CommandError(f"{option}: {error}") from None
