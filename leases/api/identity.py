"""The door through which an agent is somebody to others."""

from uuid import UUID

from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema

from leases import execution
from leases.api import schema
from leases.api import serializers_identity as identity
from leases.api.fields import span
from leases.api.leases import Door
from sandboxes.identity.signing import LIFETIME

ASK = identity.AskToken()


class ServiceToken(Door):
    @extend_schema(
        operation_id="leases_service_token",
        request=identity.AskToken,
        responses=schema.answers(identity.TokenShown, 404, 409, 410, 413, 415),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """A short-lived token by which the lease's agent calls one method of another service, as AT Protocol has it: signed
        with the agent's own key, which stays here. Each call makes another one; an Idempotency-Key has no effect, since
        no token is stored. The lease is not renewed."""
        self.caller.lease(pk)
        _, said = self.read(request, ASK)
        lifetime = span(said, "lifetime_seconds") or LIFETIME
        token, minted = execution.service_token(
            pk, aud=said["aud"], lxm=said["lxm"], lifetime=lifetime, now=self.now, actor=self.actor
        )
        return JsonResponse(identity.token_shown(token, minted), headers={"Cache-Control": "no-store"})
