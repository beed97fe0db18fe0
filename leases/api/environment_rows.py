"""Environments: list, create, get, change the phase, start, end."""

from typing import Any
from uuid import UUID

from django.db.models import Exists, OuterRef, QuerySet
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from billing.pricing import format_decimal
from leases import leasing
from leases.api.base import schema
from leases.api.base.fields import JsonField, PatternField, StrictCharField, StrictSerializer, validate_url_value
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.permissions import HasKey, OperatorWrites
from leases.api.base.views import ApiRequest, ApiView
from leases.api.leases import ACQUIRE_SERIALIZER, EMPTY_SERIALIZER
from leases.environments import lifecycle, play
from leases.environments.models import Environment
from leases.errors import EnvironmentNotFound, InvalidRequest
from leases.models import ENVIRONMENT_ID_DESCRIPTION, ENVIRONMENT_ID_PATTERN, Lease, LeaseStatus
from leases.tasks import begin_reclaim
from sandboxes.db.clock import format_optional_timestamp, format_timestamp


class PhaseSerializer(StrictSerializer):
    phase = StrictCharField(max_length=64, allow_blank=True, help_text='Part of the game, such as "combat".')


class NewEnvironmentSerializer(StrictSerializer):
    environment_id = PatternField(ENVIRONMENT_ID_PATTERN, ENVIRONMENT_ID_DESCRIPTION)
    type = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", help_text="Environment type.")
    phase = StrictCharField(max_length=64, allow_blank=True, default="")


class EndEnvironmentSerializer(StrictSerializer):
    outcome = JsonField(required=False, help_text="Result, any JSON value.")


class EnvironmentSerializer(serializers.Serializer):
    environment_id = serializers.CharField()
    type = serializers.CharField(help_text="Environment type.")
    phase = serializers.CharField()
    created_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    end_reason = serializers.CharField(
        help_text="Empty until the end, then operator, unused or condition:<name>. A lease that is granted later opens the "
        "environment again."
    )
    outcome = JsonField(allow_null=False, help_text="Result as told at the end, null without one.")


class EnvironmentMemberSerializer(serializers.Serializer):
    lease_id = serializers.UUIDField()
    agent_did = serializers.CharField()
    status = serializers.ChoiceField(LeaseStatus.choices)
    leased_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    end_reason = serializers.CharField()
    turns = serializers.IntegerField()
    skipped_turns = serializers.IntegerField()


class EnvironmentCostsSerializer(serializers.Serializer):
    usd = serializers.CharField(help_text="Decimal number in USD: cost records of the leases, which are derived hourly.")
    model_calls_usd = serializers.CharField(help_text="Decimal number in USD: model calls of the leases up to now.")


class EnvironmentDetailSerializer(EnvironmentSerializer):
    members = EnvironmentMemberSerializer(
        many=True, help_text="Leases that the key may see, ended ones too, newest first, at most 200."
    )
    costs = EnvironmentCostsSerializer(help_text="Of these members.")


class EndedEnvironmentSerializer(EnvironmentSerializer):
    ended = serializers.ListField(child=serializers.UUIDField(), help_text="Ids of the leases that this call ended.")


NEW_ENVIRONMENT_SERIALIZER = NewEnvironmentSerializer()
PHASE_SERIALIZER = PhaseSerializer()
END_SERIALIZER = EndEnvironmentSerializer()


class EnvironmentApiView(ApiView):
    """Base of the views of environments. An agent's key sees those in which one of its agents has or had a lease."""

    permission_classes = [HasKey, OperatorWrites]

    def find_visible(self) -> QuerySet[Environment]:
        if self.caller.key.operator:
            return Environment.objects.all()
        own = self.caller.visible_leases().filter(environment_id=OuterRef("pk"))
        return Environment.objects.filter(Exists(own))

    def get_environment(self, environment_id: str) -> Environment:
        environment_id = validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)
        environment = self.find_visible().filter(pk=environment_id).first()
        if environment is None:
            raise EnvironmentNotFound()
        return environment


