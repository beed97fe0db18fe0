"""Who calls: `Authorization: Bearer <key>`. A key reaches the leases of its own agents, an operator's reaches all."""

from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed, NotFound, PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from leases import keys
from leases.models import AgentKey, Lease


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
        every = Lease.objects.select_related("environment_type", "pool")
        return every if self.key.operator else every.filter(agent_did__in=self.key.dids)

    def lease(self, pk: Any) -> Lease:
        found = self.leases().filter(pk=pk).first()
        if found is None:
            raise NotFound("There is no such lease.")
        return found


class KeyAuthentication(BaseAuthentication):
    def authenticate(self, request: Request) -> tuple[Caller, AgentKey] | None:
        scheme, _, key = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
        if not scheme:
            return None
        row = keys.find(key.strip(), now=timezone.now()) if scheme.lower() == "bearer" else None
        if row is None:
            raise AuthenticationFailed("This key is not known, or was revoked.")
        return Caller(row), row

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="leasehold"'


class HasKey(BasePermission):
    message = "Send Authorization: Bearer <key>."

    def has_permission(self, request: Request, view: APIView) -> bool:
        return isinstance(request.user, Caller)


class IsOperator(BasePermission):
    message = "Only an operator's key may do this."

    def has_permission(self, request: Request, view: APIView) -> bool:
        return isinstance(request.user, Caller) and request.user.key.operator
