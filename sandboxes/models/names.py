"""Names of sandboxes at their engines: `leasehold-<id of the row>-<incarnation>`, and `-<random>` from the second incarnation.

A row id is random, so the name of a first incarnation does not recur. The numbers of the next ones do: a database that lost its
last changes, or was restored, counts them again, while the sandbox that had the number before may still exist."""

import re
from secrets import token_hex
from typing import NamedTuple
from uuid import UUID

NAME_PATTERN = re.compile(r"leasehold-(?P<pk>[0-9a-f]{32})-(?P<incarnation>[1-9][0-9]{0,8})(?:-[0-9a-f]{8})?")


class SandboxName(NamedTuple):
    """Row and incarnation that a name at an engine states."""

    pk: UUID
    incarnation: int


def build_name(pk: UUID, incarnation: int) -> str:
    """Return a name for a new incarnation, at most 61 characters. Each call for a second or later incarnation gives another."""
    name = f"leasehold-{pk.hex}-{incarnation}"
    return name if incarnation == 1 else f"{name}-{token_hex(4)}"


def parse_name(name: str) -> SandboxName | None:
    """Return the parts of a name that `build_name` has built; None for any other name."""
    match = NAME_PATTERN.fullmatch(name)
    return SandboxName(UUID(match["pk"]), int(match["incarnation"])) if match else None