class EnvironmentListView(EnvironmentApiView):
    @extend_schema(
        operation_id="environments_list",
        summary="List environments",
        parameters=[*schema.PAGE_PARAMETERS, *schema.ENVIRONMENT_FILTER_PARAMETERS],
        responses=schema.build_responses(schema.build_page_serializer(EnvironmentSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the environments in which an agent of the key has or had a lease, newest first. An operator's key sees all."""
        rows = self.find_visible()
        if "type" in request.GET:
            rows = rows.filter(type__name=validate_url_value(NEW_ENVIRONMENT_SERIALIZER, "type", request.GET["type"]))
        if (is_open := request.GET.get("open")) is not None:
            if is_open not in ("0", "1"):
                raise InvalidRequest("open", "Must be 0 or 1.")
            rows = rows.filter(ended_at__isnull=is_open == "1")
        page, next_url = paginate(rows, "created_at", request)
        return Response({"results": [serialize_environment(row) for row in page], "next": next_url})

    @extend_schema(
        operation_id="environments_create",
        summary="Create an environment",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewEnvironmentSerializer,
        responses=schema.build_responses(EnvironmentSerializer, 409, 413, 415, ok=(200, 201)),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Create an environment that has not started (201), or return the existing one unchanged (200). Operator keys only.

        An environment is also created, and started, by its first lease."""
        data = self.validate_body(NEW_ENVIRONMENT_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            row, is_new = lifecycle.create(
                data["environment_id"], data["type"], phase=data["phase"], now=self.now, actor=self.actor
            )
            return 201 if is_new else 200, serialize_environment(row)

        return self.execute_once(act)


class EnvironmentView(EnvironmentApiView):
    @extend_schema(
        operation_id="environments_get",
        summary="Get an environment",
        responses=schema.build_responses(EnvironmentDetailSerializer, 404),
    )
    def get(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Return an environment with its members and costs."""
        environment = self.get_environment(environment_id)
        members = play.list_members(self.caller.visible_leases(), environment.pk)
        counts = play.count_turns(members)
        costs = play.sum_costs(play.calculate_costs(members))
        for lease in members:
            leasing.apply_elapsed_clock(lease, self.now)
        return Response({
            **serialize_environment(environment),
            "members": [_serialize_member(lease, counts.get(lease.pk, play.TurnTotals())) for lease in members],
            "costs": {"usd": format_decimal(costs.total), "model_calls_usd": format_decimal(costs.model_calls)},
        })  # fmt: skip

    @extend_schema(
        operation_id="environments_update",
        summary="Set the phase of an environment",
        request=PhaseSerializer,
        responses=schema.build_responses(EnvironmentSerializer, 404, 409, 413, 415),
    )
    def patch(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Set the phase. Operator keys only."""
        phase = self.validate_body(PHASE_SERIALIZER)["phase"]
        environment_id = self.get_environment(environment_id).pk
        lifecycle.set_phase(environment_id, phase, actor=self.actor)
        return Response(serialize_environment(lifecycle.find(environment_id)))


class EnvironmentStartView(EnvironmentApiView):
    @extend_schema(
        operation_id="environments_start",
        summary="Start an environment",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(EnvironmentSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Record the start of an environment. One that has started is returned unchanged. Operator keys only."""
        self.validate_body(EMPTY_SERIALIZER)
        environment_id = self.get_environment(environment_id).pk

        def act(run_id: UUID) -> StatusAndBody:
            lifecycle.start(environment_id, now=self.now, actor=self.actor)
            return 200, serialize_environment(lifecycle.find(environment_id))

        return self.execute_once(act)


class EnvironmentEndView(EnvironmentApiView):
    @extend_schema(
        operation_id="environments_end",
        summary="End an environment",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=EndEnvironmentSerializer,
        responses=schema.build_responses(EndedEnvironmentSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """End an environment and its active leases. The time and outcome of a first end stay. Operator keys only."""
        data = self.validate_body(END_SERIALIZER)
        environment_id = self.get_environment(environment_id).pk

        def act(run_id: UUID) -> StatusAndBody:
            outcome = data.get("outcome", lifecycle.NOTHING)
            ended = lifecycle.end(environment_id, outcome=outcome, now=self.now, actor=self.actor)
            if ended:
                begin_reclaim(ended)
            row = serialize_environment(lifecycle.find(environment_id))
            return 200, {**row, "ended": [str(lease.pk) for lease in ended]}

        return self.execute_once(act)


def serialize_environment(row: Environment) -> dict[str, Any]:
    return {
        "environment_id": row.pk,
        "type": row.type_id,
        "phase": row.phase,
        "created_at": format_timestamp(row.created_at),
        "started_at": format_optional_timestamp(row.started_at),
        "ended_at": format_optional_timestamp(row.ended_at),
        "end_reason": row.end_reason,
        "outcome": row.outcome,
    }


def _serialize_member(lease: Lease, turns: play.TurnTotals) -> dict[str, Any]:
    return {
        "lease_id": str(lease.pk),
        "agent_did": lease.agent_did,
        "status": lease.status,
        "leased_at": format_timestamp(lease.leased_at),
        "ended_at": format_optional_timestamp(lease.ended_at),
        "end_reason": lease.end_reason,
        "turns": turns.turns,
        "skipped_turns": turns.skipped,
    }
