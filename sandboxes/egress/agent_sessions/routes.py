"""Rows that state which gateway holds the connection of an agent.

The number of a connection is a fence: a gateway whose number is not the row's any more closes its connection, and a client asks
for the number that it has read."""

import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import transaction
from django.db.models import F

from sandboxes.egress.gateway_tokens import AgentIdentity
from sandboxes.models import ALIVE_STATES, IN_FLIGHT_STATES, AgentRoute

SEEN_INTERVAL = timedelta(seconds=30)


class OpenConnection(NamedTuple):
    """Connection that this gateway holds."""

    number: int
    session_sha256: str


def record(agent: AgentIdentity, address: str, *, now: datetime) -> int:
    """Record that the gateway at `address` holds the connection of an agent. Return the number of the connection."""
    values = {"ref": agent.ref, "address": address, "opened_at": now, "seen_at": now, "refused_version": None}
    with transaction.atomic():
        AgentRoute.objects.get_or_create(sandbox_id=agent.sandbox, defaults={**values, "number": 0})
        AgentRoute.objects.filter(sandbox_id=agent.sandbox).update(**values, number=F("number") + 1)
        # The row is locked by the update, so the number is that of this connection.
        return AgentRoute.objects.values_list("number", flat=True).get(sandbox_id=agent.sandbox)


def clear(sandbox: uuid.UUID, number: int, refused_version: int | None = None) -> None:
    """Record the end of a connection, unless a later one has begun. `refused_version` is that of an agent not spoken with."""
    AgentRoute.objects.filter(sandbox_id=sandbox, number=number).update(address="", refused_version=refused_version)


def find_valid(connections: Mapping[uuid.UUID, OpenConnection], address: str, *, now: datetime) -> set[uuid.UUID]:
    """Return the sandboxes whose connection is the current one, with a secret that was not revoked. Update `seen_at`."""
    rows = AgentRoute.objects.filter(
        address=address,
        sandbox__state__in=(*IN_FLIGHT_STATES, *ALIVE_STATES),
        sandbox__gateway_token__incarnation=F("sandbox__incarnation"),
    )
    found = rows.values_list("sandbox", "number", "sandbox__gateway_token__session_sha256", "seen_at")
    valid = [(pk, seen_at) for pk, *connection, seen_at in found if connections.get(pk) == (*connection,)]
    if due := [pk for pk, seen_at in valid if seen_at <= now - SEEN_INTERVAL]:
        AgentRoute.objects.filter(sandbox__in=due, address=address).update(seen_at=now)
    return {pk for pk, _ in valid}
