"""Tokens of remote sandboxes at the gateway: 256 random bits, of which the database has a SHA-256 only.

A token identifies a sandbox, as a socket does on this host. Whether the sandbox may call, and on whose behalf, is read from its
row for each call: a token of a sandbox without a lease, or of an earlier incarnation, permits nothing."""

import hashlib
import secrets
from datetime import datetime

from django.conf import settings

from sandboxes import providers
from sandboxes.errors import NoGateway
from sandboxes.models import ALIVE_STATES, IN_FLIGHT_STATES, GatewayToken, Pool, Sandbox

TOKEN_PREFIX = "lhg_"  # noqa: S105 - not a secret: lets scanners for leaked credentials recognize a token


def require_models(pool: Pool) -> None:
    """Raise NoGateway if the sandboxes of a pool are remote and have no way to a model."""
    name = pool.provider or providers.get_default_provider_name()
    if not settings.GATEWAY_URL and name in settings.REMOTE_PROVIDERS:
        raise NoGateway(f"Sandboxes of {name} have no models: LEASEHOLD_GATEWAY_URL is not set. Commands and files work.")


def issue(sandbox: Sandbox, *, now: datetime) -> str:
    """Return a new token for the current incarnation of a sandbox. The earlier one becomes invalid."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    values = {"incarnation": sandbox.incarnation, "sha256": _hash(token), "issued_at": now}
    GatewayToken.objects.update_or_create(sandbox=sandbox, defaults=values)
    return token


def find_slot(token: str) -> int | None:
    """Return the egress slot of the sandbox with this token. None for an unknown, replaced or dead token."""
    if not token.startswith(TOKEN_PREFIX):
        return None
    found = (
        GatewayToken.objects.filter(sha256=_hash(token), sandbox__state__in=ALIVE_STATES)
        .values_list("incarnation", "sandbox__incarnation", "sandbox__slot")
        .first()
    )
    return found[2] if found and found[0] == found[1] else None


def find_ref(token: str) -> str | None:
    """Return the ref of the sandbox with this token while its incarnation exists, with or without a lease."""
    if not token.startswith(TOKEN_PREFIX):
        return None
    found = (
        GatewayToken.objects.filter(sha256=_hash(token), sandbox__state__in=(*IN_FLIGHT_STATES, *ALIVE_STATES))
        .values_list("incarnation", "sandbox__incarnation", "sandbox__ref")
        .first()
    )
    return found[2] if found and found[0] == found[1] else None


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
