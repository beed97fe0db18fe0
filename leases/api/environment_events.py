"""Events of a game server: a turn notification becomes a queued turn of the agent's lease."""

from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers

from leases import leasing
from leases.api.base import schema
from leases.api.base.fields import JsonObjectField, StrictIntegerField, StrictSerializer, build_did_field, validate_url_value
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.views import ApiRequest, ApiView
from leases.api.leases import ACQUIRE_SERIALIZER
from leases.api.queue_fields import QueuedRunSerializer, serialize_queued_run
from leases.api.turns import MAX_TURN_BODY_BYTES, MAX_TURN_NUMBER
from leases.errors import NoActiveLease
from leases.models import Lease, LeaseStatus
from leases.queue import queue, runner
from leases.queue.queue import QueueOptions


class EnvironmentEventSerializer(StrictSerializer):
    type = serializers.ChoiceField(["turn"])
    agent_did = build_did_field()
    turn_number = StrictIntegerField(min_value=0, max_value=MAX_TURN_NUMBER)
    state = JsonObjectField(help_text="Input of the turn command, at most 1 MiB.")


EVENT_SERIALIZER = EnvironmentEventSerializer()


class EnvironmentEventListView(ApiView):
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
        `webhook-id` serves as the Idempotency-Key if the request has none."""
        if "HTTP_IDEMPOTENCY_KEY" not in request.META and (event_id := request.META.get("HTTP_WEBHOOK_ID")) is not None:
            request.META["HTTP_IDEMPOTENCY_KEY"] = event_id
        data = self.validate_body(EVENT_SERIALIZER)
        environment_id = validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)
        self.caller.require(data["agent_did"])

        def act(pk: UUID) -> StatusAndBody:
            lease = self._find_lease(data["agent_did"], environment_id)
            row = queue.enqueue(
                pk, agent_did=lease.agent_did, lease=lease, pool=lease.pool, request=build_turn_request(lease, data),
                secrets={"env": {}, "state": data["state"]}, options=QueueOptions(), now=self.now, actor=self.actor,
            )  # fmt: skip
            runner.get_runner().notify()
            return 202, serialize_queued_run(row)

        return self.execute_once(act)

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
