"""Environments: list, create, get, change the phase, start, end."""

import json
from typing import Any
from uuid import UUID

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from billing.pricing import format_decimal
from leases import leasing
from leases.api.base import schema
from leases.api.base.fields import (
    JsonField,
    PatternField,
    StrictBooleanField,
    StrictCharField,
    StrictSerializer,
    build_agents_field,
    build_project_field,
    validate_url_value,
)
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.permissions import HasKey, OperatorWrites
from leases.api.base.signatures import GameServer, HasSignature, SignableView
from leases.api.base.views import ApiRequest, ApiView
from leases.api.leases import ACQUIRE_SERIALIZER, EMPTY_SERIALIZER
from leases.environments import lifecycle, participants, play
from leases.environments.models import Environment, EnvironmentOutcome, Participant
from leases.errors import EnvironmentNotFound, InvalidRequest
from leases.models import ENVIRONMENT_ID_DESCRIPTION, ENVIRONMENT_ID_PATTERN, Lease, LeaseStatus
from leases.tasks import begin_reclaim
from sandboxes.db.clock import format_optional_timestamp, format_timestamp

ACCESS_HELP = "Every agent of the project may enter, not only the participants."
MAX_ROWS = 200  # of a list in the document of an environment


class EnvironmentChangeSerializer(StrictSerializer):
    phase = StrictCharField(max_length=64, allow_blank=True, required=False, help_text='Part of the game, such as "combat".')
    open_to_project = StrictBooleanField(required=False, help_text=ACCESS_HELP)


class NewEnvironmentSerializer(StrictSerializer):
    environment_id = PatternField(ENVIRONMENT_ID_PATTERN, ENVIRONMENT_ID_DESCRIPTION)
    type = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", help_text="Environment type.")
    phase = StrictCharField(max_length=64, allow_blank=True, default="")
    project = build_project_field()
    agents = build_agents_field(default=list, help_text="Participants: agents that may enter the environment.")
    open_to_project = StrictBooleanField(required=False, help_text=f"{ACCESS_HELP} Default: as the environment type says.")
    reopen = StrictBooleanField(default=False, help_text="Open an ended environment of this id again, with these values.")


class ParticipantsSerializer(StrictSerializer):
    agents = build_agents_field(help_text="Agents that may enter the environment.", min_length=1)


class EndEnvironmentSerializer(StrictSerializer):
    outcome = JsonField(required=False, help_text="Result, any JSON value.")


class EnvironmentSerializer(serializers.Serializer):
    environment_id = serializers.CharField()
    type = serializers.CharField(help_text="Environment type.")
    project = serializers.CharField()
    open_to_project = serializers.BooleanField(help_text=ACCESS_HELP)
    phase = serializers.CharField()
    created_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    end_reason = serializers.CharField(
        help_text="Empty until the end, then operator, unused or condition:<name>. The next lease of an agent that may enter "
        "opens an unused environment again; only an operator opens another one."
    )
    outcome = JsonField(allow_null=False, help_text="Result of the last end that had one, null without.")


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
    estimated_usd = serializers.CharField(help_text="Estimated part of `usd`, of model calls whose usage is unknown.")
    unpriced_calls = serializers.IntegerField(help_text="Number of model calls without a price, which `usd` does not include.")
    model_calls_usd = serializers.CharField(help_text="Decimal number in USD: model calls of the leases up to now.")


class EnvironmentOutcomeSerializer(serializers.Serializer):
    ended_at = serializers.DateTimeField()
    recorded_at = serializers.DateTimeField()
    outcome = JsonField(allow_null=False, help_text="Result as an operator or the game server gave it.")


class EnvironmentDetailSerializer(EnvironmentSerializer):
    participants = serializers.ListField(
        child=serializers.CharField(), help_text="Agents that may enter, of those for which the key may act; at most 200."
    )
    outcomes = EnvironmentOutcomeSerializer(many=True, help_text="Results of all ends, newest first, at most 200.")
    members = EnvironmentMemberSerializer(
        many=True, help_text="Leases that the key may see, ended ones too, newest first, at most 200."
    )
    costs = EnvironmentCostsSerializer(help_text="Of these members.")


class EndedLeasesSerializer(serializers.Serializer):
    ended = serializers.ListField(child=serializers.UUIDField(), help_text="Ids of the leases that this call ended.")


class EndedEnvironmentSerializer(EnvironmentSerializer):
    ended = serializers.ListField(child=serializers.UUIDField(), help_text="Ids of the leases that this call ended.")


NEW_ENVIRONMENT_SERIALIZER = NewEnvironmentSerializer()
CHANGE_SERIALIZER = EnvironmentChangeSerializer()
PARTICIPANTS_SERIALIZER = ParticipantsSerializer()
END_SERIALIZER = EndEnvironmentSerializer()


