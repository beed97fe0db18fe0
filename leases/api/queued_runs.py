"""Queue of runs: list, get, interrupt, totals. Runs are added by POST /runs and POST /leases/{id}/agent-runs."""

from typing import Any
from uuid import UUID

from django.conf import settings
from django.db.models import QuerySet
from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.agent_runs.models import AgentRun
from leases.api.base import schema
from leases.api.base.fields import StrictSerializer, StrictUUIDField, build_did_field, parse_encoding
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, ApiView
from leases.api.queue_fields import (
    QueuedRunOutputSerializer,
    QueuedRunSerializer,
    serialize_queued_run,
    serialize_queued_run_output,
    serialize_queued_runs,
)
from leases.errors import InvalidRequest, QueuedRunNotFound
from leases.queue import queue, running, statistics
from leases.queue.models import QueuedRun, QueuedRunState

STATE_PARAMETER = OpenApiParameter("state", str, OpenApiParameter.QUERY, enum=QueuedRunState.values)
LEASE_PARAMETER = OpenApiParameter("lease_id", OpenApiTypes.UUID, OpenApiParameter.QUERY)


class QueueFilterSerializer(StrictSerializer):
    agent_did = build_did_field()
    lease_id = StrictUUIDField(required=False, allow_null=True)
    states = serializers.ListField(
        child=serializers.ChoiceField(["queued", "started"]), default=["queued", "started"], help_text="Default: both."
    )


class InterruptedSerializer(serializers.Serializer):
    interrupted = serializers.IntegerField(help_text="Number of interrupted runs.")


class QueueStatsSerializer(serializers.Serializer):
    counts = serializers.DictField(child=serializers.IntegerField(), help_text="Number of queued runs by state.")
    direct_agent_runs = serializers.IntegerField(help_text="Agent runs in progress that were started without the queue.")
    running = serializers.IntegerField(help_text="Runs in progress, to which the limits of running ones apply.")
    oldest_pending_seconds = serializers.FloatField(help_text="Age of the oldest pending run; 0 if there is none.")
    limits = serializers.DictField(child=serializers.IntegerField(), help_text="Settings of the server.")


FILTER_SERIALIZER = QueueFilterSerializer()


class QueueView(ApiView):
    """Base of the views of the queue. A key sees the runs of its agents, an operator's key all."""

    def get_visible(self) -> QuerySet[QueuedRun]:
        return queue.filter_agents(QueuedRun.objects.all(), self._get_agents())

    def get_visible_agent_runs(self) -> QuerySet[AgentRun]:
        agents = self._get_agents()
        return AgentRun.objects.all() if agents is None else AgentRun.objects.filter(lease__agent_did__in=agents)

    def _get_agents(self) -> list[str] | None:
        return None if self.caller.key.operator else list(self.caller.key.dids)

    def get_row(self, pk: UUID) -> QueuedRun:
        row = self.get_visible().filter(pk=pk).first()
        if row is None:
            raise QueuedRunNotFound()
        return row


class QueuedRunListView(QueueView):
    @extend_schema(
        operation_id="queued_runs_list",
        summary="List queued runs",
        parameters=[*schema.PAGE_PARAMETERS, STATE_PARAMETER, LEASE_PARAMETER],
        responses=schema.build_responses(schema.build_page_serializer(QueuedRunSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the queued runs of the key's agents, newest first."""
        rows, state = self.get_visible(), request.GET.get("state")
        if state:
            if state not in QueuedRunState.values:
                raise InvalidRequest("state", f"Must be one of {', '.join(QueuedRunState.values)}.")
            rows = rows.filter(state=state)
        if lease_id := request.GET.get("lease_id"):
            try:
                rows = rows.filter(lease=UUID(lease_id))
            except ValueError:
                raise InvalidRequest("lease_id", "Not a UUID.") from None
        page, next_url = paginate(rows, "queued_at", request)
        return Response({"results": serialize_queued_runs(page), "next": next_url})


class QueuedRunView(QueueView):
    @extend_schema(
        operation_id="queued_runs_get",
        summary="Get a queued run",
        parameters=[schema.ENCODING_PARAMETER],
        responses=schema.build_responses(QueuedRunOutputSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return one queued run with the stored beginning of its output."""
        return Response(serialize_queued_run_output(self.get_row(pk), parse_encoding(request)))


class QueuedRunInterruptView(QueueView):
    @extend_schema(
        operation_id="queued_runs_interrupt",
        summary="Interrupt a queued run",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(QueuedRunSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """End a pending run at once, or kill the command of a started one. Idempotent; without effect on an ended run."""

        def act(_: UUID) -> StatusAndBody:
            row = self.get_row(pk)
            queue.interrupt(QueuedRun.objects.filter(pk=row.pk), now=self.now)
            row.refresh_from_db()
            return 200, serialize_queued_run(row)

        return self.execute_once(act)


class QueueInterruptView(QueueView):
    @extend_schema(
        operation_id="queued_runs_interrupt_all",
        summary="Interrupt queued runs",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=QueueFilterSerializer,
        responses=schema.build_responses(InterruptedSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Interrupt all pending and started runs of an agent, or those of one lease or state.

        With the state `started` also the agent's direct agent runs, which were started without the queue."""
        data: dict[str, Any] = self.validate_body(FILTER_SERIALIZER)
        self.caller.require(data["agent_did"])
        rows = QueuedRun.objects.filter(agent_did=data["agent_did"], state__in=data["states"])
        direct = AgentRun.objects.filter(lease__agent_did=data["agent_did"])
        if lease_id := data.get("lease_id"):
            lease = self.caller.get_lease(lease_id)
            rows, direct = rows.filter(lease=lease), direct.filter(lease=lease)
        if QueuedRunState.STARTED not in data["states"]:
            direct = direct.none()

        def act(_: UUID) -> StatusAndBody:
            count = queue.interrupt(rows, now=self.now) + running.interrupt_direct(direct, now=self.now)
            return 200, {"interrupted": count}

        return self.execute_once(act)


class QueueStatsView(QueueView):
    @extend_schema(
        operation_id="runs_stats",
        summary="Get totals of runs",
        responses=schema.build_responses(QueueStatsSerializer),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return totals of the key's agents: queued runs by state, agent runs in progress, the age of the oldest pending run.

        The limits are those of the server, for all agents together and for one."""
        stats = statistics.get_stats(self.get_visible(), self.get_visible_agent_runs(), now=self.now)
        limits = {
            "running": settings.QUEUE_MAX_RUNNING,
            "running_per_agent": settings.QUEUE_MAX_RUNNING_PER_AGENT,
            "running_per_pool": settings.QUEUE_MAX_RUNNING_PER_POOL,
            "pending": settings.QUEUE_MAX_PENDING,
            "pending_per_agent": settings.QUEUE_MAX_PENDING_PER_AGENT,
        }
        return Response({
            "counts": dict(stats.counts),
            "direct_agent_runs": stats.direct_agent_runs,
            "running": stats.running,
            "oldest_pending_seconds": stats.oldest_pending_seconds,
            "limits": limits,
        })  # fmt: skip
