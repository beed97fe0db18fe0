"""Service tokens of agents."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import execution
from leases.api.base import schema
from leases.api.base.fields import PatternField, StrictIntegerField, StrictSerializer, seconds_to_timedelta
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.identity_patterns import AUDIENCE_DESCRIPTION, AUDIENCE_PATTERN, NSID_DESCRIPTION, NSID_PATTERN
from sandboxes.db.clock import format_timestamp
from sandboxes.identity.signing import DEFAULT_TOKEN_LIFETIME, MAX_TOKEN_LIFETIME, MIN_TOKEN_LIFETIME
from sandboxes.models import MintedToken


def _to_seconds(duration: timedelta) -> int:
    return int(duration.total_seconds())


class MintServiceTokenSerializer(StrictSerializer):
    aud = PatternField(AUDIENCE_PATTERN, AUDIENCE_DESCRIPTION, max_length=320, help_text="DID of the service to call.")
    lxm = PatternField(NSID_PATTERN, NSID_DESCRIPTION, max_length=317, help_text="NSID of the method that the token permits.")
    lifetime_seconds = StrictIntegerField(
        min_value=_to_seconds(MIN_TOKEN_LIFETIME), max_value=_to_seconds(MAX_TOKEN_LIFETIME), required=False, allow_null=True,
        help_text=f"Lifetime of the token in seconds. Default: {_to_seconds(DEFAULT_TOKEN_LIFETIME)}.",
    )  # fmt: skip


class ServiceTokenSerializer(serializers.Serializer):
    token = serializers.CharField(help_text="Signed JWT for `Authorization: Bearer`. The control plane does not store it.")
    expires_at = serializers.DateTimeField(help_text="Expiry of the token, also if the lease ends earlier.")


SERVICE_TOKEN_SERIALIZER = MintServiceTokenSerializer()


class ServiceTokenView(LeaseApiView):
    @extend_schema(
        operation_id="leases_service_token",
        summary="Create a service token",
        request=MintServiceTokenSerializer,
        responses=schema.build_responses(ServiceTokenSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Create a short-lived AT Protocol service token, with which the agent calls one method of another service.

        The token is signed with the agent's signing key, which never leaves the control plane. Each call creates a new
        token: an Idempotency-Key has no effect, since tokens are not stored. The lease is not renewed."""
        data = self.validate_body(SERVICE_TOKEN_SERIALIZER)
        lifetime = seconds_to_timedelta(data, "lifetime_seconds") or DEFAULT_TOKEN_LIFETIME
        token, minted = execution.mint_service_token(
            pk, aud=data["aud"], lxm=data["lxm"], lifetime=lifetime, now=self.now, actor=self.actor
        )
        return Response(serialize_service_token(token, minted), headers={"Cache-Control": "no-store"})


def serialize_service_token(token: str, minted: MintedToken) -> dict[str, Any]:
    return {"token": token, "expires_at": format_timestamp(minted.expires_at)}
