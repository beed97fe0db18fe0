"""Revocation of an API key together with its leases: those that were granted to requests of the key.

A lease belongs to the key that acquired or forked the lease, joined with it or executed a one-shot run, also if other keys have
used the lease since then. A lease of the same agents that another key acquired goes on, and so do the processes that this key
has started there."""

from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from leases import api_keys, leasing
from leases.models import AgentKey, Lease, LeaseStatus
from sandboxes import audit


@dataclass(frozen=True)
class Revocation:
    """Changes that this call has made."""

    revoked: bool
    ended_leases: int = 0


def find_leases(key: AgentKey) -> QuerySet[Lease]:
    """Return the active leases that were granted to requests of a key. A rotated key keeps its leases."""
    granted = Lease.objects.filter(events__kind="granted", events__actor=api_keys.format_actor(key))
    return granted.filter(status=LeaseStatus.ACTIVE).order_by("pk")


def revoke(
    key: AgentKey, *, end_leases: bool, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE, reason: str = ""
) -> Revocation:
    """Revoke a key and, if requested, end its leases. The next sweep stores their last state and destroys their sandboxes.

    A request that was authenticated before may still be granted a lease, so a call for a revoked key ends leases as well."""
    revoked = api_keys.revoke_key(key, now=now, actor=actor)
    if not end_leases:
        return Revocation(revoked)
    detail = f"API key {key.prefix} revoked: {reason}" if reason else f"API key {key.prefix} revoked"
    ended = sum(leasing.end(lease.pk, reason="operator", now=now, actor=actor, detail=detail) for lease in find_leases(key))
    return Revocation(revoked, ended)
