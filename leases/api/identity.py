"""The door through which an agent is somebody to others."""

from uuid import UUID

from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema

from leases import execution
from leases.api import schema
from leases.api import serializers_identity as identity
from leases.api.fields import seconds_to_timedelta
from leases.api.leases import AgentApiView
from sandboxes.identity.signing import DEFAULT_TOKEN_LIFETIME

SERVICE_TOKEN_SERIALIZER = identity.MintServiceTokenSerializer()


class ServiceTokenView(AgentApiView):
    @extend_schema(
        operation_id="leases_service_token",
        request=identity.MintServiceTokenSerializer,
        responses=schema.build_responses(identity.ServiceTokenSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """A short-lived token by which the lease's agent calls one method of another service, as AT Protocol has it: signed
        with the agent's own key, which stays here. Each call makes another one; an Idempotency-Key has no effect, since
        no token is stored. The lease is not renewed."""
        self.caller.lease(pk)
        _, said = self.read(request, SERVICE_TOKEN_SERIALIZER)
        lifetime = seconds_to_timedelta(said, "lifetime_seconds") or DEFAULT_TOKEN_LIFETIME
        token, minted = execution.mint_service_token(
            pk, aud=said["aud"], lxm=said["lxm"], lifetime=lifetime, now=self.now, actor=self.actor
        )
        return JsonResponse(identity.serialize_service_token(token, minted), headers={"Cache-Control": "no-store"})
