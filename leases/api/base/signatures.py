"""Requests that a game server signs with a secret of its environment, instead of sending an API key."""

from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission

from leases.api.base.parsers import read_body
from leases.api.base.views import ApiView
from leases.environments import signing
from sandboxes.audit import Actor, ActorKind
from sandboxes.db import database_time


class GameServer:
    """Sender of a signed request, in place of a Django user. May post events of one environment, and end it."""

    is_authenticated = True
    name = Actor("game server", ActorKind.SYSTEM)

    def __init__(self, environment_id: str, message_id: str) -> None:
        self.environment_id = environment_id
        self.message_id = message_id

    def derive_run_id(self) -> UUID:
        """Return the id of the queued run of this message: a repeated message finds the first one's run."""
        return uuid5(NAMESPACE_OID, f"event {self.environment_id} {self.message_id}")


class SignatureAuthentication(BaseAuthentication):
    """Authenticate a game server by its Standard Webhooks signature."""

    def authenticate(self, request: Any) -> tuple[GameServer, None]:
        """Raise InvalidSignature. The body is read once the headers are valid."""
        meta, environment_id = request.META, request.parser_context["kwargs"]["environment_id"]
        message_id, timestamp, signature = (meta.get(f"HTTP_WEBHOOK_{name}", "") for name in ("ID", "TIMESTAMP", "SIGNATURE"))
        secrets = signing.check_request(environment_id, message_id, timestamp, signature, now=database_time.now())
        body = read_body(request._request, request.parser_context["view"].max_body_bytes)
        signing.verify(secrets, message_id, timestamp, signature, body)
        request.load_json(body)
        return GameServer(environment_id, message_id), None


class HasSignature(BasePermission):
    """The request carries a valid signature for the environment in the URL."""

    def has_permission(self, request: Any, view: Any) -> bool:
        return isinstance(request.user, GameServer)


class SignableView(ApiView):
    """Base of the views that take a signature instead of an API key."""

    def get_authenticators(self) -> list[BaseAuthentication]:
        meta = getattr(getattr(self, "request", None), "META", {})  # no request while the OpenAPI document is generated
        is_signed = "HTTP_WEBHOOK_SIGNATURE" in meta and "HTTP_AUTHORIZATION" not in meta
        return [SignatureAuthentication()] if is_signed else super().get_authenticators()
