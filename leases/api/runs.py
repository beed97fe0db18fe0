"""Runs of a lease: exec, list, get."""

from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response

from leases import execution, shells
from leases.api.base import schema
from leases.api.base.fields import (
    AnyStringField,
    ArgvField,
    EnvField,
    FailedByField,
    PatternField,
    RunIdField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
    decode_input,
    encode_streams,
    parse_encoding,
    seconds_to_timedelta,
)
from leases.api.base.idempotency import StatusAndBody, build_chosen_id
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, HotLeaseApiView, LeaseApiView
from leases.api.turns import MAX_TURN_NUMBER
from leases.errors import LeaseEnded
from sandboxes.claims import KILL_GRACE
from sandboxes.db import database_time
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.errors import ProviderCallFailed, SandboxLost
from sandboxes.failed_by import classify_run
from sandboxes.models import RUN_KINDS, Run, RunOutcome, StopReason
from sandboxes.providers.base import WORKSPACE
from sandboxes.providers.command_results import ExecResult
from sandboxes.redaction.texts import omit_answers
from sandboxes.runs.operations import Command
from sandboxes.state.run_outputs import get_stored_sizes, load_output

MAX_EXEC_BODY_BYTES = 16 << 20  # mostly stdin


SHELL_NAME_PATTERN, SHELL_NAME_DESCRIPTION = r"[A-Za-z0-9][-A-Za-z0-9._]{0,99}", "1 to 100 letters, digits, - . and _"


class CwdField(StrictCharField):
    """Absolute path of a directory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=4000, **options)

    def to_internal_value(self, data: Any) -> str:
        value = super().to_internal_value(data)
        if not value.startswith("/"):
            raise serializers.ValidationError("Must be an absolute path.")
        return value


class ProgramSerializer(StrictSerializer):
    argv = ArgvField(help_text="Program and arguments, executed without a shell.")
    env = EnvField(default=dict, help_text="Environment variables. Their values are neither stored nor logged.")
    cwd = CwdField(default=WORKSPACE)


class LeaseProgramSerializer(ProgramSerializer):
    """Program in the sandbox of a lease, which may have shells."""

    shell = PatternField(
        SHELL_NAME_PATTERN, SHELL_NAME_DESCRIPTION, required=False, allow_null=True,
        help_text="Shell whose variables and working directory apply, unless this request states others.",
    )  # fmt: skip
    cwd = CwdField(required=False, help_text="Default: that of the shell, or /workspace.")


class ExecSerializer(LeaseProgramSerializer):
    run_id = RunIdField()
    stdin = AnyStringField(default="")
    timeout_seconds = StrictIntegerField(
        min_value=1, required=False, allow_null=True, help_text="Default: LEASEHOLD_EXEC_TIMEOUT of the server."
    )

    def validate_timeout_seconds(self, value: int | None) -> int | None:
        max_seconds = int(settings.EXEC_TIMEOUT_MOST.total_seconds())
        if value and value > max_seconds:
            raise serializers.ValidationError(f"Must be at most {max_seconds}.")
        return value


class ExecResultSerializer(serializers.Serializer):
    run_id = serializers.UUIDField()
    exit_code = serializers.IntegerField(help_text="128 + n after signal n.")
    failed_by = FailedByField()
    stdout = serializers.CharField()
    stderr = serializers.CharField()
    timed_out = serializers.BooleanField()
    oom = serializers.BooleanField()
    truncated = serializers.BooleanField(help_text="The output exceeded the limit; the rest was dropped.")
    duration_seconds = serializers.FloatField()
    note = serializers.CharField(
        help_text="Warning: the sandbox was restarted, /workspace is over its limit, or /data is not stored yet. Else empty."
    )


class RunSerializer(serializers.Serializer):
    run_id = serializers.UUIDField()
    kind = serializers.ChoiceField(RUN_KINDS)
    argv = serializers.ListField(child=serializers.CharField())
    cwd = serializers.CharField()
    env_names = serializers.ListField(child=serializers.CharField())
    turn_number = serializers.IntegerField(allow_null=True, max_value=MAX_TURN_NUMBER)
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    outcome = serializers.ChoiceField(RunOutcome.choices)
    failed_by = FailedByField()
    stop_reason = serializers.ChoiceField(
        StopReason.choices, allow_null=True, help_text="Reason for which the command was stopped; null: it was not."
    )
    error_code = serializers.CharField(help_text="Code of the error that ended a run without an exit code. Else empty.")
    exit_code = serializers.IntegerField(allow_null=True)
    timed_out = serializers.BooleanField()
    oom = serializers.BooleanField()
    truncated = serializers.BooleanField()
    duration_seconds = serializers.FloatField(allow_null=True)
    note = serializers.CharField(help_text="Reason of the end, if the exit code does not show it.")


class RunOutputSerializer(RunSerializer):
    stdout = serializers.CharField(help_text="Stored beginning of stdout.")
    stderr = serializers.CharField()


EXEC_SERIALIZER = ExecSerializer()


class ExecView(HotLeaseApiView):
    max_body_bytes = MAX_EXEC_BODY_BYTES
    run_id: UUID | None = None  # once the command is about to be executed

    @extend_schema(
        operation_id="leases_exec",
        summary="Execute a command",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=ExecSerializer,
        responses=schema.build_responses(ExecResultSerializer, 402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Run a command in the lease's sandbox and return its output. A cold sandbox is woken.

        A command that fails or times out is a result (200), not an error."""
        return self.execute(pk, self.validate_body(EXEC_SERIALIZER), parse_encoding(request))

    def execute(self, pk: UUID, data: dict[str, Any], encoding: str, **options: Any) -> HttpResponse:
        """Execute the command of a validated body, once per idempotency key. `options` are further fields of the Command."""
        timeout = seconds_to_timedelta(data, "timeout_seconds") or settings.EXEC_TIMEOUT
        stdin = decode_input(data["stdin"], encoding, "stdin")

        def act(run_id: UUID) -> StatusAndBody:
            context = shells.build_context(pk, data.get("shell"), cwd=data.get("cwd"), env=data["env"])
            command = Command(data["argv"], timeout, context.env, context.cwd, stdin, run_id=run_id, **options)
            self.run_id = run_id
            try:
                run, result = execution.exec_command(pk, command, now=database_time.now(), actor=self.actor)
            except (LeaseEnded, ProviderCallFailed, SandboxLost) as failed:
                if Run.objects.filter(pk=run_id, holder=pk).exists():
                    failed.extra["run_id"] = str(run_id)  # run with the known part of the outcome
                raise
            return 200, serialize_exec_result(run, result, encoding)

        def rebuild(run: Run) -> StatusAndBody | None:
            answer = rebuild_exec_result(run, encoding)
            return (200, answer) if answer else None

        max_duration = settings.SANDBOX_START_TIMEOUT + timeout + 2 * KILL_GRACE
        chosen = build_chosen_id(data, Run.objects.filter(holder=pk))
        return self.execute_once(act, max_duration=max_duration, repeatable=False, rebuild=rebuild, chosen=chosen)


class RunListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_runs_list",
        summary="List runs",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(RunSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the commands, turns and file operations of a lease, newest first."""
        runs = Run.objects.filter(holder=pk).defer("stdout", "stderr")
        page, next_url = paginate(runs, "started_at", request)
        return Response({"results": [serialize_run(run) for run in page], "next": next_url})


class RunView(LeaseApiView):
    @extend_schema(
        operation_id="leases_runs_get",
        summary="Get a run",
        parameters=[schema.ENCODING_PARAMETER],
        responses=schema.build_responses(RunOutputSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID, run_id: UUID) -> HttpResponse:
        """Return one run with the stored beginning of its output."""
        run = Run.objects.filter(pk=run_id, holder=pk).first()
        if run is None:
            raise NotFound("The lease has no such run.")
        return Response(serialize_run_output(run, parse_encoding(request)))


def serialize_exec_result(run: Run, result: ExecResult, encoding: str) -> dict[str, Any]:
    return {
        "run_id": str(run.pk),
        "exit_code": result.exit_code,
        "failed_by": classify_run(run),
        **encode_streams(result, encoding),
        "timed_out": result.timed_out,
        "oom": result.oom,
        "truncated": result.truncated,
        "duration_seconds": result.duration.total_seconds(),
        "note": omit_answers(run.note),
    }


def rebuild_exec_result(run: Run, encoding: str) -> dict[str, Any] | None:
    """Answer of an exec whose process died before it responded. None if the result is not known or not stored completely.

    `duration_seconds` then includes the time until the end of the run was recorded."""
    if run.ended_at is None or run.outcome == RunOutcome.LOST or run.exit_code is None:
        return None
    if (run.stdout_bytes, run.stderr_bytes) != get_stored_sizes(run):
        return None
    output = load_output(run)
    return serialize_exec_result(run, ExecResult(
        exit_code=run.exit_code, stdout=output.stdout, stderr=output.stderr, timed_out=run.timed_out, oom=run.oom,
        truncated=run.truncated, duration=run.ended_at - run.started_at,
    ), encoding)  # fmt: skip


def serialize_run(run: Run) -> dict[str, Any]:
    return {
        "run_id": str(run.pk),
        "kind": run.kind,
        "argv": run.argv,
        "cwd": run.cwd,
        "env_names": run.env_names,
        "turn_number": run.turn_number,
        "started_at": format_timestamp(run.started_at),
        "ended_at": format_optional_timestamp(run.ended_at),
        "outcome": run.outcome,
        "failed_by": classify_run(run),
        "stop_reason": run.stop_reason or None,
        "error_code": run.error_code,
        "exit_code": run.exit_code,
        "timed_out": run.timed_out,
        "oom": run.oom,
        "truncated": run.truncated,
        "duration_seconds": run.duration.total_seconds() if run.duration is not None else None,
        "note": omit_answers(run.note),
    }


def serialize_run_output(run: Run, encoding: str) -> dict[str, Any]:
    return serialize_run(run) | encode_streams(load_output(run), encoding)