class EnvironmentApiView(ApiView):
    """Base of the views of environments. An agent's key sees those of its project that one of its agents may enter."""

    permission_classes = [HasKey, OperatorWrites]

    def find_visible(self) -> QuerySet[Environment]:
        rows = Environment.objects.select_related("project").with_outcome()
        if self.caller.key.operator:
            return rows
        own = Participant.objects.filter(environment=OuterRef("pk"), agent_did__in=self.caller.key.dids)
        return rows.filter(Q(open_to_project=True) | Exists(own), project=self.caller.key.project_id)

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
        """Return the environments that an agent of the key may enter, newest first. An operator's key sees all."""
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

        An environment is also created, and started, by the first lease of an agent, which alone may enter it then, unless the
        type opens its environments to the project. Such an environment is answered 409 here unless its agents are
        named, and so is one with other values. Keys of agents do not open an ended environment again; `reopen` does (201)."""
        data = self.validate_body(NEW_ENVIRONMENT_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            environment = lifecycle.NewEnvironment(
                data["environment_id"], data["type"], phase=data["phase"], project=data.get("project") or "",
                agents=data["agents"], open_to_project=data.get("open_to_project"), reopen=data["reopen"],
            )  # fmt: skip
            row, is_new = lifecycle.create(environment, now=self.now, actor=self.actor)
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
            "participants": self._list_participants(environment),
            "outcomes": [_serialize_outcome(row) for row in environment.outcomes.all()[:MAX_ROWS]],
            "members": [_serialize_member(lease, counts.get(lease.pk, play.TurnTotals())) for lease in members],
            "costs": _serialize_costs(costs),
        })  # fmt: skip

    @extend_schema(
        operation_id="environments_update",
        summary="Change the phase or the access of an environment",
        request=EnvironmentChangeSerializer,
        responses=schema.build_responses(EnvironmentSerializer, 404, 409, 413, 415),
    )
    def patch(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Set the phase, who may enter, or both. Operator keys only."""
        data = self.validate_body(CHANGE_SERIALIZER)
        environment_id = self.get_environment(environment_id).pk
        if "open_to_project" in data:
            participants.set_access(environment_id, data["open_to_project"], now=self.now, actor=self.actor)
        if "phase" in data:
            lifecycle.set_phase(environment_id, data["phase"], now=self.now, actor=self.actor)
        return Response(serialize_environment(lifecycle.find(environment_id)))

    def _list_participants(self, environment: Environment) -> list[str]:
        rows = environment.participants.all()
        if not self.caller.key.operator:
            rows = rows.filter(agent_did__in=self.caller.key.dids)
        return list(rows.values_list("agent_did", flat=True)[:MAX_ROWS])


def _serialize_costs(costs: play.Costs) -> dict[str, Any]:
    return {
        "usd": format_decimal(costs.total),
        "estimated_usd": format_decimal(costs.uncertainty.estimated_usd),
        "unpriced_calls": costs.uncertainty.unpriced,
        "model_calls_usd": format_decimal(costs.model_calls),
    }


class ParticipantListView(EnvironmentApiView):
    @extend_schema(
        operation_id="environments_add_participants",
        summary="Add participants to an environment",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=ParticipantsSerializer,
        responses=schema.build_responses(ParticipantsSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Let agents of the environment's project enter it. Returns all participants. Idempotent. Operator keys only."""
        data = self.validate_body(PARTICIPANTS_SERIALIZER)
        environment = self.get_environment(environment_id)

        def act(run_id: UUID) -> StatusAndBody:
            participants.add(environment.pk, data["agents"], now=self.now, actor=self.actor)
            return 200, {"agents": list(environment.participants.values_list("agent_did", flat=True))}

        return self.execute_once(act)


class ParticipantView(EnvironmentApiView):
    @extend_schema(
        operation_id="environments_remove_participant",
        summary="Remove a participant from an environment",
        responses=schema.build_responses(EndedLeasesSerializer, 404, 409),
    )
    def delete(self, request: ApiRequest, environment_id: str, agent_did: str) -> HttpResponse:
        """Remove an agent from the participants, and end its active lease. Idempotent. Operator keys only.

        409 for an environment that is open to its project."""
        environment_id = self.get_environment(environment_id).pk
        agent_did = validate_url_value(ACQUIRE_SERIALIZER, "agent_did", agent_did)
        ended = participants.remove(environment_id, agent_did, now=self.now, actor=self.actor)
        if ended:
            begin_reclaim(ended)
        return Response({"ended": [str(lease.pk) for lease in ended]})


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


class EnvironmentEndView(SignableView, EnvironmentApiView):
    permission_classes = [HasSignature | (HasKey & OperatorWrites)]

    @extend_schema(
        operation_id="environments_end",
        summary="End an environment",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=EndEnvironmentSerializer,
        responses=schema.build_responses(EndedEnvironmentSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """End an environment and its active leases.

        With an operator's key, or signed by the game server with a secret of the environment, as events are. Repeated: the time
        of the end stays, and so does its outcome if it has one."""
        data = self.validate_body(END_SERIALIZER)
        if isinstance(request.user, GameServer):
            return Response(self._end(request.user.environment_id, data, actor=request.user.name))
        environment_id = self.get_environment(environment_id).pk
        return self.execute_once(lambda run_id: (200, self._end(environment_id, data, actor=self.actor)))

    def _end(self, environment_id: str, data: dict[str, Any], *, actor: str) -> dict[str, Any]:
        outcome = data.get("outcome", lifecycle.NOTHING)
        ended = lifecycle.end(environment_id, outcome=outcome, now=self.now, actor=actor)
        if ended:
            begin_reclaim(ended)
        return {**serialize_environment(lifecycle.find(environment_id)), "ended": [str(lease.pk) for lease in ended]}


def serialize_environment(row: Environment) -> dict[str, Any]:
    return {
        "environment_id": row.pk,
        "type": row.type_id,
        "project": row.project.name,
        "open_to_project": row.open_to_project,
        "phase": row.phase,
        "created_at": format_timestamp(row.created_at),
        "started_at": format_optional_timestamp(row.started_at),
        "ended_at": format_optional_timestamp(row.ended_at),
        "end_reason": row.end_reason,
        "outcome": row.outcome,
    }


def _serialize_outcome(row: EnvironmentOutcome) -> dict[str, Any]:
    return {
        "ended_at": format_timestamp(row.ended_at),
        "recorded_at": format_timestamp(row.recorded_at),
        "outcome": json.loads(row.text),
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
