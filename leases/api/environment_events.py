"""Events of a game server: a turn notification becomes a queued turn of the agent's lease."""

from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import leasing
from leases.api.base import schema
from leases.api.base.fields import (
    JsonObjectField,
    StrictBooleanField,
    StrictIntegerField,
    StrictSerializer,
    build_did_field,
    validate_url_value,
)
from leases.api.base.idempotency import KeyReused, StatusAndBody
from leases.api.base.permissions import HasKey
from leases.api.base.signatures import GameServer, HasSignature, SignableView
from leases.api.base.views import ApiRequest
from leases.api.environment_rows import EnvironmentApiView
from leases.api.leases import ACQUIRE_SERIALIZER
from leases.api.queue_fields import QueuedRunSerializer, serialize_queued_run
from leases.api.turns import MAX_TURN_BODY_BYTES, MAX_TURN_NUMBER
from leases.environments import signing
from leases.errors import InvalidRequest, NoActiveLease
from leases.models import Lease, LeaseStatus
from leases.queue import queue, runner
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.webhooks.signatures import MESSAGE_ID_RE


class EnvironmentEventSerializer(StrictSerializer):
    type = serializers.ChoiceField(["turn"])
    agent_did = build_did_field()
    turn_number = StrictIntegerField(min_value=0, max_value=MAX_TURN_NUMBER)
    state = JsonObjectField(help_text="Input of the turn command, at most 1 MiB.")


EVENT_SERIALIZER = EnvironmentEventSerializer()


class EnvironmentEventListView(SignableView):
    permission_classes = [HasSignature | HasKey]
    max_body_bytes = MAX_TURN_BODY_BYTES

    @extend_schema(
        operation_id="environments_post_event",
        summary="Post an event",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=EnvironmentEventSerializer,
        responses=schema.build_responses(QueuedRunSerializer, 404, 409, 410, 413, 415, 429, ok=(202,)),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Add a turn of the agent's active lease in the environment to the queue, and respond at once.

        The turns of an agent in an environment are played one after another, in the order of their numbers. The result is in
        `GET /runs/queued/{id}` and in the event `queued_run.ended`. The header
        `webhook-id` serves as the Idempotency-Key if the request has none. Instead of an API key, a game server may sign the
        request with a secret of the environment (Standard Webhooks: `webhook-id`, `webhook-timestamp` and
        `webhook-signature`)."""
        environment_id = validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)
        if isinstance(request.user, GameServer):
            data = self.validate_body(EVENT_SERIALIZER)
            status, document = self._enqueue_signed(request.user, data)
            return Response(document, status=status)
        if "HTTP_IDEMPOTENCY_KEY" not in request.META and (event_id := request.META.get("HTTP_WEBHOOK_ID")) is not None:
            if not MESSAGE_ID_RE.fullmatch(event_id):
                raise InvalidRequest("webhook-id", "The header webhook-id has 1 to 255 visible ASCII characters.")
            request.META["HTTP_IDEMPOTENCY_KEY"] = event_id
        data = self.validate_body(EVENT_SERIALIZER)
        self.caller.require(data["agent_did"])
        return self.execute_once(lambda pk: self._enqueue(pk, environment_id, data))

    def _enqueue_signed(self, server: GameServer, data: dict[str, Any]) -> StatusAndBody:
        pk = server.derive_run_id()
        if existing := QueuedRun.objects.filter(pk=pk).first():  # also if the lease has ended since
            return self._replay(existing, data)
        status, document = self._enqueue(pk, server.environment_id, data)
        return status, document

    def _replay(self, row: QueuedRun, data: dict[str, Any]) -> StatusAndBody:
        if (row.agent_did, row.turn_number) != (data["agent_did"], data["turn_number"]):
            raise KeyReused("This webhook-id was sent with another event.", field="webhook-id")
        return 202, serialize_queued_run(row)

    def _enqueue(self, pk: UUID, environment_id: str, data: dict[str, Any]) -> StatusAndBody:
        lease = self._find_lease(data["agent_did"], environment_id)
        row = queue.enqueue(
            pk, agent_did=lease.agent_did, lease=lease, pool=lease.pool, request=build_turn_request(lease, data),
            secrets={"env": {}, "state": data["state"]}, options=QueueOptions(), now=self.now, actor=self.actor,
        )  # fmt: skip
        runner.get_runner().notify()
        return self._replay(row, data)

    def _find_lease(self, agent_did: str, environment_id: str) -> Lease:
        lease = Lease.objects.filter(
            agent_did=agent_did, environment_id=environment_id, status=LeaseStatus.ACTIVE
        ).select_related("environment_type", "pool").first()  # fmt: skip
        if lease is None:
            raise NoActiveLease()
        leasing.require_active(lease.pk, now=self.now)
        return lease


def build_turn_request(lease: Lease, data: dict[str, Any]) -> dict[str, Any]:
    timeout = lease.environment_type.turn_timeout or settings.TURN_TIMEOUT
    return {
        "kind": "turn",
        "argv": lease.environment_type.turn_argv,
        "turn_number": data["turn_number"],
        "timeout_seconds": int(timeout.total_seconds()),
    }


class NewSecretSerializer(StrictSerializer):
    revoke_previous = StrictBooleanField(default=False, help_text="End earlier secrets at once, instead of after 24 hours.")


class EnvironmentSecretSerializer(serializers.Serializer):
    secret_id = serializers.UUIDField()
    secret = serializers.CharField(help_text="Signing secret, `whsec_…`. Shown once.")
    created_at = serializers.DateTimeField()
    valid_until = serializers.DateTimeField(allow_null=True)


NEW_SECRET_SERIALIZER = NewSecretSerializer()


class EnvironmentSecretListView(EnvironmentApiView):
    @extend_schema(
        operation_id="environments_create_secret",
        summary="Create a signing secret",
        request=NewSecretSerializer,
        responses=schema.build_responses(EnvironmentSecretSerializer, 404, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Create a secret with which a game server signs the events of this environment. Operator keys only.

        Earlier secrets stay valid for 24 hours. The response is not stored for an Idempotency-Key."""
        data = self.validate_body(NEW_SECRET_SERIALIZER)
        environment_id = self.get_environment(environment_id).pk
        row, secret = signing.add_secret(
            environment_id, revoke_previous=data["revoke_previous"], now=self.now, actor=self.actor
        )
        document = {
            "secret_id": str(row.pk),
            "secret": secret,
            "created_at": format_timestamp(row.created_at),
            "valid_until": format_optional_timestamp(row.valid_until),
        }
        return Response(document, status=201)
