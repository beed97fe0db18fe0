"""Turns of a lease: list, take."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db.models import QuerySet
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import turns
from leases.api.base import schema
from leases.api.base.fields import FailedByField, JsonObjectField, StrictIntegerField, StrictSerializer
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.failed_by import classify_turn
from leases.models import EnvironmentType, Turn
from sandboxes.claims import KILL_GRACE

MAX_TURN_BODY_BYTES = (1 << 20) + 1024  # the state of a turn, at most 1 MiB, and its envelope
MAX_TURN_NUMBER = 1 << 62


class PlayTurnSerializer(StrictSerializer):
    turn_number = StrictIntegerField(min_value=0, max_value=MAX_TURN_NUMBER)
    state = JsonObjectField(help_text="Input of the turn command, at most 1 MiB.")


class TurnSerializer(serializers.Serializer):
    turn_number = serializers.IntegerField(max_value=MAX_TURN_NUMBER)
    action = JsonObjectField(help_text='Output of the turn command; {"action": "skip_turn", "reason": …} if the turn failed.')
    skipped = serializers.BooleanField()
    failed_by = FailedByField()
    run_id = serializers.UUIDField(allow_null=True)
    duration_seconds = serializers.FloatField(allow_null=True, help_text="Null while the turn is in progress.")


TURN_SERIALIZER = PlayTurnSerializer()


class TurnListView(LeaseApiView):
    max_body_bytes = MAX_TURN_BODY_BYTES

    @extend_schema(
        operation_id="leases_turns_list",
        summary="List turns",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(TurnSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the turns of a lease, newest first."""
        page, next_url = paginate(list_turns(self.lease.pk), "started_at", request)
        return Response({"results": [serialize_turn(turn) for turn in page], "next": next_url})

    @extend_schema(
        operation_id="leases_take_turn",
        summary="Take a turn",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=PlayTurnSerializer,
        responses=schema.build_responses(TurnSerializer, 402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Run the turn command of the environment type with `state` on its stdin and return the action that it prints.

        A repeated `turn_number` returns the stored action without running the command."""
        data = self.validate_body(TURN_SERIALIZER)
        environment_type = EnvironmentType.objects.get(name=self.lease.environment_type_id)

        def act(run_id: UUID) -> StatusAndBody:
            turn = turns.take_turn(pk, data["turn_number"], data["state"], now=self.now, actor=self.actor)
            return 200, serialize_turn(turn)

        max_duration: timedelta = (
            settings.SANDBOX_START_TIMEOUT + (environment_type.turn_timeout or settings.TURN_TIMEOUT) + 3 * KILL_GRACE
        )
        return self.execute_once(act, max_duration=max_duration)


def list_turns(lease: UUID) -> QuerySet[Turn]:
    """Select the turns of a lease with their runs, without the output of these."""
    return Turn.objects.filter(lease=lease).select_related("run").defer("state", "run__stdout", "run__stderr")


def serialize_turn(turn: Turn) -> dict[str, Any]:
    return {
        "turn_number": turn.number,
        "action": turn.action,
        "skipped": turn.skipped,
        "failed_by": classify_turn(turn),
        "run_id": str(turn.run_id) if turn.run_id else None,
        "duration_seconds": (turn.ended_at - turn.started_at).total_seconds() if turn.ended_at else None,
    }
