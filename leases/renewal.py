"""Renewals by an API key in one statement, of one lease or of many.

The statements repeat the guards of `leasing.renew`, and compute the new end as `leasing.compute_expires_at` does. A lease that
a statement leaves unchanged was refused for a reason that only another query can tell; the caller asks for it."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from uuid import UUID

from django.db.models import QuerySet

from leases import api_keys, leasing
from leases.models import KeyScope, Lease
from sandboxes.db import dialect, sql


@dataclass(frozen=True)
class Renewal:
    """Outcome of one lease of a batch. An end reason, or a lease that is not found, means that it was not renewed."""

    expires_at: datetime | None = None
    end_reason: str = ""
    found: bool = True


def renew_with_key(pk: UUID, key: str, *, now: datetime) -> datetime | None:
    """Renew a lease, if this API key may do so now, in one statement. Return the new end, or None if nothing was renewed.

    None has many causes: an unknown, expired or rotated key, one whose `last_used_at` is due, another agent's lease, an ended
    lease, a later renewal by another process. The caller then authenticates the key and renews step by step.

    Plan: a nested loop over two unique indexes, leases_agentkey.prefix and the primary key of leases_lease. No index holds a
    changed column, except expires_minute once a minute, so that PostgreSQL updates the row in its page (HOT). The digests need
    no comparison in constant time: they are hashes of random keys, and a known digest opens nothing."""
    match = re.fullmatch(api_keys.KEY_PATTERN, key, re.ASCII)
    if match is None:
        return None
    digest = api_keys.hash_key(key)
    recently_used = now - api_keys.LAST_USED_WRITE_INTERVAL
    rows = sql.fetch_all(
        _build_renew_with_key(),
        *_terms(now), pk, *_guards(now), match[1], digest, digest, now, now, recently_used,
    )  # fmt: skip
    return sql.to_datetime(rows[0][0]) if rows else None


def renew_many(pks: Sequence[UUID], agents: Collection[str] | None, *, now: datetime) -> dict[UUID, Renewal]:
    """Renew the active leases among `pks`, all in one statement, and return the outcome of each.

    `agents` are the DIDs for which the caller may act; None means all. A lease of another agent counts as not found.

    Plan: the inner SELECT locks the rows in the order of the primary key, so that two batches with the same leases wait for
    each other instead of deadlocking. The UPDATE then joins them by the primary key."""
    condition, values = dialect.in_list("id"), [dialect.adapt_list(pks)]
    if agents is not None:
        condition, values = f"{condition} AND {dialect.in_list('agent_did')}", [*values, dialect.adapt_list(agents)]
    ids = dialect.lock_in_order("leases_lease", condition)
    rows = sql.fetch_all(
        f"UPDATE leases_lease SET {_build_terms()} WHERE id IN ({ids}) AND {_build_guards()} RETURNING id, expires_at",  # noqa: S608 - no user input
        *_terms(now), *values, *_guards(now),
    )  # fmt: skip
    outcomes = {sql.to_uuid(pk): Renewal(sql.to_datetime(expires_at)) for pk, expires_at in rows}
    if refused := [pk for pk in pks if pk not in outcomes]:
        outcomes |= _explain_refusals(refused, agents, now=now)
    return {pk: outcomes[pk] for pk in pks}


def _explain_refusals(pks: Sequence[UUID], agents: Collection[str] | None, *, now: datetime) -> dict[UUID, Renewal]:
    leases: QuerySet[Lease] = Lease.objects.filter(pk__in=pks)
    if agents is not None:
        leases = leases.filter(agent_did__in=agents)
    outcomes = {pk: Renewal(found=False) for pk in pks}
    for lease in leases:
        reason = lease.end_reason or leasing.find_elapsed_clock(lease, now)
        # Neither ended nor renewed: another process has renewed the lease later.
        outcomes[lease.pk] = Renewal(end_reason=reason) if reason else Renewal(lease.expires_at)
    return outcomes


@cache
def _build_renew_with_key() -> str:
    may_act = f"(key.operator OR {dialect.list_contains('key.dids', 'leases_lease.agent_did')})"
    scope = dialect.list_contains("key.scopes", f"'{KeyScope.LEASES.value}'")
    return (
        f"UPDATE leases_lease SET {_build_terms()} FROM leases_agentkey AS key "  # noqa: S608 - no user input
        f"WHERE leases_lease.id = %s AND {_build_guards()} "
        "AND key.prefix = %s AND key.revoked_at IS NULL "
        "AND (key.digest = %s OR (key.previous_digest = %s AND key.previous_valid_until > %s)) "
        "AND (key.expires_at IS NULL OR key.expires_at > %s) AND key.last_used_at >= %s "
        f"AND {may_act} AND {scope} RETURNING leases_lease.expires_at"
    )


def _build_until() -> str:
    return dialect.least(dialect.add_duration("%s", "leases_lease.ttl"), "leases_lease.max_expires_at")


def _build_terms() -> str:
    """New values of a renewed lease. Parameters: `_terms`."""
    until = _build_until()
    return f"expires_at = {until}, expires_minute = {dialect.epoch_minute(until)}, last_activity_at = %s"


def _terms(now: datetime) -> list[datetime]:
    return [now, now, now]


def _build_guards() -> str:
    """Guards of a renewal. Parameters: `_guards`."""
    return (
        "leases_lease.status = 'active' AND leases_lease.expires_at > %s AND leases_lease.last_activity_at <= %s "
        f"AND leases_lease.expires_at <= {_build_until()}"
    )


def _guards(now: datetime) -> list[datetime]:
    return [now, now, now]
