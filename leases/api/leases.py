"""Leases: acquire, read, renew, release."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Q
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from billing import metering
from leases import leasing
from leases.api import schema
from leases.api.fields import (
    DurationField,
    PatternField,
    build_did_field,
    build_seconds_field,
    seconds_to_timedelta,
    validate_url_value,
)
from leases.api.idempotency import StatusAndBody
from leases.api.llm_calls import LeaseCallsSerializer, serialize_lease_calls
from leases.api.pagination import paginate
from leases.api.parsers import OpaqueParser
from leases.api.views import ApiRequest, ApiView, HotLeaseApiView, LeaseApiView
from leases.errors import InvalidRequest
from leases.models import (
    CONDITION_DESCRIPTION,
    CONDITION_PATTERN,
    ENVIRONMENT_ID_DESCRIPTION,
    ENVIRONMENT_ID_PATTERN,
    Lease,
    LeaseStatus,
)
from leases.tasks import enqueue_reclaim
from sandboxes.db import sql
from sandboxes.db.clock import format_timestamp
from sandboxes.egress.totals import calculate_totals
from sandboxes.models import GONE_STATES, LlmCall, Sandbox, SandboxState

HELD_SANDBOX_SQL = "holder = %s AND state NOT IN ('destroying', 'destroyed')"


class JoinSerializer(serializers.Serializer):
    agent_did = build_did_field()
    environment_type = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _")
    ttl_seconds = build_seconds_field(help_text="Ends when unused for this long. Default: what the environment type says.")
    max_ttl_seconds = build_seconds_field(help_text="Ends this long after it was granted, whatever happens.")
    sleep_after = DurationField(required=False, allow_null=True, help_text="The sandbox sleeps when unused for this long.")
    expiry_conditions = serializers.ListField(
        child=PatternField(CONDITION_PATTERN, CONDITION_DESCRIPTION), max_length=32, required=False, allow_null=True,
        help_text="Posted facts that end the lease. Default: what the environment type says.",
    )  # fmt: skip
    pool = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True)

    def validate_expiry_conditions(self, value: list[str] | None) -> list[str] | None:
        if value and len(set(value)) < len(value):
            raise serializers.ValidationError("A condition is named twice.")
        return value


class AcquireSerializer(JoinSerializer):
    environment_id = PatternField(ENVIRONMENT_ID_PATTERN, ENVIRONMENT_ID_DESCRIPTION)


class SandboxSerializer(serializers.Serializer):
    id = serializers.UUIDField()
    state = serializers.ChoiceField(SandboxState.choices)
    provider = serializers.CharField()
    isolated = serializers.BooleanField()


class LeaseSerializer(serializers.Serializer):
    id = serializers.UUIDField()
    sandbox_id = serializers.CharField(help_text="Agent and environment: the same for every incarnation of the lease.")
    agent_did = serializers.CharField()
    environment_id = serializers.CharField()
    environment_type = serializers.CharField()
    status = serializers.ChoiceField(LeaseStatus.choices)
    is_new = serializers.BooleanField(help_text="This call granted it.")
    leased_at = serializers.DateTimeField()
    last_activity = serializers.DateTimeField()
    ttl_seconds = serializers.IntegerField()
    expires_at = serializers.DateTimeField(help_text="The earliest of its clocks, as of now.")
    max_expires_at = serializers.DateTimeField()
    sleep_after = serializers.IntegerField(help_text="Seconds.")
    expiry_conditions = serializers.ListField(child=serializers.CharField())
    ended_at = serializers.DateTimeField(allow_null=True)
    end_reason = serializers.CharField(
        help_text="Empty while active; ttl, max_ttl, condition:<name>, released, budget, operator, lost or failed."
    )
    sandbox = SandboxSerializer(allow_null=True, help_text="It comes with the first use.")


class LeaseDetailSerializer(LeaseSerializer):
    seconds_alive = serializers.FloatField(help_text="How long its sandboxes have had a process, all together.")
    llm = LeaseCallsSerializer(help_text="What its sandboxes asked their models, and what that cost.")


class RenewedSerializer(serializers.Serializer):
    expires_at = serializers.DateTimeField()


ACQUIRE_SERIALIZER = AcquireSerializer()


class LeaseListView(ApiView):
    @extend_schema(
        operation_id="leases_list",
        parameters=[*schema.PAGE_PARAMETERS, *schema.LEASE_FILTER_PARAMETERS],
        responses=schema.build_responses(schema.build_page_serializer(LeaseSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """The leases this key may see, newest first."""
        mine = self.caller.visible_leases()
        if did := request.GET.get("agent_did"):
            mine = mine.filter(agent_did=validate_url_value(ACQUIRE_SERIALIZER, "agent_did", did))
        if environment := request.GET.get("environment_id"):
            mine = mine.filter(environment_id=validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment))
        if status := request.GET.get("status"):
            mine = mine.filter(self._is(status))
        found, following = paginate(mine, "leased_at", request)
        held = Sandbox.objects.filter(holder__in=[lease.pk for lease in found]).exclude(state__in=GONE_STATES)
        boxes = {sandbox.holder: sandbox for sandbox in held}
        results = [serialize_lease(leasing.apply_elapsed_clock(lease, self.now), boxes.get(lease.pk)) for lease in found]
        return Response({"results": results, "next": following})

    def _is(self, status: str) -> Q:
        over = Q(expires_at__lte=self.now, status=LeaseStatus.ACTIVE)  # and no sweep has come by yet
        if status == LeaseStatus.ACTIVE:
            return Q(status=LeaseStatus.ACTIVE) & ~over
        if status == LeaseStatus.EXPIRED:
            return Q(status=LeaseStatus.EXPIRED) | over
        if status == LeaseStatus.DESTROYED:
            return Q(status=LeaseStatus.DESTROYED)
        raise InvalidRequest("status", f"One of {', '.join(LeaseStatus.values)}.")

    @extend_schema(
        operation_id="leases_acquire",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=AcquireSerializer,
        responses=schema.build_responses(LeaseSerializer, 402, 409, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """The agent's active lease in an environment: a new one (201), or the one it holds (200)."""
        said = self.validate_body(ACQUIRE_SERIALIZER)
        self.caller.require(said["agent_did"])

        def act(run_id: UUID) -> StatusAndBody:
            lease, is_new = leasing.acquire(
                build_lease_request(said, self.key_id), now=self.now, actor=self.actor, admit=self.consume_creation_token
            )
            return 201 if is_new else 200, render_lease(lease, now=self.now, is_new=is_new)

        return self.execute_once(act)


