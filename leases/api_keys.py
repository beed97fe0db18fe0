"""API keys: issue, look up, revoke. A key is `lh_<prefix>_<secret>` with 256 random bits, so SHA-256 needs no salt."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.core.exceptions import ValidationError
from django.db.models import F, FloatField, Q, Value
from django.db.models.functions import Least

from leases.errors import InvalidRequest, RateLimited
from leases.models import DID_DESCRIPTION, Agent, AgentKey, validate_did
from sandboxes.db import sql

LAST_USED_WRITE_INTERVAL = timedelta(minutes=1)  # last use is written at most this often: a renewal should not write two rows


def issue_key(dids: Sequence[str], *, operator: bool = False, name: str = "", now: datetime) -> tuple[AgentKey, str]:
    """A new key and its only copy in the clear. Agents it speaks for are made if they do not exist."""
    if not dids and not operator:
        raise InvalidRequest("agent", "A key speaks for at least one agent, or is an operator's.")
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
        prefix=prefix, digest=hash_key(key), name=name, dids=list(dict.fromkeys(dids)), operator=operator, created_at=now
    )
    return row, key


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def find_active_key(key: str, *, now: datetime) -> AgentKey | None:
    """The key's row if it exists and is not revoked, read anew each time: a revoked key is refused at once."""
    if not re.fullmatch(r"lh_[0-9a-f]{8}_[A-Za-z0-9_-]{43}", key, re.ASCII):
        return None
    row = sql.find_first(AgentKey, "digest = %s AND revoked_at IS NULL", hash_key(key))
    if row and (row.last_used_at is None or row.last_used_at < now - LAST_USED_WRITE_INTERVAL):
        AgentKey.objects.filter(pk=row.pk).update(last_used_at=now)
    return row


def revoke_key(pk: int, *, now: datetime) -> bool:
    """Refuse this key from now on. False if it was revoked before."""
    return bool(AgentKey.objects.filter(pk=pk, revoked_at__isnull=True).update(revoked_at=now))


def consume_rate_limit_token(key: AgentKey, *, per_minute: int, now: datetime) -> None:
    """Take one token of the bucket that limits new leases, or TooMany with when to come back. 0: no limit.

    The bucket holds a minute's worth and fills steadily. Two guarded UPDATEs, so parallel requests cannot overdraw."""
    if not per_minute:
        return
    mine = AgentKey.objects.filter(pk=key.pk)
    started = Q(tokens_at__isnull=True) | Q(tokens_at__lt=now - timedelta(minutes=1))
    if not mine.filter(started).update(tokens=float(per_minute), tokens_at=now):
        gained = (now - (key.tokens_at or now)).total_seconds() * per_minute / 60
        if gained >= 1:  # only whoever saw this tokens_at fills the bucket from it
            full = Value(float(per_minute), output_field=FloatField())
            mine.filter(tokens_at=key.tokens_at).update(tokens=Least(F("tokens") + gained, full), tokens_at=now)
    if not mine.filter(tokens__gte=1).update(tokens=F("tokens") - 1):
        wait = RateLimited(f"This key may ask for {per_minute} new leases a minute.")
        wait.retry_after = max(1, round(60 / per_minute))
        raise wait
