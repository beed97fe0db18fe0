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
from leases import api_keys, execution, leasing, sweeps, turns
from leases.api import authentication, idempotency, request_body, schema
from leases.api import serializers as show
from leases.api import serializers_pools as pools
from leases.api.authentication import Caller
from leases.api.fields import ENCODINGS, decoded, span
from leases.api.idempotency import Answer
from leases.api.pagination import page
from leases.api.serializers_llm_calls import LeaseDetail, lease_calls_shown
from leases.errors import Invalid
from leases.models import Agent, EnvironmentType, Lease, Status, Turn
from leases.tasks import wake_reclaim
from sandboxes import pool_stats
from sandboxes.db import sql
from sandboxes.db.clock import iso
from sandboxes.egress.totals import totals
from sandboxes.errors import ProviderFailed
from sandboxes.models import GONE, LlmCall, Pool, Run, Sandbox
from sandboxes.runs import GRACE, Command

SMALL = 64 << 10  # bytes, like all of these: a body without a document of the agent's own in it
LARGEST_STATE = (1 << 20) + 1024  # a turn's state and what is around it
LARGEST_EXEC = 16 << 20  # stdin, mostly
HELD_FOR = "holder = %s AND state NOT IN ('destroying', 'destroyed')"

ACQUIRE, JOIN, CONDITION = show.Acquire(), show.Join(), show.Condition()
EXEC, TURN, AGENT = show.Exec(), show.PlayTurn(), show.NewAgent()


class Door(APIView):
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
        self.caller = authentication.caller_of(request, now=self.now)
        answer: HttpResponseBase = verb(request, *args, **kwargs)
        return answer

    @property
    def actor(self) -> str:
        return self.caller.name

    @property
    def key_id(self) -> str:
        return str(self.caller.pk)

    def read(self, request: HttpRequest, form: Serializer, limit: int = SMALL) -> tuple[bytes, dict[str, Any]]:
        """The body, and what it says after validation."""
        body = request_body.read(request, limit)
        said: dict[str, Any] = form.run_validation(request_body.parse(request, body))
        return body, said

    def once(self, request: HttpRequest, act: idempotency.Act, **options: Any) -> HttpResponse:
        return idempotency.once(request, self.caller.key, act, now=self.now, **options)

    def admit(self) -> None:
        """One new lease more for this key, or TooMany."""
        api_keys.take_token(self.caller.key, per_minute=settings.CREATES_PER_MINUTE, now=self.now)

    def shown(self, lease: Lease, *, is_new: bool = False) -> dict[str, Any]:
        sandbox = None if is_new else sql.first(Sandbox, HELD_FOR, lease.pk)
        return show.shown(leasing.as_of(lease, self.now), sandbox, is_new=is_new)


# --- leases -------------------------------------------------------------------------------------------------------