class LeaseView(LeaseApiView):
    @extend_schema(operation_id="leases_get", responses=schema.build_responses(LeaseDetailSerializer, 404))
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        lease = self.lease
        alive = metering.get_alive_time(pk, now=self.now).total_seconds()
        asked = serialize_lease_calls(lease, calculate_totals(LlmCall.objects.filter(holder=pk)))
        return Response(render_lease(lease, now=self.now) | {"seconds_alive": alive, "llm": asked})


class LeaseRenewView(HotLeaseApiView):
    parser_classes = [OpaqueParser]

    @extend_schema(
        operation_id="leases_renew",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(RenewedSerializer, 404, 409, 410, 413),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Push the end of the lease to its ttl from now, and never past its max_expires_at."""
        _ = request.data

        def act(run_id: UUID) -> StatusAndBody:
            return 200, {"expires_at": format_timestamp(leasing.renew(self.lease, now=self.now))}

        return self.execute_once(act)


class LeaseReleaseView(LeaseApiView):
    parser_classes = [OpaqueParser]

    @extend_schema(
        operation_id="leases_release",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(LeaseSerializer, 404, 409, 413),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """The agent is done. Releasing an ended lease changes nothing and is no error."""
        _ = request.data

        def act(run_id: UUID) -> StatusAndBody:
            lease = leasing.release(pk, now=self.now, actor=self.actor)
            if lease.status == LeaseStatus.EXPIRED:
                enqueue_reclaim()
            return 200, render_lease(lease, now=self.now)

        return self.execute_once(act)


def build_lease_request(said: Mapping[str, Any], key_id: str) -> leasing.LeaseRequest:
    return leasing.LeaseRequest(
        agent_did=said["agent_did"],
        environment_id=said["environment_id"],
        environment_type=said["environment_type"],
        ttl=seconds_to_timedelta(said, "ttl_seconds"),
        max_ttl=seconds_to_timedelta(said, "max_ttl_seconds"),
        sleep_after=said.get("sleep_after"),
        expiry_conditions=said.get("expiry_conditions"),
        pool=said.get("pool") or "",
        key_id=key_id,
    )


def render_lease(lease: Lease, *, now: datetime, is_new: bool = False) -> dict[str, Any]:
    sandbox = None if is_new else sql.find_first(Sandbox, HELD_SANDBOX_SQL, lease.pk)
    return serialize_lease(leasing.apply_elapsed_clock(lease, now), sandbox, is_new=is_new)


def serialize_lease(lease: Lease, sandbox: Sandbox | None, *, is_new: bool = False) -> dict[str, Any]:
    return {
        "id": str(lease.pk),
        "sandbox_id": lease.sandbox_id,
        "agent_did": lease.agent_did,
        "environment_id": lease.environment_id,
        "environment_type": lease.environment_type_id,
        "status": lease.status,
        "is_new": is_new,
        "leased_at": format_timestamp(lease.leased_at),
        "last_activity": format_timestamp(lease.last_activity_at),
        "ttl_seconds": int(lease.ttl.total_seconds()),
        "expires_at": format_timestamp(lease.expires_at),
        "max_expires_at": format_timestamp(lease.max_expires_at),
        "sleep_after": int(lease.sleep_after.total_seconds()),
        "expiry_conditions": lease.expiry_conditions,
        "ended_at": format_timestamp(lease.ended_at) if lease.ended_at else None,
        "end_reason": lease.end_reason,
        "sandbox": {
            "id": str(sandbox.pk),
            "state": sandbox.state,
            "provider": sandbox.provider,
            "isolated": sandbox.isolated,
        } if sandbox else None,
    }  # fmt: skip
