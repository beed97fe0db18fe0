"""API keys: issue, look up, revoke. A key is `lh_<prefix>_<secret>` with 256 random bits, so SHA-256 needs no salt."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.core.exceptions import ValidationError
from django.db.models import F, FloatField, Q, Value
from django.db.models.functions import Least

from leases import allow_lists
from leases.errors import InvalidRequest, RateLimited
from leases.models import DID_DESCRIPTION, Agent, AgentKey, validate_did
from sandboxes.db import sql

LAST_USED_WRITE_INTERVAL = timedelta(minutes=1)  # saves most requests a second write


def issue_key(
    dids: Sequence[str],
    *,
    operator: bool = False,
    name: str = "",
    environment_types: Sequence[str] = (),
    pools: Sequence[str] = (),
    now: datetime,
) -> tuple[AgentKey, str]:
    """Create a key and return its row and its plain text, which is not stored. Missing agents are created.

    `environment_types` and `pools` are its allow lists (leases.allow_lists). Raise InvalidRequest for a malformed DID, for an
    unknown environment type or pool, or if the key could act for no agent."""
    if not dids and not operator:
        raise InvalidRequest("agent", "A key needs at least one agent, or must be an operator key.")
    allow_lists.require_known("environment_types", environment_types)
    allow_lists.require_known("pools", pools)
    for did in dids:
        try:
            validate_did(did)
        except ValidationError:
            raise InvalidRequest("agent", f"{did[:80]!r} is not {DID_DESCRIPTION}.") from None
        if len(did) > 255:
            raise InvalidRequest("agent", f"A DID is at most 255 characters: {did[:80]}…")
        Agent.objects.get_or_create(did=did)
    prefix = secrets.token_hex(4)
    key = f"lh_{prefix}_{secrets.token_urlsafe(32)}"
    row = AgentKey.objects.create(
        prefix=prefix,
        digest=hash_key(key),
        name=name,
        dids=list(dict.fromkeys(dids)),
        operator=operator,
        allowed_environment_types=list(dict.fromkeys(environment_types)),
        allowed_pools=list(dict.fromkeys(pools)),
        created_at=now,
    )
    return row, key


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def find_active_key(key: str, *, now: datetime) -> AgentKey | None:
    """Return the row of a key, or None if it is unknown or revoked. Not cached, so a revocation takes effect at once."""
    if not re.fullmatch(r"lh_[0-9a-f]{8}_[A-Za-z0-9_-]{43}", key, re.ASCII):
        return None
    row = sql.find_first(AgentKey, "digest = %s AND revoked_at IS NULL", hash_key(key))
    if row and (row.last_used_at is None or row.last_used_at < now - LAST_USED_WRITE_INTERVAL):
        AgentKey.objects.filter(pk=row.pk).update(last_used_at=now)
    return row


def revoke_key(pk: int, *, now: datetime) -> bool:
    """Revoke a key. Return False if it was revoked before."""
    return bool(AgentKey.objects.filter(pk=pk, revoked_at__isnull=True).update(revoked_at=now))


def consume_rate_limit_token(key: AgentKey, *, per_minute: int, now: datetime) -> None:
    """Take one token from the key's bucket of new leases. Raise RateLimited with `retry_after` in seconds if it is empty.

    The bucket holds `per_minute` tokens and refills continuously; 0 disables the limit. Guarded UPDATEs keep concurrent
    requests from overdrawing it."""
    if not per_minute:
        return
    bucket = AgentKey.objects.filter(pk=key.pk)
    full_refill_due = Q(tokens_at__isnull=True) | Q(tokens_at__lt=now - timedelta(minutes=1))
    if not bucket.filter(full_refill_due).update(tokens=float(per_minute), tokens_at=now):
        gained = (now - (key.tokens_at or now)).total_seconds() * per_minute / 60
        if gained >= 1:  # the guard on tokens_at lets one of several concurrent requests refill
            full = Value(float(per_minute), output_field=FloatField())
            bucket.filter(tokens_at=key.tokens_at).update(tokens=Least(F("tokens") + gained, full), tokens_at=now)
    if not bucket.filter(tokens__gte=1).update(tokens=F("tokens") - 1):
        error = RateLimited(f"Rate limit of this key exceeded: {per_minute} new leases per minute.")
        error.retry_after = max(1, round(60 / per_minute))
        raise error
