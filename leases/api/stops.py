"""Stop of all work of an agent, of an environment or of the installation."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound

from leases import stops
from leases.api.base import schema
from leases.api.base.fields import StrictBooleanField, StrictSerializer, validate_url_value
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.permissions import HasKey, IsUnrestrictedOperator, OperatorWrites
from leases.api.base.views import ApiRequest, ApiView
from leases.api.environment_rows import EnvironmentApiView
from leases.api.leases import ACQUIRE_SERIALIZER
from leases.models import Agent
from leases.stops import Scope, StopResult
from leases.tasks import begin_reclaim


class StopSerializer(StrictSerializer):
    end_leases = StrictBooleanField(
        default=False,
        help_text="End the active leases, too. Their last states are stored.",
    )


class StopFailureSerializer(serializers.Serializer):
    kind = serializers.ChoiceField(stops.FAILURE_KINDS)
    id = serializers.CharField()
    detail = serializers.CharField()


class StoppedSerializer(serializers.Serializer):
    queued_runs = serializers.IntegerField(help_text="Queued runs that this call has interrupted.")
    agent_runs = serializers.IntegerField(help_text="Agent runs without the queue that this call has interrupted.")
    commands = serializers.IntegerField(help_text="Commands and turns that were killed, those of these runs included.")
    processes = serializers.IntegerField(help_text="Background processes that were killed.")
    leases = serializers.ListField(child=serializers.UUIDField(), help_text="Leases that this call has ended.")
    failures = StopFailureSerializer(many=True, help_text="Rows that could not be stopped. Repeat the request.")


STOP_SERIALIZER = StopSerializer()


class StopView(ApiView):
    """Base of the views that stop the work of a scope."""

    def stop(self, scope: Scope) -> HttpResponse:
        data = self.validate_body(STOP_SERIALIZER)

        def act(_: UUID) -> StatusAndBody:
            result = stops.stop(scope, end_leases=data["end_leases"], now=self.now, actor=self.actor)
            if result.leases:
                begin_reclaim(result.leases)
            return 200, serialize_result(result)

        return self.execute_once(act)


class AgentStopView(StopView):
    permission_classes = [HasKey, OperatorWrites]

    @extend_schema(
        operation_id="agents_stop",
        summary="Stop all work of an agent",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=StopSerializer,
        responses=schema.build_responses(StoppedSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, did: str) -> HttpResponse:
        """Interrupt the agent's queued runs and agent runs, and kill its commands, turns and background processes.

        Idempotent. Work that begins afterwards is not affected: end the leases, or revoke the API key. Operator keys only."""
        did = validate_url_value(ACQUIRE_SERIALIZER, "agent_did", did)
        if not Agent.objects.filter(did=did).exists():
            raise NotFound("There is no such agent.")
        return self.stop(Scope(agent_did=did))


class EnvironmentStopView(StopView, EnvironmentApiView):
    @extend_schema(
        operation_id="environments_stop",
        summary="Stop all work in an environment",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=StopSerializer,
        responses=schema.build_responses(StoppedSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Stop the work of all agents in the environment, as for one agent. The environment stays open. Operator keys only."""
        return self.stop(Scope(environment_id=self.get_environment(environment_id).pk))


class InstallationStopView(StopView):
    permission_classes = [HasKey, IsUnrestrictedOperator]

    @extend_schema(
        operation_id="stop",
        summary="Stop all work of the installation",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=StopSerializer,
        responses=schema.build_responses(StoppedSerializer, 409, 413, 415),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Stop the work of all agents, as for one agent. Only operators' keys without a list of pools."""
        return self.stop(Scope())


def serialize_result(result: StopResult) -> dict[str, Any]:
    return {
        "queued_runs": result.queued_runs,
        "agent_runs": result.agent_runs,
        "commands": result.commands,
        "processes": result.processes,
        "leases": [str(lease.pk) for lease in result.leases],
        "failures": [{"kind": each.kind, "id": each.id, "detail": each.detail} for each in result.failures],
    }
