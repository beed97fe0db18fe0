"""Agent runs of a lease: an agent CLI in the sandbox, its messages as server-sent events, and its interruption."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response

from leases import leasing, shells
from leases.agent_runs import interruption, lifecycle
from leases.agent_runs.clis.base import PERMISSION_MODES, AgentOptions
from leases.agent_runs.clis.registry import CLIS
from leases.agent_runs.lifecycle import AgentRequest
from leases.agent_runs.models import SESSION_PATTERN, AgentRun, AgentRunState
from leases.agent_runs.policy import MAX_PATTERNS, AgentPolicy
from leases.agent_runs.results import AgentRunResult, load_results
from leases.api.base import schema
from leases.api.base.fields import (
    ArgvField,
    EnvField,
    FailedByField,
    PatternField,
    RunIdField,
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
    seconds_to_timedelta,
)
from leases.api.base.idempotency import StatusAndBody, build_chosen_id
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, ApiView, LeaseApiView
from leases.api.command_threads import CommandThread
from leases.api.queue_fields import (
    QueuedRunSerializer,
    QueueSerializer,
    build_queue_options,
    require_queued,
    serialize_queued_run,
)
from leases.api.runs import SHELL_NAME_DESCRIPTION, SHELL_NAME_PATTERN, CwdField
from leases.errors import InvalidRequest
from leases.failed_by import classify_agent_run
from leases.models import Lease
from leases.queue import queue, runner
from sandboxes.claims import KILL_GRACE
from sandboxes.db import database_time
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.models import NEVER_STARTED, Run
from sandboxes.redaction.texts import omit_answers

MAX_PROMPT_BYTES = 1 << 20
SESSION_DESCRIPTION = "1 to 128 letters, digits, - and _"
MODEL_PATTERN, MODEL_DESCRIPTION = r"[A-Za-z0-9][-A-Za-z0-9._:/@\[\]]{0,199}", "the name of a model"
QUEUED_OPTIONS = ("model", "permission_mode", "system_prompt", "session_id")  # of AgentOptions, in the row of a queued run
# Options of agent SDKs that are functions or connections of the client's process. They cannot reach a CLI in a sandbox.
REFUSED_OPTIONS = {
    "hooks": "Hooks are functions of the client. Apply them to the messages of the stream.",
    "can_use_tool": "A callback cannot be called from a sandbox. Use allowed_tools and denied_commands.",
    "stderr": "A callback cannot be called from a sandbox. Read the stderr events of the stream.",
    "spawn_claude_code_process": "The control plane starts the CLI.",
    "abort_controller": "Interrupt the run: POST …/agent-runs/{id}/interrupt.",
    "mcp_servers": "Servers of the client cannot be reached from a sandbox.",
}


class NewAgentRunSerializer(QueueSerializer):
    run_id = RunIdField("With queued: that of the queued run.")
    cli = serializers.ChoiceField(
        sorted(CLIS), default="claude-code", help_text="Agent CLI; it must be in the sandbox's image."
    )
    prompt = StrictCharField(help_text="Written to stdin of the CLI. Stored in the chat history.")
    model = PatternField(
        MODEL_PATTERN, MODEL_DESCRIPTION, required=False, allow_null=True, help_text="Default: that of the CLI."
    )
    permission_mode = serializers.ChoiceField(PERMISSION_MODES, default="default")
    system_prompt = StrictCharField(default="", allow_blank=True, max_length=65536, help_text="Appended to that of the CLI.")
    session_id = PatternField(
        SESSION_PATTERN, SESSION_DESCRIPTION, required=False, allow_null=True,
        help_text="Session of the CLI to resume. If its state is gone, the prompt begins a new session.",
    )  # fmt: skip
    resume = StrictBooleanField(default=False, help_text="Resume the session of the lease's last run of this CLI.")
    allowed_tools = serializers.ListField(
        child=PatternField(r"[^\0,]{1,200}", "a name of at most 200 characters without commas"), default=list,
        max_length=MAX_PATTERNS, help_text="Tools that the agent may use. Empty: all that the policy allows.",
    )  # fmt: skip
    denied_commands = serializers.ListField(
        child=PatternField(r"[^\0()]{1,200}", "a pattern of at most 200 characters without parentheses"), default=list,
        max_length=MAX_PATTERNS, help_text='Shell commands that interrupt the run: patterns such as "git push*".',
    )  # fmt: skip
    max_turns = StrictIntegerField(min_value=1, max_value=10_000, required=False, allow_null=True)
    max_cost_usd = serializers.DecimalField(
        max_digits=15, decimal_places=9, min_value=Decimal(0), required=False, allow_null=True,
        help_text="Limit of the metered cost of the lease's model calls during the run, in a string.",
    )  # fmt: skip
    argv = ArgvField(required=False, allow_null=True, help_text="With cli program: the program and its arguments.")
    env = EnvField(default=dict, help_text="Environment variables. Their values are neither stored nor logged.")
    shell = PatternField(SHELL_NAME_PATTERN, SHELL_NAME_DESCRIPTION, required=False, allow_null=True)
    cwd = CwdField(required=False, help_text="Default: that of the shell, or /workspace. A session belongs to its directory.")
    timeout_seconds = StrictIntegerField(
        min_value=1,
        required=False,
        allow_null=True,
        help_text="Default: LEASEHOLD_EXEC_TIMEOUT_MOST of the server (1 hour). Maximum: LEASEHOLD_AGENT_RUN_TIMEOUT_MOST "
        "(12 hours).",
    )

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if isinstance(data, dict):
            refused = {name: reason for name in data if (reason := REFUSED_OPTIONS.get(_to_snake_case(name)))}
            if refused:
                raise ValidationError(refused)
        return super().to_internal_value(data)

    def validate_prompt(self, prompt: str) -> str:
        if len(prompt.encode(errors="replace")) > MAX_PROMPT_BYTES:
            raise ValidationError(f"Must have at most {MAX_PROMPT_BYTES} bytes.")
        return prompt

    def validate_timeout_seconds(self, value: int | None) -> int | None:
        maximum = int(settings.AGENT_RUN_TIMEOUT_MOST.total_seconds())
        if value and value > maximum:
            raise ValidationError(f"Must be at most {maximum}.")
        return value


class AgentRunSerializer(serializers.Serializer):
    run_id = serializers.UUIDField(help_text="Also the id of the run whose command is the CLI.")
    lease_id = serializers.UUIDField()
    cli = serializers.CharField()
    model = serializers.CharField()
    state = serializers.ChoiceField(AgentRunState.choices)
    failed_by = FailedByField()
    session_id = serializers.CharField(help_text="Session of the CLI. Empty until the CLI reports it.")
    resumed = serializers.BooleanField(
        allow_null=True, help_text="The requested session was resumed. Null: none was requested, or not known yet."
    )
    policy = serializers.DictField(help_text="Limits of the environment type and of the request together.")
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    interrupted_at = serializers.DateTimeField(allow_null=True)
    violation = serializers.CharField(help_text="Violation of the policy that interrupted the run. Else empty.")
    message_count = serializers.IntegerField()
    malformed_count = serializers.IntegerField(help_text="Lines of output that are not JSON objects.")
    lost_bytes = serializers.IntegerField(help_text="Bytes of output that were dropped before they were recorded.")
    turn_count = serializers.IntegerField(help_text="Answers of the model.")
    result = serializers.CharField(help_text="Last answer of the agent, at most 65,536 characters.")
    is_error = serializers.BooleanField(allow_null=True, help_text="As the CLI reports it. Null: no result.")
    cost_usd = serializers.CharField(help_text="Metered cost of the lease's model calls during the run.")
    reported_cost_usd = serializers.CharField(allow_null=True, help_text="Cost as the CLI reports it.")
    exit_code = serializers.IntegerField(allow_null=True)
    note = serializers.CharField(help_text="Reason of the end, if the exit code does not show it.")


NEW_AGENT_RUN_SERIALIZER = NewAgentRunSerializer()


class AgentRunStarter(ApiView):
    """Start of an agent run, now or from the queue, in a lease to which the key has access."""

    max_body_bytes = 2 * MAX_PROMPT_BYTES

    def start(
        self, find_lease: Callable[[], Lease], data: Mapping[str, Any], limits: AgentPolicy, *, agent_did: str
    ) -> HttpResponse:
        """Start the run of a validated body in a lease of the agent, and respond once it has begun; with `queued`, at once.

        `limits` apply besides those of the lease's environment type. `find_lease` is called once the request is known to be no
        repetition."""
        default = min(settings.EXEC_TIMEOUT_MOST, settings.AGENT_RUN_TIMEOUT_MOST)
        timeout = seconds_to_timedelta(data, "timeout_seconds") or default
        if data["queued"]:
            return self.execute_once(
                lambda run_id: self._enqueue(run_id, find_lease(), data, timeout, limits),
                chosen=build_chosen_id(data, Run.objects.none()),
            )
        require_queued(data)

        def rebuild(run: Run) -> StatusAndBody | None:
            row = AgentRun.objects.filter(pk=run.pk).first()
            return (201, serialize_agent_run(row)) if row else None

        max_duration = settings.SANDBOX_START_TIMEOUT + timedelta(minutes=1) + 2 * KILL_GRACE
        return self.execute_once(
            lambda run_id: self._begin(run_id, find_lease(), data, timeout, limits),
            max_duration=max_duration,
            repeatable=False,
            rebuild=rebuild,
            chosen=build_chosen_id(data, Run.objects.filter(agent_did=agent_did)),
        )

    def _begin(
        self, run_id: UUID, lease: Lease, data: Mapping[str, Any], timeout: timedelta, limits: AgentPolicy
    ) -> StatusAndBody:
        clock, actor = database_time.now, self.actor  # not `self.now`: the lease may just have been granted, after a wait
        context = shells.build_context(lease.pk, data.get("shell"), cwd=data.get("cwd"), env=data["env"])
        request = AgentRequest(data["cli"], build_options(lease, data, limits), context.env, context.cwd, timeout)
        created = lifecycle.create(lease.pk, request, run_id=run_id, now=clock(), actor=actor)
        thread = CommandThread(
            lambda started: lifecycle.execute(created, request, on_start=started.set, now=clock(), actor=actor)
        )
        thread.start_and_wait()
        own_run = Run.objects.filter(pk=run_id, holder=lease.pk)
        if thread.error is not None and not own_run.exclude(NEVER_STARTED).exists():
            raise thread.error  # nothing was executed
        return 201, serialize_agent_run(lifecycle.find(lease.pk, run_id))

    def _enqueue(
        self, queued_run_id: UUID, lease: Lease, data: Mapping[str, Any], timeout: timedelta, limits: AgentPolicy
    ) -> StatusAndBody:
        """Add the run to the queue. Its options and its session are those of now, and its shell is that of the start."""
        options = build_options(lease, data, limits)
        CLIS[data["cli"]].check(options)
        command = {
            "kind": "agent_run",
            "cli": data["cli"],
            "argv": list(options.argv),
            "options": {name: getattr(options, name) for name in QUEUED_OPTIONS},
            "policy": options.policy.to_document(),
            "cwd": data.get("cwd"),
            "shell": data.get("shell"),
            "timeout_seconds": int(timeout.total_seconds()),
            "key_id": self.key_id,
        }
        secrets = {"env": data["env"], "prompt": options.prompt}
        lease = leasing.require_active(lease.pk, now=self.now)
        row = queue.enqueue(
            queued_run_id, agent_did=lease.agent_did, lease=lease, pool=lease.pool, request=command, secrets=secrets,
            options=build_queue_options(data), now=self.now, actor=self.actor,
        )  # fmt: skip
        runner.get_runner().notify()
        return 202, serialize_queued_run(row)


def build_options(lease: Lease, data: Mapping[str, Any], limits: AgentPolicy) -> AgentOptions:
    """Build the options of a validated body. Its limits restrict `limits` and those of the environment type."""
    requested = AgentPolicy(
        tuple(data["allowed_tools"]), tuple(data["denied_commands"]), data.get("max_turns"), data.get("max_cost_usd")
    )
    session_id = data.get("session_id") or ""
    if data["resume"]:
        if session_id:
            raise InvalidRequest("resume", "Either resume or session_id.")
        session_id = lifecycle.find_last_session(lease.pk, data["cli"])
    return AgentOptions(
        data["prompt"],
        model=data.get("model") or "",
        permission_mode=data["permission_mode"],
        system_prompt=data["system_prompt"],
        session_id=session_id,
        argv=tuple(data.get("argv") or ()),
        policy=requested.restrict(limits).restrict(lifecycle.get_policy(lease)),
    )


class AgentRunListView(AgentRunStarter, LeaseApiView):
    @extend_schema(
        operation_id="leases_agent_runs_list",
        summary="List agent runs",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(AgentRunSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the runs of agent CLIs in the sandbox of a lease, newest first."""
        page, next_url = paginate(AgentRun.objects.filter(lease=pk), "started_at", request)
        return Response({"results": serialize_agent_runs(page), "next": next_url})

    @extend_schema(
        operation_id="leases_agent_runs_create",
        summary="Run an agent CLI",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewAgentRunSerializer,
        responses=schema.build_responses(AgentRunSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,))
        | {202: QueuedRunSerializer},
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Start an agent CLI with a prompt, and respond once its command has begun. A cold sandbox is woken.

        Read the messages from the stream of the run. A client that goes away does not end the run. With `queued`, the answer is
        202 with the queued run, which a runner executes later."""
        data = self.validate_body(NEW_AGENT_RUN_SERIALIZER)
        return self.start(lambda: self.lease, data, AgentPolicy(), agent_did=self.lease.agent_did)


class AgentRunView(LeaseApiView):
    @extend_schema(
        operation_id="leases_agent_runs_get",
        summary="Get an agent run",
        responses=schema.build_responses(AgentRunSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID, run_id: UUID) -> HttpResponse:
        """Return one agent run."""
        return Response(serialize_agent_run(lifecycle.find(pk, run_id)))


class AgentRunInterruptView(LeaseApiView):
    @extend_schema(
        operation_id="leases_agent_runs_interrupt",
        summary="Interrupt an agent run",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(AgentRunSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID, run_id: UUID) -> HttpResponse:
        """Kill the CLI with its descendants. Idempotent, and without effect once the run has ended."""

        def act(_: UUID) -> StatusAndBody:
            row = lifecycle.find(pk, run_id)
            interruption.interrupt(row, now=self.now)
            return 200, serialize_agent_run(row)

        return self.execute_once(act)


def serialize_agent_run(row: AgentRun) -> dict[str, Any]:
    return serialize_agent_runs([row])[0]


def serialize_agent_runs(rows: Sequence[AgentRun]) -> list[dict[str, Any]]:
    """Serialize agent runs, with their exit codes and costs by one query."""
    results = load_results([row.pk for row in rows], now=database_time.now())
    return [_serialize(row, results.get(row.pk, AgentRunResult())) for row in rows]


def _serialize(row: AgentRun, result: AgentRunResult) -> dict[str, Any]:
    return {
        "run_id": str(row.pk),
        "lease_id": str(row.lease_id),
        "cli": row.cli,
        "model": row.model,
        "state": row.state,
        "failed_by": classify_agent_run(row, result.run),
        "session_id": row.session_id,
        "resumed": row.resumed,
        "policy": row.policy,
        "started_at": format_timestamp(row.started_at),
        "ended_at": format_optional_timestamp(row.ended_at),
        "interrupted_at": format_optional_timestamp(row.interrupted_at),
        "violation": row.violation,
        "message_count": row.message_count,
        "malformed_count": row.malformed_count,
        "lost_bytes": row.lost_bytes,
        "turn_count": row.turn_count,
        "result": row.result,
        "is_error": row.is_error,
        "cost_usd": f"{result.cost:f}",
        "reported_cost_usd": None if row.reported_cost is None else f"{row.reported_cost:f}",
        "exit_code": result.run.exit_code if result.run else None,
        "note": omit_answers(row.note),
    }


def _to_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower() if isinstance(name, str) else ""
