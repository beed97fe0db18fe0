"""Issuers of grants, and the one decision on whether a grant is alive.

A grant is alive while its issuer may still make the request that created it: an API key that is neither revoked nor expired and
has the scope and the agent, or an active console user with the permission. A grant that is bound to a secret also ends with the
secret: that of a key by rotation, once the previous secret is not accepted any more, and that of a user by a change of the
password, as the sessions of the user do."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import AbstractBaseUser

from leases import api_keys
from leases.errors import GrantEnded
from leases.models import AgentKey, KeyScope

TERMINAL_PERMISSION = "sandboxes.open_terminal"
SECRET_CHARS = 16  # 64 bits of a digest, which identify a secret among those of one issuer and do not reveal the secret
# Predicates of a refusal, after "The API key that created this URL" and the like.
REVOKED, NOT_PERMITTED = "was revoked or has expired", "may not act for this agent any more"


class IssuerKind(StrEnum):
    KEY = "key"
    USER = "user"


@dataclass(frozen=True)
class Issuer:
    """API key or console user that has issued a grant. With a `secret`, the grant ends with that secret of the issuer."""

    kind: IssuerKind
    pk: int
    secret: str = ""

    @classmethod
    def of_key(cls, pk: int, key: str = "") -> "Issuer":
        """Return the issuer for an API key, bound to the secret of its plain text if that is given."""
        return cls(IssuerKind.KEY, pk, api_keys.hash_key(key)[:SECRET_CHARS] if key else "")

    @classmethod
    def of_user(cls, user: AbstractBaseUser) -> "Issuer":
        """Return the issuer for a console user, bound to the password that the user has now."""
        return cls(IssuerKind.USER, user.pk, _shorten(user.get_session_auth_hash()))


@dataclass(frozen=True)
class Right:
    """Right of an issuer that a grant passes on.

    A key needs one of the `scopes`, if any are listed, and access to the agent, unless the right concerns no single one. A user
    needs the permission to open terminals."""

    issuer: Issuer
    scopes: tuple[str, ...] = (KeyScope.LEASES,)
    agent_did: str = ""


def find_alive(rights: Collection[Right], *, now: datetime) -> set[Right]:
    """Return those of these rights that their issuers still have. One query for all keys, and one for all users."""
    keys = AgentKey.objects.in_bulk(_list_pks(rights, IssuerKind.KEY))
    users: dict[int, Any] = {}
    if user_pks := _list_pks(rights, IssuerKind.USER):
        users = get_user_model()._default_manager.in_bulk(user_pks)
    rows = {IssuerKind.KEY: keys, IssuerKind.USER: users}
    return {right for right in rights if not explain_end(right, rows[right.issuer.kind].get(right.issuer.pk), now=now)}


def is_grant_alive(right: Right, *, now: datetime) -> bool:
    """Return whether the issuer of a grant still has the right that the grant passes on."""
    return bool(find_alive([right], now=now))


def require_alive(right: Right, *, now: datetime) -> None:
    """Raise GrantEnded unless the issuer of a grant still has the right that the grant passes on."""
    if not is_grant_alive(right, now=now):
        raise GrantEnded()


def find_key(right: Right, *, now: datetime) -> AgentKey | None:
    """Return the present row of the API key that has issued a grant, None if the grant has ended."""
    key = AgentKey.objects.filter(pk=right.issuer.pk).first() if right.issuer.kind == IssuerKind.KEY else None
    return None if explain_end(right, key, now=now) else key


def explain_end(right: Right, issuer: Any, *, now: datetime) -> str:
    """Return the reason for which a right has ended, as a predicate; empty while its issuer has it. The only such decision.

    `issuer` is the present row of the issuer, None if there is none."""
    if issuer is None:
        return REVOKED
    if right.issuer.kind == IssuerKind.USER:
        return _explain_end_of_user(right, issuer)
    if issuer.revoked_at is not None or api_keys.is_expired(issuer, now):
        return REVOKED
    if right.issuer.secret and right.issuer.secret not in _list_secrets(issuer, now):
        return REVOKED
    if right.scopes and not any(scope in issuer.scopes for scope in right.scopes):
        return NOT_PERMITTED
    if right.agent_did and not (issuer.operator or right.agent_did in issuer.dids):
        return NOT_PERMITTED
    return ""


def _explain_end_of_user(right: Right, user: Any) -> str:
    if not user.is_active or right.issuer.secret not in _list_user_secrets(user):
        return REVOKED
    return "" if user.is_staff and user.has_perm(TERMINAL_PERMISSION) else NOT_PERMITTED


def _list_secrets(key: AgentKey, now: datetime) -> list[str]:
    """Return the beginnings of the digests of the secrets that are accepted now."""
    digests = [key.digest]
    if key.previous_valid_until is not None and key.previous_valid_until > now:
        digests.append(key.previous_digest)
    return [digest[:SECRET_CHARS] for digest in digests]


def _list_user_secrets(user: Any) -> Iterable[str]:
    """Return the digests of the password of a user under the present SECRET_KEY and its fallbacks."""
    return [_shorten(each) for each in (user.get_session_auth_hash(), *user.get_session_auth_fallback_hash())]


def _shorten(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SECRET_CHARS]


def _list_pks(rights: Collection[Right], kind: IssuerKind) -> list[int]:
    return sorted({right.issuer.pk for right in rights if right.issuer.kind == kind})
