"""Rows behind the names of sandboxes at their engines."""

from uuid import UUID

from django.db.models import Q

from sandboxes.lifecycle import COLD, DESTROYED
from sandboxes.models import Sandbox
from sandboxes.models.names import parse_name


def filter_host(host_id: UUID) -> Q:
    """Return the condition that a row is on a host. A row without a host may be on any."""
    return Q(host=host_id) | Q(host__isnull=True)


def has_row(name: str, host_id: UUID) -> bool:
    """Return whether a row of this host names a sandbox at its engine.

    The row of a cold or destroyed sandbox, or of another incarnation, does not: such a sandbox should not exist any more."""
    parts = parse_name(name)
    if parts is None:
        return False
    rows = Sandbox.objects.filter(filter_host(host_id), pk=parts.pk, ref=name)
    return rows.exclude(state__in=(COLD, DESTROYED)).exists()