class Leases(Door):
    @extend_schema(
        operation_id="leases_list",
        parameters=[*schema.PAGE, *schema.LEASE_FILTERS],
        responses=schema.answers(schema.page_of(show.LeaseShown)),
    )
    def get(self, request: HttpRequest) -> HttpResponse:
        """The leases this key may see, newest first."""
        mine = self.caller.leases()
        if did := request.GET.get("agent_did"):
            mine = mine.filter(agent_did=_valid(ACQUIRE, "agent_did", did))
        if environment := request.GET.get("environment_id"):
            mine = mine.filter(environment_id=_valid(ACQUIRE, "environment_id", environment))
        if status := request.GET.get("status"):
            mine = mine.filter(self._is(status))
        found, following = page(mine, "leased_at", request)
        held = Sandbox.objects.filter(holder__in=[lease.pk for lease in found]).exclude(state__in=GONE)
        boxes = {sandbox.holder: sandbox for sandbox in held}
        results = [show.shown(leasing.as_of(lease, self.now), boxes.get(lease.pk)) for lease in found]
        return JsonResponse({"results": results, "next": following})

    def _is(self, status: str) -> Q:
        over = Q(expires_at__lte=self.now, status=Status.ACTIVE)  # and no sweep has come by yet
        if status == Status.ACTIVE:
            return Q(status=Status.ACTIVE) & ~over
        if status == Status.EXPIRED:
            return Q(status=Status.EXPIRED) | over
        if status == Status.DESTROYED:
            return Q(status=Status.DESTROYED)
        raise Invalid("status", f"One of {', '.join(Status.values)}.")

    @extend_schema(
        operation_id="leases_acquire",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=show.Acquire,
        responses=schema.answers(show.LeaseShown, 402, 409, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """The agent's active lease in an environment: a new one (201), or the one it holds (200)."""
        body, said = self.read(request, ACQUIRE)
        self.caller.require(said["agent_did"])

        def act(run_id: UUID) -> Answer:
            lease, is_new = leasing.acquire(asked(said, self.key_id), now=self.now, actor=self.actor, admit=self.admit)
            return 201 if is_new else 200, self.shown(lease, is_new=is_new)

        return self.once(request, act, body=body)


class OneLease(Door):
    @extend_schema(operation_id="leases_get", responses=schema.answers(LeaseDetail, 404))
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        lease = self.caller.lease(pk)
        alive = metering.alive(pk, now=self.now).total_seconds()
        asked = lease_calls_shown(lease, totals(LlmCall.objects.filter(holder=pk)))
        return JsonResponse(self.shown(lease) | {"seconds_alive": alive, "llm": asked})


class Renew(Door):
    @extend_schema(
        operation_id="leases_renew",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=None,
        responses=schema.answers(show.Renewed, 404, 409, 410, 413),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Push the end of the lease to its ttl from now, and never past its max_expires_at."""
        lease = self.caller.lease(pk)
        body = request_body.read(request, SMALL)  # it says nothing; left unread, it would cost the caller its connection

        def act(run_id: UUID) -> Answer:
            return 200, {"expires_at": iso(leasing.renew(lease, now=self.now))}

        return self.once(request, act, body=body)


class Release(Door):
    @extend_schema(
        operation_id="leases_release",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=None,
        responses=schema.answers(show.LeaseShown, 404, 409, 413),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The agent is done. Releasing an ended lease changes nothing and is no error."""
        self.caller.lease(pk)
        body = request_body.read(request, SMALL)

        def act(run_id: UUID) -> Answer:
            lease = leasing.release(pk, now=self.now, actor=self.actor)
            if lease.status == Status.EXPIRED:
                wake_reclaim()
            return 200, self.shown(lease)

        return self.once(request, act, body=body)


# --- environments -------------------------------------------------------------------------------------------------


class Join(Door):
    @extend_schema(
        operation_id="environments_join",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=show.Join,
        responses=schema.answers(show.LeaseShown, 402, 409, 410, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: HttpRequest, environment_id: str) -> HttpResponse:
        """Like acquiring a lease, and then its sandbox is ready, with /workspace/config.json in it."""
        body, said = self.read(request, JOIN)
        said["environment_id"] = _valid(ACQUIRE, "environment_id", environment_id)
        self.caller.require(said["agent_did"])

        def act(run_id: UUID) -> Answer:
            lease, is_new = turns.join(asked(said, self.key_id), now=self.now, actor=self.actor, admit=self.admit)
            return 201 if is_new else 200, self.shown(lease) | {"is_new": is_new}

        return self.once(request, act, body=body, patience=settings.SANDBOX_START_TIMEOUT + 2 * GRACE)


class Conditions(Door):
    @extend_schema(
        operation_id="environments_post_condition",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=show.Condition,
        responses=schema.answers(show.Ended, 409, 413, 415),
    )
    def post(self, request: HttpRequest, environment_id: str) -> HttpResponse:
        """Something happened in an environment: end the leases that wait for it, all of them or this key's agents'."""
        body, said = self.read(request, CONDITION)
        environment_id = _valid(ACQUIRE, "environment_id", environment_id)
        agents = None if self.caller.key.operator else self.caller.key.dids

        def act(run_id: UUID) -> Answer:
            happened = said["condition"]
            ended = sweeps.end_matching(environment_id, happened, now=self.now, agents=agents, actor=self.actor)
            if ended:
                wake_reclaim()
            return 200, {"ended": [str(lease.pk) for lease in ended]}

        return self.once(request, act, body=body)


# --- what a lease lets its agent do -------------------------------------------------------------------------------


class Exec(Door):
    @extend_schema(
        operation_id="leases_exec",
        parameters=[schema.IDEMPOTENCY_KEY, schema.ENCODING],
        request=show.Exec,
        responses=schema.answers(show.ExecShown, 402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Run a command in the lease's sandbox and wait for it. Failing and timing out are results, too."""
        self.caller.lease(pk)
        encoding = encoding_of(request)
        body, said = self.read(request, EXEC, LARGEST_EXEC)
        timeout = span(said, "timeout_seconds") or settings.EXEC_TIMEOUT
        stdin = decoded(said["stdin"], encoding, "stdin")

        def act(run_id: UUID) -> Answer:
            command = Command(said["argv"], timeout, said["env"], said["cwd"], stdin, run_id=run_id)
            try:
                run, result = execution.exec_in(pk, command, now=self.now, actor=self.actor)
            except ProviderFailed as failed:
                failed.extra["run_id"] = str(run_id)  # which says what is known
                raise
            return 200, show.exec_shown(run, result, encoding)

        patience = settings.SANDBOX_START_TIMEOUT + timeout + 2 * GRACE
        return self.once(request, act, body=body, patience=patience, repeatable=False)


class Turns(Door):
    @extend_schema(
        operation_id="leases_turns_list",
        parameters=schema.PAGE,
        responses=schema.answers(schema.page_of(show.TurnShown), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The turns of a lease, newest first."""
        found, following = page(Turn.objects.filter(lease=self.caller.lease(pk)), "started_at", request)
        return JsonResponse({"results": [show.turn_shown(turn) for turn in found], "next": following})

    @extend_schema(
        operation_id="leases_take_turn",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=show.PlayTurn,
        responses=schema.answers(show.TurnShown, 402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Play one turn, once: a turn_number that was played answers what it answered then."""
        lease = self.caller.lease(pk)
        body, said = self.read(request, TURN, LARGEST_STATE)
        kind = EnvironmentType.objects.get(name=lease.environment_type_id)

        def act(run_id: UUID) -> Answer:
            turn = turns.take_turn(pk, said["turn_number"], said["state"], now=self.now, actor=self.actor)
            return 200, show.turn_shown(turn)

        patience: timedelta = settings.SANDBOX_START_TIMEOUT + (kind.turn_timeout or settings.TURN_TIMEOUT) + 3 * GRACE
        return self.once(request, act, body=body, patience=patience)


class Runs(Door):
    @extend_schema(
        operation_id="leases_runs_list",
        parameters=schema.PAGE,
        responses=schema.answers(schema.page_of(show.RunShown), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What ran for a lease, newest first."""
        ran = Run.objects.filter(holder=self.caller.lease(pk).pk).defer("stdout", "stderr")
        found, following = page(ran, "started_at", request)
        return JsonResponse({"results": [show.run_shown(run) for run in found], "next": following})


class OneRun(Door):
    @extend_schema(
        operation_id="leases_runs_get",
        parameters=[schema.ENCODING],
        responses=schema.answers(show.RunOutputShown, 404),
    )
    def get(self, request: HttpRequest, pk: UUID, run_id: UUID) -> HttpResponse:
        """One run, with the first bytes of what it printed."""
        run = Run.objects.filter(pk=run_id, holder=self.caller.lease(pk).pk).first()
        if run is None:
            raise NotFound("There is no such run of this lease.")
        return JsonResponse(show.run_output_shown(run, encoding_of(request)))


# --- pools --------------------------------------------------------------------------------------------------------


class Pools(Door):
    @extend_schema(operation_id="pool_get", parameters=[schema.QUOTA_OF], responses=schema.answers(pools.PoolsShown))
    def get(self, request: HttpRequest) -> HttpResponse:
        """The pools, how full they are, and what this key's agents may have in them. With an operator's key also what
        there is in each state, and what has become of it: for each pool, and for all together."""
        dids = self.caller.key.dids
        if did := request.GET.get("agent_did"):
            dids = [_valid(ACQUIRE, "agent_did", did)]
            self.caller.require(did)
        if not self.caller.key.operator:
            every = Pool.objects.order_by("name")
            return JsonResponse({"pools": [pools.pool_shown(one, pool_stats.quotas(one.pk, dids)) for one in every]})
        counted = pool_stats.of_pools(now=self.now)
        shown = [pools.pool_shown(one, pool_stats.quotas(one.pk, dids)) for one in counted]
        return JsonResponse({"pools": shown} | pools.pool_numbers(pool_stats.together(counted)))


# --- agents -------------------------------------------------------------------------------------------------------


class Agents(Door):
    @extend_schema(
        operation_id="agents_list",
        parameters=schema.PAGE,
        responses=schema.answers(schema.page_of(show.AgentShown)),
    )
    def get(self, request: HttpRequest) -> HttpResponse:
        """The agents this key speaks for, or all for an operator's, newest first."""
        mine = Agent.objects.all() if self.caller.key.operator else Agent.objects.filter(did__in=self.caller.key.dids)
        found, following = page(mine, "created_at", request)
        return JsonResponse({"results": [show.agent_shown(agent) for agent in found], "next": following})

    @extend_schema(
        operation_id="agents_create",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=show.NewAgent,
        responses=schema.answers(show.AgentShown, 409, 413, 415, ok=(200, 201)),
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """Make an agent (201), or find it (200) as it is. For operators; agents also come with keys and leases."""
        if not self.caller.key.operator:
            raise PermissionDenied(authentication.IsOperator.message)
        body, said = self.read(request, AGENT)

        def act(run_id: UUID) -> Answer:
            new = {"name": said["name"], "created_at": self.now}
            agent, made = Agent.objects.get_or_create(did=said["did"], defaults=new)
            return 201 if made else 200, show.agent_shown(agent)

        return self.once(request, act, body=body)


class OneAgent(Door):
    @extend_schema(operation_id="agents_get", responses=schema.answers(show.AgentShown, 404))
    def get(self, request: HttpRequest, did: str) -> HttpResponse:
        agent = Agent.objects.filter(did=did).first() if self.caller.speaks_for(did) and "\0" not in did else None
        if agent is None:
            raise NotFound("There is no such agent.")
        return JsonResponse(show.agent_shown(agent))


# --- what requests say --------------------------------------------------------------------------------------------


def asked(said: Mapping[str, Any], key_id: str) -> leasing.Ask:
    return leasing.Ask(
        agent_did=said["agent_did"],
        environment_id=said["environment_id"],
        environment_type=said["environment_type"],
        ttl=span(said, "ttl_seconds"),
        max_ttl=span(said, "max_ttl_seconds"),
        sleep_after=said.get("sleep_after"),
        expiry_conditions=said.get("expiry_conditions"),
        pool=said.get("pool") or "",
        key_id=key_id,
    )


def encoding_of(request: HttpRequest) -> str:
    encoding = request.GET.get("encoding", "utf-8")
    if encoding not in ENCODINGS:
        raise Invalid("encoding", f"One of {', '.join(ENCODINGS)}.")
    return encoding


def _valid(form: Serializer, field: str, value: str) -> str:
    """A value from the URL, checked as the field of that name in a body would be."""
    try:
        return str(form.fields[field].run_validation(value))
    except ValidationError as wrong:
        raise ValidationError({field: wrong.detail}) from None
