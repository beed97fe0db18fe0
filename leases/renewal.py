"""Renewal of leases in one SQL statement: of one lease with the check of its API key, or of a batch.

The statements repeat the guards of `leasing.renew`, and compute the new end as `leasing.compute_expires_at` does. They do not
return why a lease was not renewed: further queries find the reason."""

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

KEY_REGEX = re.compile(api_keys.KEY_PATTERN, re.ASCII)


@dataclass(frozen=True)
class Renewal:
    """Outcome for one lease of a batch."""

    expires_at: datetime | None = None  # None: not renewed
    end_reason: str = ""  # of a lease that has ended
    found: bool = True


def renew_with_key(pk: UUID, key: str, *, now: datetime) -> datetime | None:
    """Renew a lease in one statement, if this API key may do so now. Return the new end, or None if nothing was renewed.

    Causes of None: the key is invalid, lacks the scope, or its `last_used_at` has to be written; the lease is another agent's,
    has ended, or was renewed with a later time. The caller then authenticates the key and renews step by step.

    Plan: a nested loop over two unique indexes, leases_agentkey.prefix and the primary key of leases_lease. The only changed
    column with an index is `expires_minute`, which changes once a minute: all other updates are heap-only (HOT). Digests are
    not compared in constant time: a digest is the hash of a random key, and a known digest gives no access."""
    match = KEY_REGEX.fullmatch(key)
    if match is None:
        return None
    rows = sql.fetch_named(
        _build_renew_with_key(),
        now=now, pk=pk, prefix=match[1], digest=api_keys.hash_key(key), used_since=now - api_keys.LAST_USED_WRITE_INTERVAL,
    )  # fmt: skip
    return dialect.to_datetime(rows[0][0]) if rows else None


def renew_many(pks: Sequence[UUID], agents: Collection[str] | None, *, now: datetime) -> dict[UUID, Renewal]:
    """Renew the active leases among `pks` in one statement. Return the outcome of each.

    `agents` are the DIDs for which the caller may act; None means all. A lease of another agent counts as not found.

    Plan: the inner SELECT locks the rows in the order of the primary key, so that two batches with the same leases wait for
    each other instead of deadlocking. The UPDATE joins the locked rows by the primary key."""
    condition, values = dialect.in_list("id", "%(pks)s"), {"pks": dialect.adapt_list(pks)}
    if agents is not None:
        condition += f" AND {dialect.in_list('agent_did', '%(agents)s')}"
        values["agents"] = dialect.adapt_list(agents)
    ids = dialect.lock_in_order("leases_lease", condition)
    rows = sql.fetch_named(
        f"UPDATE leases_lease SET {_build_assignments()} WHERE id IN ({ids}) AND {_build_guards()} RETURNING id, expires_at",  # noqa: S608 - no user input
        now=now, **values,
    )  # fmt: skip
    outcomes = {dialect.to_uuid(pk): Renewal(dialect.to_datetime(expires_at)) for pk, expires_at in rows}
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
        # An active lease that the statement did not change: another process has renewed it with a later time.
        outcomes[lease.pk] = Renewal(end_reason=reason) if reason else Renewal(lease.expires_at)
    return outcomes


@cache
def _build_renew_with_key() -> str:
    may_act = f"(key.operator OR {dialect.list_contains('key.dids', 'leases_lease.agent_did')})"
    scope = dialect.list_contains("key.scopes", f"'{KeyScope.LEASES.value}'")
    return (
        f"UPDATE leases_lease SET {_build_assignments()} FROM leases_agentkey AS key "  # noqa: S608 - no user input
        f"WHERE leases_lease.id = %(pk)s AND {_build_guards()} "
        "AND key.prefix = %(prefix)s AND key.revoked_at IS NULL "
        "AND (key.digest = %(digest)s OR (key.previous_digest = %(digest)s AND key.previous_valid_until > %(now)s)) "
        "AND (key.expires_at IS NULL OR key.expires_at > %(now)s) AND key.last_used_at >= %(used_since)s "
        f"AND {may_act} AND {scope} RETURNING leases_lease.expires_at"
    )


def _build_new_end() -> str:
    """Return the new `expires_at`."""
    return dialect.least(dialect.add_duration("%(now)s", "leases_lease.ttl"), "leases_lease.max_expires_at")


def _build_assignments() -> str:
    new_end = _build_new_end()
    return f"expires_at = {new_end}, expires_minute = {dialect.epoch_minute(new_end)}, last_activity_at = %(now)s"


def _build_guards() -> str:
    return (
        "leases_lease.status = 'active' AND leases_lease.expires_at > %(now)s AND leases_lease.last_activity_at <= %(now)s "
        f"AND leases_lease.expires_at <= {_build_new_end()}"
    )
