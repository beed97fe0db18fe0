"""Service tokens of agents."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import execution
from leases.api import schema
from leases.api.fields import PatternField, StrictIntegerField, seconds_to_timedelta
from leases.api.views import ApiRequest, LeaseApiView
from leases.models import DID_PATTERN
from sandboxes.db.clock import format_timestamp
from sandboxes.identity.signing import DEFAULT_TOKEN_LIFETIME, MAX_TOKEN_LIFETIME, MIN_TOKEN_LIFETIME
from sandboxes.models import MintedToken

AUDIENCE_PATTERN = rf"{DID_PATTERN}(#[A-Za-z][A-Za-z0-9._~-]{{0,63}})?"
AUDIENCE_DESCRIPTION = "a DID of at most 255 characters, or one with the fragment of a service: did:web:relay.example#relay"
DOMAIN_LABEL_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
NSID_PATTERN = rf"(?=[A-Za-z]){DOMAIN_LABEL_PATTERN}(\.{DOMAIN_LABEL_PATTERN})+\.[A-Za-z][A-Za-z0-9]{{0,62}}"
NSID_DESCRIPTION = "an NSID such as com.atproto.sync.subscribeRepos"


def _to_seconds(length: timedelta) -> int:
    return int(length.total_seconds())


class MintServiceTokenSerializer(serializers.Serializer):
    aud = PatternField(
        AUDIENCE_PATTERN, AUDIENCE_DESCRIPTION, max_length=320, help_text="The service that is to be called, by its DID."
    )
    lxm = PatternField(
        NSID_PATTERN, NSID_DESCRIPTION, max_length=317, help_text="The one method that the token is good for, by its NSID."
    )
    lifetime_seconds = StrictIntegerField(
        min_value=_to_seconds(MIN_TOKEN_LIFETIME), max_value=_to_seconds(MAX_TOKEN_LIFETIME), required=False, allow_null=True,
        help_text=f"Default: {_to_seconds(DEFAULT_TOKEN_LIFETIME)}.",
    )  # fmt: skip


class ServiceTokenSerializer(serializers.Serializer):
    token = serializers.CharField(help_text="A signed JWT for `Authorization: Bearer`. It is stored nowhere.")
    expires_at = serializers.DateTimeField(help_text="The end of the lease does not bring it forward.")


SERVICE_TOKEN_SERIALIZER = MintServiceTokenSerializer()


class ServiceTokenView(LeaseApiView):
    @extend_schema(
        operation_id="leases_service_token",
        request=MintServiceTokenSerializer,
        responses=schema.build_responses(ServiceTokenSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """A short-lived token by which the lease's agent calls one method of another service, as AT Protocol has it: signed
        with the agent's own key, which stays here. Each call makes another one; an Idempotency-Key has no effect, since
        no token is stored. The lease is not renewed."""
        said = self.validate_body(SERVICE_TOKEN_SERIALIZER)
        lifetime = seconds_to_timedelta(said, "lifetime_seconds") or DEFAULT_TOKEN_LIFETIME
        token, minted = execution.mint_service_token(
            pk, aud=said["aud"], lxm=said["lxm"], lifetime=lifetime, now=self.now, actor=self.actor
        )
        return Response(serialize_service_token(token, minted), headers={"Cache-Control": "no-store"})


def serialize_service_token(token: str, minted: MintedToken) -> dict[str, Any]:
    return {"token": token, "expires_at": format_timestamp(minted.expires_at)}
