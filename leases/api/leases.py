"""Leases: acquire, read, renew, release."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from billing import alive_time
from leases import leasing, renewal
from leases.api.base import schema
from leases.api.base.authentication import Caller
from leases.api.base.fields import (
    DurationField,
    FailedByField,
    PatternField,
    StrictIntegerField,
    StrictSerializer,
    StrictUUIDField,
    build_did_field,
    build_seconds_field,
    seconds_to_timedelta,
    validate_url_value,
)
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.renderers import JsonRenderer
from leases.api.base.views import ApiRequest, ApiView, HotLeaseApiView, LeaseApiView
from leases.api.lease_documents import build_lease_document, build_status_filter, find_document_position
from leases.api.llm_calls import LeaseCallsSerializer, serialize_lease_calls
from leases.failed_by import classify_end_reason
from leases.models import (
    CONDITION_DESCRIPTION,
    CONDITION_PATTERN,
    ENVIRONMENT_ID_DESCRIPTION,
    ENVIRONMENT_ID_PATTERN,
    Lease,
    LeaseStatus,
)
from leases.resources import Resources, resolve_size
from leases.tasks import begin_reclaim
from sandboxes import stop_reasons
from sandboxes.db import database_time, sql
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.egress.totals import calculate_totals
from sandboxes.models import LlmCall, Sandbox, SandboxState
from sandboxes.models.resource_limits import GPU_TYPE_PATTERN
from sandboxes.providers.base import Network
from sandboxes.redaction.texts import omit_answers

MAX_RENEWED_LEASES = 1000  # in one request
HELD_SANDBOX_SQL = "holder = %s AND state NOT IN ('destroying', 'destroyed')"


class ResourcesSerializer(StrictSerializer):
    memory_mib = StrictIntegerField(
        min_value=1,
        required=False,
        allow_null=True,
        help_text="MiB, within the limits of the pools. Default: that of the pool.",
    )
    millicpus = StrictIntegerField(
        min_value=1, required=False, allow_null=True,
        help_text="1000 is one CPU. Within the limits of the pools. Default: that of the pool.",
    )  # fmt: skip
    size = PatternField(
        r"[-A-Za-z0-9_]{1,32}", "1 to 32 letters, digits and - _", required=False, allow_null=True,
        help_text="Name of an instance type, such as `standard-1`, instead of `memory_mib` and `millicpus`.",
    )  # fmt: skip
    disk_mib = StrictIntegerField(
        min_value=1, required=False, allow_null=True,
        help_text="MiB, rounded up to the vendor's unit. Within the limits of the pools. Default: that of the vendor.",
    )  # fmt: skip
    gpu = StrictIntegerField(
        min_value=1, required=False, allow_null=True, help_text="Number of GPUs, within the limits of the pools. Default: none."
    )
    gpu_type = PatternField(
        GPU_TYPE_PATTERN, "1 to 32 letters, digits and . _ + -", required=False, allow_null=True,
        help_text="Type of the GPUs, such as `H100`; with `gpu`. Default: any, where the vendor allows it.",
    )  # fmt: skip
    image = PatternField(
        r"[^\s]{1,255}", "1 to 255 characters without spaces", required=False, allow_null=True,
        help_text="Image that the pool lists. Default: that of the pool.",
    )  # fmt: skip

    def validate(self, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("size") and (data.get("memory_mib") or data.get("millicpus")):
            raise serializers.ValidationError({"size": "Must not be combined with memory_mib or millicpus."})
        if data.get("gpu_type") and not data.get("gpu"):
            raise serializers.ValidationError({"gpu_type": "Needs gpu, the number of GPUs."})
        return data


class NewLeaseSerializer(StrictSerializer):
    agent_did = build_did_field()
    environment_type = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _")
    ttl_seconds = build_seconds_field(
        help_text="The lease ends this time after its last renewal. Default: from the environment type."
    )
    max_ttl_seconds = build_seconds_field(
        help_text="The lease ends this time after it was granted, even if renewed. Default: from the environment type."
    )
    sleep_after = DurationField(
        required=False,
        allow_null=True,
        help_text="Idle time before the sandbox is evicted: seconds, or text such as 5m. Default: from the environment type.",
    )
    auto_stop_seconds = build_seconds_field(
        min_value=0,
        help_text="Idle time after which the vendor of a remote provider stops the sandbox by itself; 0: never. Rounded up to "
        "the vendor's unit. Default: from the environment type, else the provider's setting.",
    )
    auto_delete_seconds = build_seconds_field(
        min_value=0,
        help_text="Time after a stop at which the vendor of a remote provider deletes the sandbox by itself, never before the "
        "end of the lease; 0: never. Default: from the environment type, else the provider's setting.",
    )
    expiry_conditions = serializers.ListField(
        child=PatternField(CONDITION_PATTERN, CONDITION_DESCRIPTION), max_length=32, required=False, allow_null=True,
        help_text="Conditions whose posting ends the lease. Default: from the environment type.",
    )  # fmt: skip
    pool = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True)
    resources = ResourcesSerializer(
        required=False, allow_null=True, help_text="Resources of the lease's sandboxes. An existing lease keeps its own."
    )

    def validate_expiry_conditions(self, value: list[str] | None) -> list[str] | None:
        if value and len(set(value)) < len(value):
            raise serializers.ValidationError("Must not contain a condition twice.")
        return value


class AcquireSerializer(NewLeaseSerializer):
    environment_id = PatternField(ENVIRONMENT_ID_PATTERN, ENVIRONMENT_ID_DESCRIPTION)


class SandboxSerializer(serializers.Serializer):
    id = serializers.UUIDField()
    state = serializers.ChoiceField(
        SandboxState.choices,
        help_text="cold: state stored, no process; warm: awake without unsaved state; waiting: awake with unsaved state; "
        "suspended: like waiting, with frozen processes that the next use resumes, or stopped by its vendor without processes; "
        "running: a run is open.",
    )
    provider = serializers.CharField()
    isolated = serializers.BooleanField(help_text="Commands cannot reach the host or other sandboxes.")
    runtime = serializers.CharField(
        allow_null=True,
        help_text="OCI runtime or RuntimeClass that runs the sandbox, such as runsc for gVisor. Null: the engine's default.",
    )
    network = serializers.ChoiceField(
        [(one, one) for one in Network],
        help_text="sealed: no network but the egress proxy and what the policy allows; gateway: a vendor's allow list leads to "
        "the gateway alone; open: not restricted by this control plane.",
    )
    sealed = serializers.BooleanField(help_text="The network is `sealed`.")


class RequestedResourcesSerializer(serializers.Serializer):
    memory_mib = serializers.IntegerField(allow_null=True)
    millicpus = serializers.IntegerField(allow_null=True)
    size = serializers.CharField(allow_null=True, help_text="Instance type whose memory and CPU were requested.")
    disk_mib = serializers.IntegerField(allow_null=True)
    gpu = serializers.IntegerField(allow_null=True)
    gpu_type = serializers.CharField(allow_null=True)
    image = serializers.CharField(allow_null=True)


class EffectiveResourcesSerializer(serializers.Serializer):
    memory_mib = serializers.IntegerField()
    millicpus = serializers.IntegerField()
    disk_mib = serializers.IntegerField(allow_null=True, help_text="Null: the default of the vendor.")
    gpu = serializers.IntegerField(help_text="Number of GPUs.")
    gpu_type = serializers.CharField(allow_null=True, help_text="Null: any type, or no GPU.")
    image = serializers.CharField(help_text="Empty: the default of the vendor.")


class LeaseResourcesSerializer(serializers.Serializer):
    requested = RequestedResourcesSerializer(help_text="Resources that the request for the lease stated; null: not stated.")
    effective = EffectiveResourcesSerializer(
        allow_null=True, help_text="Resources of the current sandbox; null before the first use."
    )


class LeaseSerializer(serializers.Serializer):
    id = serializers.UUIDField()
    sandbox_id = serializers.CharField(help_text="`<agent did>::<environment>`, the same for successive leases.")
    agent_did = serializers.CharField()
    environment_id = serializers.CharField()
    environment_type = serializers.CharField()
    status = serializers.ChoiceField(LeaseStatus.choices)
    is_new = serializers.BooleanField(help_text="True if this call granted the lease.")
    leased_at = serializers.DateTimeField()
    last_activity = serializers.DateTimeField()
    ttl_seconds = serializers.IntegerField()
    expires_at = serializers.DateTimeField(help_text="End of the lease unless it is renewed: the earlier of ttl and max_ttl.")
    max_expires_at = serializers.DateTimeField()
    sleep_after = serializers.IntegerField(help_text="Idle seconds before the sandbox is evicted.")
    auto_stop_seconds = serializers.IntegerField(
        allow_null=True, help_text="Idle time before the vendor stops the sandbox; 0: never; null: the provider's setting."
    )
    auto_delete_seconds = serializers.IntegerField(
        allow_null=True,
        help_text="Time after a stop before the vendor deletes the sandbox; 0: never; null: the provider's setting.",
    )
    expiry_conditions = serializers.ListField(child=serializers.CharField())
    ended_at = serializers.DateTimeField(allow_null=True)
    end_reason = serializers.CharField(
        help_text="Empty while active, then ttl, max_ttl, condition:<name>, released, budget, operator, lost or failed."
    )
    failed_by = FailedByField()
    resources = LeaseResourcesSerializer(help_text="Resources of the lease's sandboxes, as requested and as they are.")
    sandbox = SandboxSerializer(allow_null=True, help_text="Current sandbox; null before the first use.")


class SandboxStopSerializer(serializers.Serializer):
    state = serializers.CharField(
        help_text="evicting: its state is stored and its next use wakes it; destroying: it is removed."
    )
    reason = serializers.CharField(
        help_text="Code of the transition: idle, lifetime, capacity, budget, restore, lease_ended, operator, discarded, "
        "start_failed, start_stalled, state_lost, provider_lost, host_lost or eviction_stalled."
    )
    at = serializers.DateTimeField()
    detail = serializers.CharField(help_text="Text of the reason, such as the error of a failed start.")


class LeaseDetailSerializer(LeaseSerializer):
    sandbox_ended = SandboxStopSerializer(
        allow_null=True, help_text="Last eviction or destruction of a sandbox of the lease; null if there was none."
    )
    seconds_alive = serializers.FloatField(help_text="Total time in which a sandbox of the lease was awake.")
    llm = LeaseCallsSerializer(help_text="LLM calls of the lease's sandboxes: counts, tokens and cost.")


class RenewedSerializer(serializers.Serializer):
    expires_at = serializers.DateTimeField()


class RenewManySerializer(StrictSerializer):
    ids = serializers.ListField(child=StrictUUIDField(), min_length=1, max_length=MAX_RENEWED_LEASES)

    def validate_ids(self, value: list[UUID]) -> list[UUID]:
        if len(set(value)) < len(value):
            raise serializers.ValidationError("Must not contain an id twice.")
        return value


class RenewalSerializer(serializers.Serializer):
    id = serializers.UUIDField()
    code = serializers.ChoiceField(
        ("renewed", "lease_ended", "not_found"),
        help_text="renewed, or the code of the problem with which the renewal of this lease alone would be answered.",
    )
    expires_at = serializers.DateTimeField(allow_null=True, help_text="End of the lease; null if it was not renewed.")
    end_reason = serializers.CharField(help_text="Reason of the end of an ended lease, else empty.")


class RenewedManySerializer(serializers.Serializer):
    results = RenewalSerializer(many=True)


RENEW_MANY_SERIALIZER = RenewManySerializer()
ACQUIRE_SERIALIZER = AcquireSerializer()
EMPTY_SERIALIZER = StrictSerializer()  # of requests without fields


class LeaseListView(ApiView):
    @extend_schema(
        operation_id="leases_list",
        summary="List leases",
        parameters=[*schema.PAGE_PARAMETERS, *schema.LEASE_FILTER_PARAMETERS],
        responses=schema.build_responses(schema.build_page_serializer(LeaseSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the leases of this key's agents, newest first; with an operator's key, all leases."""
        leases = self.caller.visible_leases()
        if did := request.GET.get("agent_did"):
            leases = leases.filter(agent_did=validate_url_value(ACQUIRE_SERIALIZER, "agent_did", did))
        if environment := request.GET.get("environment_id"):
            leases = leases.filter(environment_id=validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment))
        if status := request.GET.get("status"):
            leases = leases.filter(build_status_filter(status, now=self.now))
        documents: QuerySet[Any, Any] = leases.annotate(document=build_lease_document(self.now))
        texts: QuerySet[Any, str] = documents.values_list("document", flat=True)
        page, next_url = paginate(texts, "leased_at", request, find_position=find_document_position)
        body = f'{{"results": [{", ".join(page)}], "next": {json.dumps(next_url)}}}'
        return HttpResponse(body, content_type=JsonRenderer.media_type)

    @extend_schema(
        operation_id="leases_acquire",
        summary="Acquire a lease",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=AcquireSerializer,
        responses=schema.build_responses(LeaseSerializer, 402, 404, 409, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Grant the agent a lease in an environment (201), or return the active lease that it already holds there (200).

        The sandbox is started by the first use, not by this call."""
        data = self.validate_body(ACQUIRE_SERIALIZER)
        self.caller.require(data["agent_did"])

        def act(run_id: UUID) -> StatusAndBody:
            lease, is_new = leasing.acquire(
                build_lease_request(data, self.caller), now=self.now, actor=self.actor, admit=self.consume_creation_token
            )
            return 201 if is_new else 200, render_lease(lease, now=self.now, is_new=is_new)

        return self.execute_once(act)


class LeaseView(LeaseApiView):
    @extend_schema(
        operation_id="leases_get", summary="Get a lease", responses=schema.build_responses(LeaseDetailSerializer, 404)
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return a lease with its sandbox, awake time and LLM usage."""
        return Response(render_lease_detail(self.lease, now=self.now))


class LeaseRenewView(HotLeaseApiView):
    """Renews in one statement where that suffices, and otherwise step by step, which also finds the reason of a refusal."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if body := renew_plainly(request.META, kwargs["pk"]):
            return HttpResponse(body, content_type=JsonRenderer.media_type)
        return super().dispatch(request, *args, **kwargs)

    @extend_schema(
        operation_id="leases_renew",
        summary="Renew a lease",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(RenewedSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Extend the lease to its ttl from now, at most to `max_expires_at`. An ended lease is not renewed (410)."""
        self.validate_body(EMPTY_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            return 200, {"expires_at": format_timestamp(leasing.renew(self.lease, now=self.now))}

        return self.execute_once(act)


class LeaseRenewManyView(ApiView):
    @extend_schema(
        operation_id="leases_renew_many",
        summary="Renew many leases",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=RenewManySerializer,
        responses=schema.build_responses(RenewedManySerializer, 409, 413, 415),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Renew up to 1000 leases, each as `POST /leases/{id}/renew` does, in one statement.

        The outcomes have the order of the request. A lease that is not renewed does not affect the others."""
        ids = self.validate_body(RENEW_MANY_SERIALIZER)["ids"]
        agents = None if self.caller.key.operator else self.caller.key.dids

        def act(run_id: UUID) -> StatusAndBody:
            outcomes = renewal.renew_many(ids, agents, now=self.now)
            return 200, {"results": [serialize_renewal(pk, outcome) for pk, outcome in outcomes.items()]}

        return self.execute_once(act)


class LeaseReleaseView(LeaseApiView):
    @extend_schema(
        operation_id="leases_release",
        summary="Release a lease",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(LeaseSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """End the lease and destroy its sandbox. An ended lease is returned unchanged.

        The last state of the workspace is stored as a snapshot first and kept for LEASEHOLD_KEEP_STATE."""
        self.validate_body(EMPTY_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            lease = leasing.release(pk, now=self.now, actor=self.actor)
            body = render_lease(lease, now=self.now)  # before a thread competes with this one
            if lease.status == LeaseStatus.EXPIRED:
                begin_reclaim([lease])
            return 200, body

        return self.execute_once(act)


def renew_plainly(meta: Mapping[str, Any], pk: UUID) -> bytes | None:
    """Renew a lease in one statement, and return the body of the answer. `meta` are the WSGI variables of the request.

    Returns None if nothing was renewed: the request has more than a path and a key, or the statement does not suffice."""
    is_empty = meta.get("CONTENT_LENGTH") in (None, "", "0") and "HTTP_TRANSFER_ENCODING" not in meta
    if meta["REQUEST_METHOD"] != "POST" or not is_empty or meta.get("QUERY_STRING") or "HTTP_IDEMPOTENCY_KEY" in meta:
        return None
    scheme, _, key = meta.get("HTTP_AUTHORIZATION", "").partition(" ")
    until = renewal.renew_with_key(pk, key, now=database_time.now()) if scheme == "Bearer" else None
    return f'{{"expires_at": "{format_timestamp(until)}"}}'.encode() if until else None


def _build_resources(data: Mapping[str, Any]) -> Resources:
    """Build the requested resources. Raise InvalidRequest for an unknown size."""
    size = data.get("size")
    sized = resolve_size(size) if size else Resources(data.get("memory_mib"), data.get("millicpus"))
    return replace(
        sized,
        image=data.get("image") or "",
        disk_mib=data.get("disk_mib"),
        gpus=data.get("gpu") or 0,
        gpu_type=(data.get("gpu_type") or "").upper(),
    )


def build_lease_request(data: Mapping[str, Any], caller: Caller) -> leasing.LeaseRequest:
    return leasing.LeaseRequest(
        agent_did=data["agent_did"],
        environment_id=data["environment_id"],
        environment_type=data["environment_type"],
        ttl=seconds_to_timedelta(data, "ttl_seconds"),
        max_ttl=seconds_to_timedelta(data, "max_ttl_seconds"),
        sleep_after=data.get("sleep_after"),
        auto_stop=seconds_to_timedelta(data, "auto_stop_seconds"),
        auto_delete=seconds_to_timedelta(data, "auto_delete_seconds"),
        expiry_conditions=data.get("expiry_conditions"),
        pool=data.get("pool") or "",
        resources=_build_resources(data.get("resources") or {}),
        key_id=str(caller.pk),
        allowed=caller.allowed,
    )


def render_lease(lease: Lease, *, now: datetime, is_new: bool = False) -> dict[str, Any]:
    """Serialize a lease with its sandbox, as expired if a clock has elapsed. A new lease has no sandbox yet."""
    sandbox = None if is_new else sql.find_first(Sandbox, HELD_SANDBOX_SQL, lease.pk)
    return serialize_lease(leasing.apply_elapsed_clock(lease, now), sandbox, is_new=is_new)


def render_lease_detail(lease: Lease, *, now: datetime) -> dict[str, Any]:
    """Serialize a lease with its sandbox, awake time and LLM usage: the fields of LeaseDetailSerializer."""
    alive = alive_time.get_alive_time(lease.pk, now=now).total_seconds()
    usage = serialize_lease_calls(lease, calculate_totals(LlmCall.objects.filter(holder=lease.pk)))
    detail = {"sandbox_ended": render_last_stop(lease.pk), "seconds_alive": alive, "llm": usage}
    return render_lease(lease, now=now) | detail


def render_last_stop(pk: UUID) -> dict[str, str] | None:
    stop = stop_reasons.find_last_stop(pk)
    if stop is None:
        return None
    return {
        "state": stop.state, "reason": stop.reason.value, "at": format_timestamp(stop.at), "detail": omit_answers(stop.detail),
    }  # fmt: skip


def serialize_renewal(pk: UUID, outcome: renewal.Renewal) -> dict[str, Any]:
    code = "renewed" if outcome.expires_at else "lease_ended" if outcome.found else "not_found"
    expires_at = format_optional_timestamp(outcome.expires_at)
    return {"id": str(pk), "code": code, "expires_at": expires_at, "end_reason": outcome.end_reason}


def serialize_lease(lease: Lease, sandbox: Sandbox | None, *, is_new: bool = False) -> dict[str, Any]:
    """Return the fields of LeaseSerializer. `lease_documents` has the same for lists."""
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
        "auto_stop_seconds": _format_seconds(lease.auto_stop),
        "auto_delete_seconds": _format_seconds(lease.auto_delete),
        "expiry_conditions": lease.expiry_conditions,
        "ended_at": format_optional_timestamp(lease.ended_at),
        "end_reason": lease.end_reason,
        "failed_by": classify_end_reason(lease.end_reason),
        "resources": serialize_resources(lease, sandbox),
        "sandbox": serialize_sandbox(sandbox) if sandbox else None,
    }


def serialize_resources(lease: Lease, sandbox: Sandbox | None) -> dict[str, Any]:
    requested = {
        "memory_mib": lease.memory_mib, "millicpus": lease.millicpus, "size": lease.size or None, "disk_mib": lease.disk_mib,
        "gpu": lease.gpus or None, "gpu_type": lease.gpu_type or None, "image": lease.image or None,
    }  # fmt: skip
    return {"requested": requested, "effective": _serialize_sandbox_resources(sandbox) if sandbox else None}


def _serialize_sandbox_resources(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "memory_mib": sandbox.memory_mib, "millicpus": sandbox.millicpus, "disk_mib": sandbox.disk_mib, "gpu": sandbox.gpus,
        "gpu_type": sandbox.gpu_type or None, "image": sandbox.image,
    }  # fmt: skip


def _format_seconds(duration: timedelta | None) -> int | None:
    return None if duration is None else int(duration.total_seconds())


def serialize_sandbox(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "id": str(sandbox.pk), "state": sandbox.state, "provider": sandbox.provider, "isolated": sandbox.isolated,
        "runtime": sandbox.runtime or None, "network": sandbox.network, "sealed": sandbox.network == Network.SEALED,
    }  # fmt: skip
