"""Tokens of remote sandboxes at the gateway: 256 random bits, of which the database has a SHA-256 only.

A token identifies a sandbox, as a socket does on this host. Whether the sandbox may call, and on whose behalf, is read from its
row for each call: a token of a sandbox without a lease, or of an earlier incarnation, permits nothing.

A sandbox with an agent gets a join token instead. Its agent exchanges it once for a session secret of its own choice, which
never leaves the memory of process 1, so a command that reads the token afterwards can do nothing with it."""

import hashlib
import re
import secrets
import uuid
from datetime import datetime
from typing import NamedTuple

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, QuerySet

from sandboxes import providers
from sandboxes.db import dialect
from sandboxes.errors import NoGateway
from sandboxes.models import ALIVE_STATES, IN_FLIGHT_STATES, GatewayToken, Pool, Sandbox

log = structlog.get_logger(__name__)
# Not secrets (S105): they let scanners for leaked credentials recognize a token.
TOKEN_PREFIX = "lhg_"  # noqa: S105
JOIN_TOKEN_PREFIX = "lhj_"  # noqa: S105
SESSION_SECRET_PREFIX = "lhs_"  # noqa: S105 - as in image/agent/remote.py
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


class AgentIdentity(NamedTuple):
    """Sandbox of an agent with a session secret. `session_sha256` identifies the secret."""

    sandbox: uuid.UUID
    ref: str
    session_sha256: str


def require_models(pool: Pool) -> None:
    """Raise NoGateway if the sandboxes of a pool are remote and have no way to a model."""
    name = pool.provider or providers.get_default_provider_name()
    if not settings.GATEWAY_URL and name in settings.REMOTE_PROVIDERS:
        raise NoGateway(f"Sandboxes of {name} have no models: LEASEHOLD_GATEWAY_URL is not set. Commands and files work.")


def issue(sandbox: Sandbox, *, now: datetime) -> str:
    """Return a new token for the current incarnation of a sandbox. The earlier one becomes invalid."""
    return _issue(sandbox, TOKEN_PREFIX, now=now)


def issue_for_join(sandbox: Sandbox, *, now: datetime) -> str:
    """Return a new join token for the agent of the current incarnation. Earlier tokens and their session become invalid."""
    return _issue(sandbox, JOIN_TOKEN_PREFIX, now=now)


def _issue(sandbox: Sandbox, prefix: str, *, now: datetime) -> str:
    token = prefix + secrets.token_urlsafe(32)
    values = {"incarnation": sandbox.incarnation, "sha256": _hash(token), "issued_at": now}
    values |= {"session_sha256": "", "joined_at": None, "refused_joins": 0, "refused_at": None}
    GatewayToken.objects.update_or_create(sandbox=sandbox, defaults=values)
    return token


def join(token: str, session_sha256: str, *, now: datetime) -> bool:
    """Exchange a join token for the session secret with this hash. Return False for an invalid token.

    The first hash wins. Repeating it succeeds, since the answer to the first request may have been lost. Any other join with
    the token is refused and recorded. Raise ValueError for a malformed hash."""
    if not _DIGEST_PATTERN.fullmatch(session_sha256):
        raise ValueError("session_sha256 is not a SHA-256 in hexadecimal")
    if not token.startswith(JOIN_TOKEN_PREFIX):
        return False
    rows = _filter_existing(GatewayToken.objects.filter(sha256=_hash(token)))
    try:
        with transaction.atomic():
            if rows.filter(session_sha256="").update(session_sha256=session_sha256, joined_at=now):
                return True
    except IntegrityError as error:  # the hash is that of another sandbox's session
        dialect.raise_unless_unique(error)
        return False
    if rows.filter(session_sha256=session_sha256).exists():
        return True
    if rows.update(refused_joins=F("refused_joins") + 1, refused_at=now):
        log.warning("second join refused", sandbox=str(rows.values_list("sandbox", flat=True).first()))
    return False


def find_agent(secret: str) -> AgentIdentity | None:
    """Return the sandbox of the agent with this session secret while its incarnation exists, with or without a lease."""
    if not secret.startswith(SESSION_SECRET_PREFIX):
        return None
    found = _filter_existing(GatewayToken.objects.filter(session_sha256=_hash(secret)))
    values = found.values_list("sandbox", "sandbox__ref", "session_sha256").first()
    return AgentIdentity(*values) if values else None


def find_slot(token: str) -> int | None:
    """Return the egress slot of the sandbox with this token or session secret. None if it is unknown, replaced or dead."""
    rows = _find(token)
    if rows is None:
        return None
    current = rows.filter(incarnation=F("sandbox__incarnation"), sandbox__state__in=ALIVE_STATES)
    return current.values_list("sandbox__slot", flat=True).first()


def find_ref(token: str) -> str | None:
    """Return the ref of the sandbox with this token or session secret while its incarnation exists, with or without a lease."""
    rows = _find(token)
    return _filter_existing(rows).values_list("sandbox__ref", flat=True).first() if rows is not None else None


def _find(token: str) -> QuerySet[GatewayToken] | None:
    if token.startswith(TOKEN_PREFIX):
        return GatewayToken.objects.filter(sha256=_hash(token))
    if token.startswith(SESSION_SECRET_PREFIX):
        return GatewayToken.objects.filter(session_sha256=_hash(token))
    return None


def _filter_existing(rows: QuerySet[GatewayToken]) -> QuerySet[GatewayToken]:
    """Select the tokens of incarnations that exist: also of one that is being started or destroyed."""
    return rows.filter(incarnation=F("sandbox__incarnation"), sandbox__state__in=(*IN_FLIGHT_STATES, *ALIVE_STATES))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
