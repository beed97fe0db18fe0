"""The agents' door. A view finds out who calls, reads what they say, calls one verb and shows what came of it.

Errors are raised; controlplane.errors turns them into problem documents."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse
from django.http.response import HttpResponseBase
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import NotFound, PermissionDenied, ValidationError
from rest_framework.serializers import Serializer
from rest_framework.views import APIView

from billing import metering
from leases import api_keys, conditions, execution, leasing, turns
from leases.api import authentication, idempotency, request_body, schema
from leases.api import serializers as show
from leases.api import serializers_pools as pools
from leases.api.authentication import Caller
from leases.api.fields import ENCODINGS, decode_input, seconds_to_timedelta
from leases.api.idempotency import StatusAndBody
from leases.api.pagination import paginate
from leases.api.serializers_llm_calls import LeaseDetailSerializer, serialize_lease_calls
from leases.errors import InvalidRequest
from leases.models import Agent, EnvironmentType, Lease, LeaseStatus, Turn
from leases.tasks import enqueue_reclaim
from sandboxes import pool_stats
from sandboxes.db import sql
from sandboxes.db.clock import format_timestamp
from sandboxes.egress.totals import calculate_totals
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import GONE_STATES, LlmCall, Pool, Run, Sandbox
from sandboxes.runs import KILL_GRACE, Command

MAX_SMALL_BODY_BYTES = 64 << 10  # bytes, like all of these: a body without a document of the agent's own in it
MAX_TURN_BODY_BYTES = (1 << 20) + 1024  # a turn's state and what is around it
MAX_EXEC_BODY_BYTES = 16 << 20  # stdin, mostly
HELD_SANDBOX_SQL = "holder = %s AND state NOT IN ('destroying', 'destroyed')"

ACQUIRE_SERIALIZER, JOIN_SERIALIZER, CONDITION_SERIALIZER = (
    show.AcquireSerializer(),
    show.JoinSerializer(),
    show.ConditionSerializer(),
)
EXEC_SERIALIZER, TURN_SERIALIZER, NEW_AGENT_SERIALIZER = (
    show.ExecSerializer(),
    show.PlayTurnSerializer(),
    show.NewAgentSerializer(),
)


class AgentApiView(APIView):
    """A view for agents: `caller` and `now` are set before its verb runs.

    APIView is here for the schema. Its own dispatch wraps the request, negotiates, parses and renders, which for one
    JSON document each way costs more than it gives."""

    http_method_names = ["get", "head", "post", "put", "delete"]
    caller: Caller
    now: datetime

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        method = (request.method or "").lower()
        verb = getattr(self, method, None) if method in self.http_method_names else None
        if verb is None:
            return HttpResponseNotAllowed(self.allowed_methods)
        self.now = timezone.now()
        self.caller = authentication.authenticate_request(request, now=self.now)
        answer: HttpResponseBase = verb(request, *args, **kwargs)
        return answer

    @property
    def actor(self) -> str:
        return self.caller.name

    @property
    def key_id(self) -> str:
        return str(self.caller.pk)

    def read(self, request: HttpRequest, form: Serializer, limit: int = MAX_SMALL_BODY_BYTES) -> tuple[bytes, dict[str, Any]]:
        """The body, and what it says after validation."""
        body = request_body.read_body(request, limit)
        said: dict[str, Any] = form.run_validation(request_body.parse_json_object(request, body))
        return body, said

    def once(self, request: HttpRequest, act: idempotency.RequestHandler, **options: Any) -> HttpResponse:
        return idempotency.execute_once(request, self.caller.key, act, now=self.now, **options)

    def admit(self) -> None:
        """One new lease more for this key, or TooMany."""
        api_keys.consume_rate_limit_token(self.caller.key, per_minute=settings.CREATES_PER_MINUTE, now=self.now)

    def shown(self, lease: Lease, *, is_new: bool = False) -> dict[str, Any]:
        sandbox = None if is_new else sql.find_first(Sandbox, HELD_SANDBOX_SQL, lease.pk)
        return show.serialize_lease(leasing.apply_elapsed_clock(lease, self.now), sandbox, is_new=is_new)


# --- leases -------------------------------------------------------------------------------------------------------


class LeaseListView(AgentApiView):
    @extend_schema(
        operation_id="leases_list",
        parameters=[*schema.PAGE_PARAMETERS, *schema.LEASE_FILTER_PARAMETERS],
        responses=schema.build_responses(schema.build_page_serializer(show.LeaseSerializer)),
    )
    def get(self, request: HttpRequest) -> HttpResponse:
        """The leases this key may see, newest first."""
        mine = self.caller.leases()
        if did := request.GET.get("agent_did"):
            mine = mine.filter(agent_did=_validate_url_value(ACQUIRE_SERIALIZER, "agent_did", did))
        if environment := request.GET.get("environment_id"):
            mine = mine.filter(environment_id=_validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment))
        if status := request.GET.get("status"):
            mine = mine.filter(self._is(status))
        found, following = paginate(mine, "leased_at", request)
        held = Sandbox.objects.filter(holder__in=[lease.pk for lease in found]).exclude(state__in=GONE_STATES)
        boxes = {sandbox.holder: sandbox for sandbox in held}
        results = [show.serialize_lease(leasing.apply_elapsed_clock(lease, self.now), boxes.get(lease.pk)) for lease in found]
        return JsonResponse({"results": results, "next": following})

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
        request=show.AcquireSerializer,
        responses=schema.build_responses(show.LeaseSerializer, 402, 409, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """The agent's active lease in an environment: a new one (201), or the one it holds (200)."""
        body, said = self.read(request, ACQUIRE_SERIALIZER)
        self.caller.require(said["agent_did"])

        def act(run_id: UUID) -> StatusAndBody:
            lease, is_new = leasing.acquire(
                build_lease_request(said, self.key_id), now=self.now, actor=self.actor, admit=self.admit
            )
            return 201 if is_new else 200, self.shown(lease, is_new=is_new)

        return self.once(request, act, body=body)


