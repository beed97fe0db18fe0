"""Authentication by API key: `Authorization: Bearer <key>`."""

from typing import TypedDict
from uuid import UUID

from django.db.models import QuerySet
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated, NotFound, PermissionDenied
from rest_framework.request import Request

from leases import api_keys
from leases.allow_lists import AllowLists
from leases.errors import InsufficientScope
from leases.grants.issuers import Issuer
from leases.models import AgentKey, KeyScope, Lease
from sandboxes.db import database_time, sql


class BudgetAccess(TypedDict):
    """Keyword arguments of `budgets.get_disclosure`."""

    operator: bool
    dids: list[str]
    key_id: str


class Caller:
    """API key of a request, in place of a Django user.

    An agent's key has access to the leases of its agents, an operator's key to all leases."""

    is_authenticated = True

    def __init__(self, key: AgentKey, issuer: Issuer, lease: Lease | None = None) -> None:
        self.key, self.issuer = key, issuer
        self._lease = lease  # read with the key
        self.pk = key.pk
        self.allowed = AllowLists.of_key(key)
        self.name = api_keys.format_actor(key)

    def require_scope(self, scope: str, *, reads: bool) -> None:
        """Raise InsufficientScope unless this key has the scope, or one that replaces it."""
        accepted = list_accepted_scopes(scope, reads=reads)
        if not any(each in self.key.scopes for each in accepted):
            raise InsufficientScope(f"This request needs an API key with the scope {' or '.join(accepted)}.")

    @property
    def budget_access(self) -> BudgetAccess:
        return {"operator": self.key.operator, "dids": self.key.dids, "key_id": str(self.pk)}

    def may_act_for(self, did: str) -> bool:
        return self.key.operator or did in self.key.dids

    def require(self, did: str) -> None:
        """Raise PermissionDenied unless this key may act for the agent."""
        if not self.may_act_for(did):
            raise PermissionDenied("This key may not act for that agent.")

    def visible_leases(self) -> QuerySet[Lease]:
        leases = Lease.objects.all()
        return leases if self.key.operator else leases.filter(agent_did__in=self.key.dids)

    def get_lease(self, pk: UUID) -> Lease:
        """Return a lease. Raises NotFound for an unknown lease, and for a lease of an agent that this key may not act for."""
        is_known = self._lease is not None and self._lease.pk == pk
        lease = self._lease if is_known else sql.find_first(Lease, "id = %s", pk)
        if lease is None or not self.may_act_for(lease.agent_did):
            raise NotFound("There is no such lease.")
        return lease


def list_accepted_scopes(scope: str, *, reads: bool) -> tuple[str, ...]:
    """Return the scopes of which a key needs one; none without a scope. If a request only reads, `read` replaces `leases`."""
    if not scope:
        return ()
    return (scope, KeyScope.READ) if reads and scope == KeyScope.LEASES else (scope,)


class KeyAuthentication(BaseAuthentication):
    """Authenticate the holder of an API key. `request.user` is a Caller, `request.auth` the AgentKey row."""

    def authenticate(self, request: Request, lease_id: UUID | None = None) -> tuple[Caller, AgentKey]:
        """Raises NotAuthenticated, AuthenticationFailed or KeyExpired. The lease is read in the same query as the key."""
        scheme, _, key = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
        if not scheme:
            raise NotAuthenticated("Send Authorization: Bearer <key>.")
        row, lease, now = None, None, database_time.now()
        if scheme.lower() == "bearer" and lease_id:
            row, lease = api_keys.find_active_key_and_lease(key.strip(), lease_id, now=now)
        elif scheme.lower() == "bearer":
            row = api_keys.find_active_key(key.strip(), now=now)
        if row is None:
            raise AuthenticationFailed("The API key is unknown or revoked.")
        return Caller(row, Issuer.of_key(row.pk, key.strip()), lease), row

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="leasehold"'
