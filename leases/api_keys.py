"""API keys: issue, look up, rotate, revoke. A key is `lh_<prefix>_<secret>` with 256 random bits, so SHA-256 needs no salt."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

import structlog
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Case, F, Q, When

from leases import allow_lists
from leases.errors import Conflict, InvalidRequest, KeyExpired, RateLimited
from leases.models import DID_DESCRIPTION, AgentKey, KeyScope, Lease, default_key_scopes, validate_did
from leases.patterns import require_fits
from leases.projects import registry
from leases.resource_limits import check_limits
from sandboxes import audit
from sandboxes.db import dialect, sql
from sandboxes.db.clock import format_timestamp

log = structlog.get_logger(__name__)

AUDITED_COLUMNS = ("dids", "operator", "scopes", "allowed_environment_types", "allowed_pools", "expires_at", "project")
KEY_PATTERN = r"lh_([0-9a-f]{8})_[A-Za-z0-9_-]{43}"
ACTIVE_KEY_SQL = "leases_agentkey.prefix = %s AND leases_agentkey.revoked_at IS NULL"
ROTATION_OVERLAP = timedelta(hours=24)
SECONDS_PER_MINUTE = 60
LAST_USED_WRITE_INTERVAL = timedelta(minutes=1)  # saves most requests a second write


def issue_key(
    dids: Sequence[str],
    *,
    operator: bool = False,
    name: str = "",
    scopes: Sequence[str] | None = None,
    environment_types: Sequence[str] = (),
    pools: Sequence[str] = (),
    limits: Mapping[str, Any] | None = None,
    expires_at: datetime | None = None,
    project: str = "",
    now: datetime,
    actor: audit.Actor = audit.CONTROL_PLANE,
) -> tuple[AgentKey, str]:
    """Create a key and return its row and its plain text, which is not stored. Agents that are not known yet are created.

    `scopes` are of KeyScope, None for those that permit everything. `environment_types` and `pools` are the key's allow lists
    (leases.allow_lists), and `limits` columns of ResourceLimits. Raise InvalidRequest for a malformed DID, an unknown scope,
    environment type, pool or project, an agent of another project, an invalid limit, an expiry in the past, or if the key could
    act for no agent."""
    if not dids and not operator:
        raise InvalidRequest("agent", "A key needs at least one agent, or must be an operator key.")
    if scopes is None:
        scopes = default_key_scopes()
    if not scopes or any(scope not in KeyScope.values for scope in scopes):
        raise InvalidRequest("scopes", f"A key needs at least one scope of {', '.join(KeyScope.values)}.")
    if expires_at and expires_at <= now:
        raise InvalidRequest("expires_at", "The expiry must be in the future.")
    allow_lists.require_known("environment_types", environment_types)
    allow_lists.require_known("pools", pools)
    check_limits(AgentKey(), limits or {})
    for did in dids:
        try:
            validate_did(did)
        except ValidationError:
            raise InvalidRequest("agent", f"{did[:80]!r} is not {DID_DESCRIPTION}.") from None
        if len(did) > 255:
            raise InvalidRequest("agent", f"A DID is at most 255 characters: {did[:80]}…")
    require_fits(AgentKey, name=name)
    tenant = registry.find(project)
    with transaction.atomic():
        registry.register_agents(tenant.pk, dids, field="agent", now=now)
        prefix = secrets.token_hex(4)
        key = _generate_key(prefix)
        row = AgentKey.objects.create(
            prefix=prefix,
            digest=hash_key(key),
            first_digest=hash_key(key),
            name=name,
            dids=list(dict.fromkeys(dids)),
            operator=operator,
            project=tenant,
            scopes=list(dict.fromkeys(scopes)),
            allowed_environment_types=list(dict.fromkeys(environment_types)),
            allowed_pools=list(dict.fromkeys(pools)),
            expires_at=expires_at,
            created_at=now,
            **(limits or {}),
        )
        audit.record(row, "Create API key", audit.describe_values(row, AUDITED_COLUMNS), actor=actor, now=now)
    return row, key


def _generate_key(prefix: str) -> str:
    return f"lh_{prefix}_{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def find_active_key(key: str, *, now: datetime) -> AgentKey | None:
    """Return the row of a key, or None if it is unknown or revoked. Raise KeyExpired for a key that was valid.

    One query by the prefix, which both secrets of a rotated key share. Not cached, so a revocation takes effect at once."""
    match = re.fullmatch(KEY_PATTERN, key, re.ASCII)
    return _check_key(sql.find_first(AgentKey, ACTIVE_KEY_SQL, match[1]), key, now) if match else None


def find_active_key_and_lease(key: str, lease_id: UUID, *, now: datetime) -> tuple[AgentKey | None, Lease | None]:
    """Like find_active_key, and read a lease in the same query. The caller checks whether the key may act for its agent."""
    match = re.fullmatch(KEY_PATTERN, key, re.ASCII)
    if match is None:
        return None, None
    row, (lease,), _ = sql.find_joined(AgentKey, [(Lease, "leases_lease.id = %s")], [], ACTIVE_KEY_SQL, lease_id, match[1])
    return _check_key(row, key, now), lease


def find_by_prefix(text: str) -> AgentKey | None:
    """Return the row of a key by its prefix, or by a text that begins with the prefix as the console shows it."""
    return AgentKey.objects.filter(prefix=text.removeprefix("lh_").split("_")[0]).first()


def format_actor(key: AgentKey) -> audit.Actor:
    """Return a key as the actor of events and of operator actions."""
    return audit.Actor(f"key {key.prefix}", audit.ActorKind.KEY)


def _check_key(row: AgentKey | None, key: str, now: datetime) -> AgentKey | None:
    if row is None or not _matches_secret(row, hash_key(key), now):
        return None
    if is_expired(row, now):
        raise KeyExpired(f"The API key expired at {_format_second(row.expires_at)}.")
    if row.last_used_at is None or row.last_used_at < now - LAST_USED_WRITE_INTERVAL:
        AgentKey.objects.filter(pk=row.pk).update(last_used_at=now)
    return row


def _matches_secret(row: AgentKey, digest: str, now: datetime) -> bool:
    """Return whether the digest is that of a secret of the key. Raise KeyExpired for the previous one after its overlap."""
    if hmac.compare_digest(digest, row.digest):
        return True
    if not hmac.compare_digest(digest, row.previous_digest) or row.previous_valid_until is None:
        return False
    if row.previous_valid_until <= now:
        until = _format_second(row.previous_valid_until)
        raise KeyExpired(f"This secret of the API key was replaced and expired at {until}. Use the new one.")
    return True


def is_expired(row: AgentKey, now: datetime) -> bool:
    """Return whether the key itself has expired, with any secret."""
    return row.expires_at is not None and row.expires_at <= now


def _format_second(moment: datetime | None) -> str:
    return format_timestamp(moment.replace(microsecond=0)) if moment else ""


def rotate_key(
    pk: int, *, overlap: timedelta = ROTATION_OVERLAP, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE
) -> str:
    """Give a key a new secret and return its new plain text. The previous secret is accepted for `overlap`.

    Raise Conflict for a revoked or expired key, and if a secret before the previous one would end early: a second rotation
    within the overlap is refused, unless its own `overlap` is zero and ends all earlier secrets at once."""
    row = AgentKey.objects.get(pk=pk)
    key = _generate_key(row.prefix)
    current = Q(pk=pk, digest=row.digest, revoked_at__isnull=True) & (Q(expires_at__isnull=True) | Q(expires_at__gt=now))
    if overlap:
        current &= Q(previous_valid_until__isnull=True) | Q(previous_valid_until__lte=now)
    with transaction.atomic():
        rotated = AgentKey.objects.filter(current).update(
            digest=hash_key(key), previous_digest=F("digest"), previous_valid_until=now + overlap, rotated_at=now,
            first_digest=Case(When(first_digest="", then=F("digest")), default=F("first_digest")),
        )  # fmt: skip
        if rotated:
            audit.record(row, "Rotate API key", f"overlap {audit.format_value(overlap)}", actor=actor, now=now)
    if not rotated:
        row.refresh_from_db()
        raise Conflict(_explain_refused_rotation(row, now))
    log.info("API key rotated", key=row.prefix, actor=actor, overlap=str(overlap))
    return key


def _explain_refused_rotation(row: AgentKey, now: datetime) -> str:
    if row.revoked_at:
        return "The API key is revoked."
    if is_expired(row, now):
        return f"The API key expired at {_format_second(row.expires_at)}."
    until = _format_second(row.previous_valid_until)
    return (
        f"The API key was rotated, and its previous secret is accepted until {until}. An overlap of 0 ends earlier secrets now."
    )


@cache
def _build_take_token() -> str:
    """Return the UPDATE that takes a token. A request that is overtaken by a later one refills nothing."""
    refilled = f"tokens + {dialect.seconds_between('tokens_at', '%s')} * %s"
    level = (
        "CASE WHEN tokens_at IS NULL THEN %s WHEN tokens_at > %s THEN tokens "
        f"ELSE {dialect.least(refilled, '%s')} END"
    )  # fmt: skip
    return (
        f"UPDATE leases_agentkey SET tokens = {level} - 1, tokens_at = CASE WHEN tokens_at > %s THEN tokens_at ELSE %s END "  # noqa: S608 - no user input
        f"WHERE id = %s AND {level} >= 1"
    )


def revoke_key(row: AgentKey, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Revoke a key. Return False if it was revoked before."""
    with transaction.atomic():
        revoked = bool(AgentKey.objects.filter(pk=row.pk, revoked_at__isnull=True).update(revoked_at=now))
        if revoked:
            audit.record(row, "Revoke API key", actor=actor, now=now)
    return revoked


def consume_rate_limit_token(key: AgentKey, *, per_minute: int, now: datetime) -> None:
    """Take one token from the key's bucket of new leases. Raise RateLimited with `retry_after` in seconds if it is empty.

    The bucket holds `per_minute` tokens and refills continuously; 0 disables the limit. One UPDATE refills the bucket up to
    now and takes the token, so that concurrent requests neither overdraw the bucket nor refill it twice."""
    if not per_minute:
        return
    full = float(per_minute)
    level_values = (full, now, now, full / SECONDS_PER_MINUTE, full)
    if not sql.execute(_build_take_token(), *level_values, now, now, key.pk, *level_values):
        error = RateLimited(f"Rate limit of this key exceeded: {per_minute} new leases per minute.")
        error.retry_after = max(1, round(60 / per_minute))
        raise error
