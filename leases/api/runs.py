"""Commands and other runs of a lease."""

from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response

from leases import execution
from leases.api import schema
from leases.api.fields import (
    AnyStringField,
    ArgvField,
    EnvField,
    StrictCharField,
    StrictIntegerField,
    decode_input,
    encode_output,
    parse_encoding,
    seconds_to_timedelta,
)
from leases.api.idempotency import StatusAndBody
from leases.api.pagination import paginate
from leases.api.turns import MAX_TURN_NUMBER
from leases.api.views import ApiRequest, HotLeaseApiView, LeaseApiView
from sandboxes.db.clock import format_timestamp
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import RUN_KINDS, Run, RunOutcome
from sandboxes.providers.base import WORKSPACE, ExecResult
from sandboxes.runs import KILL_GRACE, Command

MAX_EXEC_BODY_BYTES = 16 << 20  # stdin, mostly


class ProgramSerializer(serializers.Serializer):
    argv = ArgvField(help_text="The program and its arguments; no shell.")
    env = EnvField(default=dict, help_text="Values are neither stored nor logged.")
    cwd = StrictCharField(default=WORKSPACE, max_length=4000)

    def validate_cwd(self, value: str) -> str:
        if not value.startswith("/"):
            raise serializers.ValidationError("An absolute path.")
        return value


class ExecSerializer(ProgramSerializer):
    stdin = AnyStringField(default="")
    timeout_seconds = StrictIntegerField(
        min_value=1, required=False, allow_null=True, help_text="Default: LEASEHOLD_EXEC_TIMEOUT."
    )

    def validate_timeout_seconds(self, value: int | None) -> int | None:
        most = int(settings.EXEC_TIMEOUT_MOST.total_seconds())
        if value and value > most:
            raise serializers.ValidationError(f"At most {most}.")
        return value


class ExecResultSerializer(serializers.Serializer):
    run_id = serializers.UUIDField()
    exit_code = serializers.IntegerField(help_text="128 + n after signal n.")
    stdout = serializers.CharField()
    stderr = serializers.CharField()
    timed_out = serializers.BooleanField()
    oom = serializers.BooleanField()
    truncated = serializers.BooleanField(help_text="The output was longer than what is kept.")
    duration_seconds = serializers.FloatField()


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
    exit_code = serializers.IntegerField(allow_null=True)
    timed_out = serializers.BooleanField()
    oom = serializers.BooleanField()
    truncated = serializers.BooleanField()
    duration_seconds = serializers.FloatField(allow_null=True)
    note = serializers.CharField(help_text="Why it was closed, when the command itself cannot say.")


class RunOutputSerializer(RunSerializer):
    stdout = serializers.CharField(help_text="The first bytes, as many as are stored with a Run.")
    stderr = serializers.CharField()


EXEC_SERIALIZER = ExecSerializer()


class ExecView(HotLeaseApiView):
    max_body_bytes = MAX_EXEC_BODY_BYTES

    @extend_schema(
        operation_id="leases_exec",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=ExecSerializer,
        responses=schema.build_responses(ExecResultSerializer, 402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Run a command in the lease's sandbox and wait for it. Failing and timing out are results, too."""
        encoding = parse_encoding(request)
        said = self.validate_body(EXEC_SERIALIZER)
        timeout = seconds_to_timedelta(said, "timeout_seconds") or settings.EXEC_TIMEOUT
        stdin = decode_input(said["stdin"], encoding, "stdin")

        def act(run_id: UUID) -> StatusAndBody:
            command = Command(said["argv"], timeout, said["env"], said["cwd"], stdin, run_id=run_id)
            try:
                run, result = execution.exec_command(pk, command, now=self.now, actor=self.actor)
            except ProviderCallFailed as failed:
                failed.extra["run_id"] = str(run_id)  # which says what is known
                raise
            return 200, serialize_exec_result(run, result, encoding)

        patience = settings.SANDBOX_START_TIMEOUT + timeout + 2 * KILL_GRACE
        return self.execute_once(act, patience=patience, repeatable=False)


class RunListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_runs_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(RunSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """What ran for a lease, newest first."""
        ran = Run.objects.filter(holder=pk).defer("stdout", "stderr")
        found, following = paginate(ran, "started_at", request)
        return Response({"results": [serialize_run(run) for run in found], "next": following})


class RunView(LeaseApiView):
    @extend_schema(
        operation_id="leases_runs_get",
        parameters=[schema.ENCODING_PARAMETER],
        responses=schema.build_responses(RunOutputSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID, run_id: UUID) -> HttpResponse:
        """One run, with the first bytes of what it printed."""
        run = Run.objects.filter(pk=run_id, holder=pk).first()
        if run is None:
            raise NotFound("There is no such run of this lease.")
        return Response(serialize_run_output(run, parse_encoding(request)))


def serialize_exec_result(run: Run, result: ExecResult, encoding: str) -> dict[str, Any]:
    return {
        "run_id": str(run.pk),
        "exit_code": result.exit_code,
        "stdout": encode_output(result.stdout, encoding),
        "stderr": encode_output(result.stderr, encoding),
        "timed_out": result.timed_out,
        "oom": result.oom,
        "truncated": result.truncated,
        "duration_seconds": result.duration.total_seconds(),
    }


def serialize_run(run: Run) -> dict[str, Any]:
    return {
        "run_id": str(run.pk),
        "kind": run.kind,
        "argv": run.argv,
        "cwd": run.cwd,
        "env_names": run.env_names,
        "turn_number": run.turn_number,
        "started_at": format_timestamp(run.started_at),
        "ended_at": format_timestamp(run.ended_at) if run.ended_at else None,
        "outcome": run.outcome,
        "exit_code": run.exit_code,
        "timed_out": run.timed_out,
        "oom": run.oom,
        "truncated": run.truncated,
        "duration_seconds": run.duration.total_seconds() if run.duration is not None else None,
        "note": run.note,
    }


def serialize_run_output(run: Run, encoding: str) -> dict[str, Any]:
    output = {"stdout": encode_output(bytes(run.stdout), encoding), "stderr": encode_output(bytes(run.stderr), encoding)}
    return serialize_run(run) | output