class LeaseView(AgentApiView):
    @extend_schema(operation_id="leases_get", responses=schema.build_responses(LeaseDetailSerializer, 404))
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        lease = self.caller.lease(pk)
        alive = metering.get_alive_time(pk, now=self.now).total_seconds()
        asked = serialize_lease_calls(lease, calculate_totals(LlmCall.objects.filter(holder=pk)))
        return JsonResponse(self.shown(lease) | {"seconds_alive": alive, "llm": asked})


class LeaseRenewView(AgentApiView):
    @extend_schema(
        operation_id="leases_renew",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(show.RenewedSerializer, 404, 409, 410, 413),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Push the end of the lease to its ttl from now, and never past its max_expires_at."""
        lease = self.caller.lease(pk)
        body = request_body.read_body(
            request, MAX_SMALL_BODY_BYTES
        )  # it says nothing; left unread, it would cost the caller its connection

        def act(run_id: UUID) -> StatusAndBody:
            return 200, {"expires_at": format_timestamp(leasing.renew(lease, now=self.now))}

        return self.once(request, act, body=body)


class LeaseReleaseView(AgentApiView):
    @extend_schema(
        operation_id="leases_release",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(show.LeaseSerializer, 404, 409, 413),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The agent is done. Releasing an ended lease changes nothing and is no error."""
        self.caller.lease(pk)
        body = request_body.read_body(request, MAX_SMALL_BODY_BYTES)

        def act(run_id: UUID) -> StatusAndBody:
            lease = leasing.release(pk, now=self.now, actor=self.actor)
            if lease.status == LeaseStatus.EXPIRED:
                enqueue_reclaim()
            return 200, self.shown(lease)

        return self.once(request, act, body=body)


# --- environments -------------------------------------------------------------------------------------------------


class EnvironmentJoinView(AgentApiView):
    @extend_schema(
        operation_id="environments_join",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=show.JoinSerializer,
        responses=schema.build_responses(show.LeaseSerializer, 402, 409, 410, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: HttpRequest, environment_id: str) -> HttpResponse:
        """Like acquiring a lease, and then its sandbox is ready, with /workspace/config.json in it."""
        body, said = self.read(request, JOIN_SERIALIZER)
        said["environment_id"] = _validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)
        self.caller.require(said["agent_did"])

        def act(run_id: UUID) -> StatusAndBody:
            lease, is_new = turns.join_environment(
                build_lease_request(said, self.key_id), now=self.now, actor=self.actor, admit=self.admit
            )
            return 201 if is_new else 200, self.shown(lease) | {"is_new": is_new}

        return self.once(request, act, body=body, patience=settings.SANDBOX_START_TIMEOUT + 2 * KILL_GRACE)


class EnvironmentConditionView(AgentApiView):
    @extend_schema(
        operation_id="environments_post_condition",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=show.ConditionSerializer,
        responses=schema.build_responses(show.EndedLeasesSerializer, 409, 413, 415),
    )
    def post(self, request: HttpRequest, environment_id: str) -> HttpResponse:
        """Something happened in an environment: end the leases that wait for it, all of them or this key's agents'."""
        body, said = self.read(request, CONDITION_SERIALIZER)
        environment_id = _validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)
        agents = None if self.caller.key.operator else self.caller.key.dids

        def act(run_id: UUID) -> StatusAndBody:
            happened = said["condition"]
            ended = conditions.post_condition(environment_id, happened, now=self.now, agents=agents, actor=self.actor)
            if ended:
                enqueue_reclaim()
            return 200, {"ended": [str(lease.pk) for lease in ended]}

        return self.once(request, act, body=body)


