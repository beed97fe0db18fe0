"""Rows behind the names of sandboxes at their engines, `leasehold-<id of the row>-<incarnation>`."""

import re
from typing import NamedTuple
from uuid import UUID

from django.db.models import Q

from sandboxes.lifecycle import COLD, DESTROYED
from sandboxes.models import Sandbox

NAME_PATTERN = re.compile(r"leasehold-(?P<pk>[0-9a-f]{32})-(?P<incarnation>[1-9][0-9]{0,8})")


class SandboxName(NamedTuple):
    """Row and incarnation that a name at an engine states."""

    pk: UUID
    incarnation: int


def parse_name(name: str) -> SandboxName | None:
    """Return the parts of a name that `Sandbox.name` has built; None for any other name."""
    match = NAME_PATTERN.fullmatch(name)
    return SandboxName(UUID(match["pk"]), int(match["incarnation"])) if match else None


def filter_host(host_id: UUID) -> Q:
    """Return the condition that a row is on a host. A row without a host may be on any."""
    return Q(host=host_id) | Q(host__isnull=True)


def has_row(name: str, host_id: UUID) -> bool:
    """Return whether a row of this host names a sandbox at its engine.

    The row of a cold or destroyed sandbox, or of another incarnation, does not: such a sandbox should not exist any more."""
    parts = parse_name(name)
    if parts is None:
        return False
    rows = Sandbox.objects.filter(filter_host(host_id), pk=parts.pk, incarnation=parts.incarnation)
    return rows.exclude(state__in=(COLD, DESTROYED)).exists()
