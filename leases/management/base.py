"""Error reporting and option parsing shared by the management commands."""

import os
import re
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from getpass import getpass
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError

from leases.errors import InvalidRequest
from leases.models import DID_DESCRIPTION, ENVIRONMENT_ID_DESCRIPTION, ENVIRONMENT_ID_PATTERN, Lease, require_did
from sandboxes.db import durations
from sandboxes.management import base

MAX_SECRET_CHARS = 4000


@contextmanager
def report_errors(verbosity: int) -> Iterator[None]:
    """Like sandboxes.management.base.report_errors, and also turn an unknown lease into CommandError."""
    with base.report_errors(verbosity):
        try:
            yield
        except Lease.DoesNotExist:
            raise CommandError("There is no such lease.") from None


def add_lease_action(actions: "_SubParsersAction[Any]", name: str, *, help: str, json_lines: bool = True) -> ArgumentParser:
    """Add an action on one lease to a command: argument LEASE_ID, and option --json."""
    parser: ArgumentParser = actions.add_parser(name, help=help)
    parser.add_argument("lease", metavar="LEASE_ID")
    if json_lines:
        parser.add_argument("--json", action="store_true", help="one line of JSON, as the HTTP API answers")
    return parser


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
        require_did(text)
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


def parse_env(words: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE. NAME alone has the value that it has in this process, so that a secret is not an argument.

    Raise CommandError for a name without a value, and for text that is not UTF-8."""
    env = {}
    for word in words:
        name, separator, value = base.require_utf8("--env", word).partition("=")
        if not separator and name not in os.environ:
            raise CommandError(f"--env: {name[:40]} has no value here. State NAME=VALUE.")
        env[name] = value if separator else base.require_utf8("--env", os.environ[name])
    return env
