"""Authentication by API key."""

from datetime import datetime
from uuid import UUID

from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated, NotFound, PermissionDenied
from rest_framework.request import Request

from leases import api_keys
from leases.models import AgentKey, Lease
from sandboxes.db import sql

MISSING_KEY_MESSAGE = "Send Authorization: Bearer <key>."


class Caller:
    """The key behind a request, as what Django calls a user."""

    is_authenticated = True

    def __init__(self, key: AgentKey) -> None:
        self.key = key
        self.pk = key.pk
        self.name = f"key {key.prefix}"

    def speaks_for(self, did: str) -> bool:
        return self.key.operator or did in self.key.dids

    def require(self, did: str) -> None:
        """PermissionDenied unless this key speaks for the agent."""
        if not self.speaks_for(did):
            raise PermissionDenied("This key does not speak for that agent.")

    def leases(self) -> QuerySet[Lease]:
        """The leases this key may see; others do not exist for it."""
        every = Lease.objects.all()
        return every if self.key.operator else every.filter(agent_did__in=self.key.dids)

    def lease(self, pk: UUID) -> Lease:
        found = sql.find_first(Lease, "id = %s", pk)
        if found is None or not self.speaks_for(found.agent_did):
            raise NotFound("There is no such lease.")
        return found


def authenticate_request(request: HttpRequest, *, now: datetime) -> Caller:
    """Whoever holds the key of this request. NotAuthenticated without one, AuthenticationFailed if it is no good."""
    scheme, _, key = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
    if not scheme:
        raise NotAuthenticated(MISSING_KEY_MESSAGE)
    row = api_keys.find_active_key(key.strip(), now=now) if scheme.lower() == "bearer" else None
    if row is None:
        raise AuthenticationFailed("This key is not known, or was revoked.")
    return Caller(row)


class KeyAuthentication(BaseAuthentication):
    """The same for views that go through all of DRF."""

    def authenticate(self, request: Request) -> tuple[Caller, AgentKey] | None:
        if "HTTP_AUTHORIZATION" not in request.META:
            return None
        caller = authenticate_request(request._request, now=timezone.now())
        return caller, caller.key

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="leasehold"'