# --- what a lease lets its agent do -------------------------------------------------------------------------------


class ExecView(AgentApiView):
    @extend_schema(
        operation_id="leases_exec",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=show.ExecSerializer,
        responses=schema.build_responses(show.ExecResultSerializer, 402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Run a command in the lease's sandbox and wait for it. Failing and timing out are results, too."""
        self.caller.lease(pk)
        encoding = parse_encoding(request)
        body, said = self.read(request, EXEC_SERIALIZER, MAX_EXEC_BODY_BYTES)
        timeout = seconds_to_timedelta(said, "timeout_seconds") or settings.EXEC_TIMEOUT
        stdin = decode_input(said["stdin"], encoding, "stdin")

        def act(run_id: UUID) -> StatusAndBody:
            command = Command(said["argv"], timeout, said["env"], said["cwd"], stdin, run_id=run_id)
            try:
                run, result = execution.exec_command(pk, command, now=self.now, actor=self.actor)
            except ProviderCallFailed as failed:
                failed.extra["run_id"] = str(run_id)  # which says what is known
                raise
            return 200, show.serialize_exec_result(run, result, encoding)

        patience = settings.SANDBOX_START_TIMEOUT + timeout + 2 * KILL_GRACE
        return self.once(request, act, body=body, patience=patience, repeatable=False)


class TurnListView(AgentApiView):
    @extend_schema(
        operation_id="leases_turns_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(show.TurnSerializer), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The turns of a lease, newest first."""
        found, following = paginate(Turn.objects.filter(lease=self.caller.lease(pk)), "started_at", request)
        return JsonResponse({"results": [show.serialize_turn(turn) for turn in found], "next": following})

    @extend_schema(
        operation_id="leases_take_turn",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=show.PlayTurnSerializer,
        responses=schema.build_responses(show.TurnSerializer, 402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Play one turn, once: a turn_number that was played answers what it answered then."""
        lease = self.caller.lease(pk)
        body, said = self.read(request, TURN_SERIALIZER, MAX_TURN_BODY_BYTES)
        kind = EnvironmentType.objects.get(name=lease.environment_type_id)

        def act(run_id: UUID) -> StatusAndBody:
            turn = turns.take_turn(pk, said["turn_number"], said["state"], now=self.now, actor=self.actor)
            return 200, show.serialize_turn(turn)

        patience: timedelta = settings.SANDBOX_START_TIMEOUT + (kind.turn_timeout or settings.TURN_TIMEOUT) + 3 * KILL_GRACE
        return self.once(request, act, body=body, patience=patience)


class RunListView(AgentApiView):
    @extend_schema(
        operation_id="leases_runs_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(show.RunSerializer), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What ran for a lease, newest first."""
        ran = Run.objects.filter(holder=self.caller.lease(pk).pk).defer("stdout", "stderr")
        found, following = paginate(ran, "started_at", request)
        return JsonResponse({"results": [show.serialize_run(run) for run in found], "next": following})


class RunView(AgentApiView):
    @extend_schema(
        operation_id="leases_runs_get",
        parameters=[schema.ENCODING_PARAMETER],
        responses=schema.build_responses(show.RunOutputSerializer, 404),
    )
    def get(self, request: HttpRequest, pk: UUID, run_id: UUID) -> HttpResponse:
        """One run, with the first bytes of what it printed."""
        run = Run.objects.filter(pk=run_id, holder=self.caller.lease(pk).pk).first()
        if run is None:
            raise NotFound("There is no such run of this lease.")
        return JsonResponse(show.serialize_run_output(run, parse_encoding(request)))


# --- pools --------------------------------------------------------------------------------------------------------


class PoolListView(AgentApiView):
    @extend_schema(
        operation_id="pool_get",
        parameters=[schema.QUOTA_AGENT_PARAMETER],
        responses=schema.build_responses(pools.PoolListSerializer),
    )
    def get(self, request: HttpRequest) -> HttpResponse:
        """The pools, how full they are, and what this key's agents may have in them. With an operator's key also what
        there is in each state, and what has become of it: for each pool, and for all together."""
        dids = self.caller.key.dids
        if did := request.GET.get("agent_did"):
            dids = [_validate_url_value(ACQUIRE_SERIALIZER, "agent_did", did)]
            self.caller.require(did)
        if not self.caller.key.operator:
            every = Pool.objects.order_by("name")
            return JsonResponse({"pools": [pools.serialize_pool(one, pool_stats.find_quotas(one.pk, dids)) for one in every]})
        counted = pool_stats.collect_pool_stats(now=self.now)
        shown = [pools.serialize_pool(one, pool_stats.find_quotas(one.pk, dids)) for one in counted]
        return JsonResponse({"pools": shown} | pools.serialize_pool_stats(pool_stats.sum_stats(counted)))


# --- agents -------------------------------------------------------------------------------------------------------


class AgentListView(AgentApiView):
    @extend_schema(
        operation_id="agents_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(show.AgentSerializer)),
    )
    def get(self, request: HttpRequest) -> HttpResponse:
        """The agents this key speaks for, or all for an operator's, newest first."""
        mine = Agent.objects.all() if self.caller.key.operator else Agent.objects.filter(did__in=self.caller.key.dids)
        found, following = paginate(mine, "created_at", request)
        return JsonResponse({"results": [show.serialize_agent(agent) for agent in found], "next": following})

    @extend_schema(
        operation_id="agents_create",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=show.NewAgentSerializer,
        responses=schema.build_responses(show.AgentSerializer, 409, 413, 415, ok=(200, 201)),
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """Make an agent (201), or find it (200) as it is. For operators; agents also come with keys and leases."""
        if not self.caller.key.operator:
            raise PermissionDenied(authentication.IsOperator.message)
        body, said = self.read(request, NEW_AGENT_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            new = {"name": said["name"], "created_at": self.now}
            agent, made = Agent.objects.get_or_create(did=said["did"], defaults=new)
            return 201 if made else 200, show.serialize_agent(agent)

        return self.once(request, act, body=body)


class AgentView(AgentApiView):
    @extend_schema(operation_id="agents_get", responses=schema.build_responses(show.AgentSerializer, 404))
    def get(self, request: HttpRequest, did: str) -> HttpResponse:
        agent = Agent.objects.filter(did=did).first() if self.caller.speaks_for(did) and "\0" not in did else None
        if agent is None:
            raise NotFound("There is no such agent.")
        return JsonResponse(show.serialize_agent(agent))


# --- what requests say --------------------------------------------------------------------------------------------


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


def parse_encoding(request: HttpRequest) -> str:
    encoding = request.GET.get("encoding", "utf-8")
    if encoding not in ENCODINGS:
        raise InvalidRequest("encoding", f"One of {', '.join(ENCODINGS)}.")
    return encoding


def _validate_url_value(form: Serializer, field: str, value: str) -> str:
    """A value from the URL, checked as the field of that name in a body would be."""
    try:
        return str(form.fields[field].run_validation(value))
    except ValidationError as wrong:
        raise ValidationError({field: wrong.detail}) from None
