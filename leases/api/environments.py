"""Environments: joining and conditions."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import Http404, HttpResponse
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.response import Response

from leases import admission, conditions, leasing, turns
from leases.api.base import schema
from leases.api.base.fields import (
    MAX_NAMED_AGENTS,
    JsonField,
    PatternField,
    StrictIntegerField,
    StrictSerializer,
    build_did_field,
    validate_url_value,
)
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.permissions import HasKey
from leases.api.base.views import ApiRequest, ApiView
from leases.api.environment_rows import EndedLeasesSerializer, EnvironmentApiView
from leases.api.leases import ACQUIRE_SERIALIZER, LeaseSerializer, NewLeaseSerializer, build_lease_request, serialize_lease
from leases.environments import lifecycle
from leases.errors import NotAllowed
from leases.grants import issuers
from leases.models import CONDITION_DESCRIPTION, CONDITION_PATTERN
from leases.tasks import begin_reclaim
from sandboxes.claims import KILL_GRACE
from sandboxes.db import database_time


@extend_schema_field({
    "oneOf": [
        {"type": "string", "maxLength": 255},
        {
            "type": "array", "items": {"type": "string", "maxLength": 255}, "minItems": 1, "maxItems": MAX_NAMED_AGENTS,
            "uniqueItems": True,
        },
    ]
})  # fmt: skip
class AgentsField(serializers.Field):
    """A DID or a list of different DIDs, always returned as a list."""

    def to_internal_value(self, data: Any) -> list[str]:
        values = data if isinstance(data, list) else [data]
        if not 1 <= len(values) <= MAX_NAMED_AGENTS:
            raise serializers.ValidationError(f"Must be a DID, or a list of 1 to {MAX_NAMED_AGENTS} DIDs.")
        dids = [DID_FIELD.run_validation(value) for value in values]
        if len(set(dids)) < len(dids):
            raise serializers.ValidationError("Must not contain a DID twice.")
        return dids


class ConditionSerializer(StrictSerializer):
    condition = PatternField(CONDITION_PATTERN, CONDITION_DESCRIPTION)
    agent_did = AgentsField(
        required=False,
        help_text="Agent, or list of agents, whose leases end, as for `agent.death`. Default: every agent that the key may "
        "act for.",
    )
    outcome = JsonField(
        required=False, help_text="Result, any JSON value: stored if this call ends the environment. Operator keys only."
    )


class JoinSerializer(NewLeaseSerializer):
    wait_seconds = StrictIntegerField(
        min_value=0,
        required=False,
        allow_null=True,
        help_text="If the pool is full, wait this long for a place, at most LEASEHOLD_MAX_JOIN_WAIT (1 minute). "
        "If no place becomes free, the answer is 503 `capacity_exhausted` with `position` and `queue_length`; the position is "
        "kept for a request that is repeated within 15 seconds. 0: take a position and answer at once. Absent: do not wait.",
    )

    def validate_wait_seconds(self, value: int | None) -> int | None:
        maximum = int(settings.MAX_JOIN_WAIT.total_seconds())
        if value is not None and value > maximum:
            raise serializers.ValidationError(f"Ensure this value is less than or equal to {maximum}.")
        return value


class QueuePositionSerializer(serializers.Serializer):
    agent_did = serializers.CharField()
    environment_id = serializers.CharField()
    pool = serializers.CharField()
    position = serializers.IntegerField(min_value=1, help_text="1: the next free place is for this request.")
    queue_length = serializers.IntegerField(min_value=1, help_text="Requests that wait for a place in this pool.")
    enqueued_at = serializers.DateTimeField()


DID_FIELD = build_did_field()
JOIN_SERIALIZER = JoinSerializer()
CONDITION_SERIALIZER = ConditionSerializer()


class EnvironmentJoinView(ApiView):
    @extend_schema(
        operation_id="environments_join",
        summary="Join an environment",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=JoinSerializer,
        responses=schema.build_responses(LeaseSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Acquire a lease like `POST /leases`, and start its sandbox with /workspace/config.json.

        The response is sent once the sandbox is ready. A pre-warmed sandbox gets its files with its first operation. The
        lease is granted together with its place. A request that is answered with an error leaves no new lease."""
        data = self.validate_body(JOIN_SERIALIZER)
        data["environment_id"] = validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)
        self.caller.require(data["agent_did"])

        seconds = data.get("wait_seconds")
        wait = None if seconds is None else timedelta(seconds=seconds)

        def act(run_id: UUID) -> StatusAndBody:
            lease, is_new, sandbox = turns.join_environment(
                build_lease_request(data, self.caller), wait=wait, now=self.now, actor=self.actor,
                admit=self.admit_after_wait if wait else self.consume_creation_token,
            )  # fmt: skip
            shown = serialize_lease(leasing.apply_elapsed_clock(lease, self.now), sandbox, is_new=is_new)
            return 201 if is_new else 200, shown

        max_duration = (wait or timedelta(0)) + settings.SANDBOX_START_TIMEOUT + 2 * KILL_GRACE
        return self.execute_once(act, max_duration=max_duration)

    def admit_after_wait(self) -> None:
        """Count the new lease. Raise GrantEnded if the key was revoked or has expired while the request waited."""
        issuers.require_alive(self.right, now=database_time.now())
        self.consume_creation_token()

    @extend_schema(
        operation_id="environments_get_position",
        summary="Get the position of a join in the queue",
        parameters=[schema.QUEUED_AGENT_PARAMETER],
        responses=schema.build_responses(QueuePositionSerializer, 404),
    )
    def get(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Return the position of a join with `wait_seconds` while it waits for a place. 404 if none waits."""
        did = validate_url_value(ACQUIRE_SERIALIZER, "agent_did", request.GET.get("agent_did", ""))
        environment_id = validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)
        self.caller.require(did)
        found = admission.find_position(did, environment_id, now=self.now)
        if found is None or found[1].enqueued_at is None:
            raise Http404
        pool, position = found
        return Response({
            "agent_did": did,
            "environment_id": environment_id,
            "pool": pool.name,
            "position": position.number,
            "queue_length": position.length,
            "enqueued_at": position.enqueued_at,
        })  # fmt: skip


class EnvironmentConditionView(EnvironmentApiView):
    permission_classes = [HasKey]

    @extend_schema(
        operation_id="environments_post_condition",
        summary="Post a condition",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=ConditionSerializer,
        responses=schema.build_responses(EndedLeasesSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """End the active leases in an environment that list the condition, in one transaction.

        If no lease is active afterwards, the environment ends too.

        An agent's key ends only leases of its own agents, an operator's key all. `agent_did` restricts this to the agents that
        the condition concerns; a key that may not act for one of them is answered 403. An agent's key gives no outcome, and
        finds only environments that one of its agents may enter."""
        data = self.validate_body(CONDITION_SERIALIZER)
        if self.caller.key.operator:
            environment_id = validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)
        else:
            environment_id = self.get_environment(environment_id).pk
            if "outcome" in data:
                raise NotAllowed("An outcome requires an operator's key.", field="outcome")
        agents = data.get("agent_did")
        for did in agents or ():
            self.caller.require(did)
        if agents is None and not self.caller.key.operator:
            agents = self.caller.key.dids

        def act(run_id: UUID) -> StatusAndBody:
            ended = conditions.post_condition(
                environment_id, data["condition"], now=self.now, agents=agents,
                outcome=data.get("outcome", lifecycle.NOTHING), actor=self.actor,
            )  # fmt: skip
            if ended:
                begin_reclaim(ended)
            return 200, {"ended": [str(lease.pk) for lease in ended]}

        return self.execute_once(act)
