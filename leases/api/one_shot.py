"""One-shot runs: one command in a new sandbox, which is destroyed before the response is sent."""

import base64
import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response

from leases import leasing, one_shot
from leases.api.base import schema
from leases.api.base.fields import (
    AnyStringField,
    FailedByField,
    PatternField,
    RunIdField,
    StrictBooleanField,
    StrictIntegerField,
    StrictSerializer,
    StrictUUIDField,
    build_did_field,
    decode_input,
    encode_streams,
    parse_encoding,
    seconds_to_timedelta,
)
from leases.api.base.idempotency import InProgress, StatusAndBody, build_chosen_id
from leases.api.base.views import ApiRequest, ApiView
from leases.api.queue_fields import (
    QueuedRunSerializer,
    QueueSerializer,
    build_queue_options,
    require_queued,
    serialize_queued_run,
)
from leases.api.runs import SHELL_NAME_DESCRIPTION, SHELL_NAME_PATTERN, ExecSerializer, ProgramSerializer
from leases.errors import InvalidRequest
from leases.errors import RequestTooLarge as BodyTooLarge
from leases.models import Lease
from leases.one_shot import OneShotOutcome, OneShotRequest, OneShotResult
from leases.queue import queue, runner
from sandboxes.claims import KILL_GRACE
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import Pool, Run, RunOutcome
from sandboxes.providers import tar_validation
from sandboxes.providers.base import WORKSPACE
from sandboxes.providers.errors import Rejected, TooLarge
from sandboxes.redaction.texts import omit_answers

MAX_NEW_RUN_BODY_BYTES = 32 << 20  # mostly the workspace
MAX_RETURNED_WORKSPACE_BYTES = 16 << 20  # size of the tar in a response


class LimitsSerializer(StrictSerializer):
    timeout_seconds = StrictIntegerField(
        min_value=1, required=False, allow_null=True, help_text="Default: LEASEHOLD_EXEC_TIMEOUT of the server."
    )
    memory_mib = StrictIntegerField(
        min_value=1, required=False, allow_null=True,
        help_text="At most LEASEHOLD_RUN_MEMORY_MOST_MIB. Default: memory of the pool's sandboxes.",
    )  # fmt: skip

    validate_timeout_seconds = ExecSerializer.validate_timeout_seconds


class LlmProxySerializer(StrictSerializer):
    enabled = StrictBooleanField(default=True, help_text="false: the model calls of the run are refused.")


class NewRunSerializer(QueueSerializer, ProgramSerializer):
    run_id = RunIdField("With queued: that of the queued run.")
    lease_id = StrictUUIDField(
        required=False, allow_null=True, help_text="With queued: lease of the agent in whose sandbox the command runs."
    )
    shell = PatternField(
        SHELL_NAME_PATTERN,
        SHELL_NAME_DESCRIPTION,
        required=False,
        allow_null=True,
        help_text="With lease_id: shell of the lease.",
    )
    agent_did = build_did_field()
    stdin = AnyStringField(default="")
    workspace = AnyStringField(
        required=False,
        allow_null=True,
        help_text=f"Uncompressed tar in base64, unpacked into {WORKSPACE} before the command starts.",
    )
    return_workspace = StrictBooleanField(default=False, help_text=f"Return the content of {WORKSPACE} after the command.")
    limits = LimitsSerializer(required=False, allow_null=True)
    llm_proxy = LlmProxySerializer(required=False, allow_null=True)
    environment_type = PatternField(
        r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True,
        help_text="Environment type of the run. Default: run.",
    )  # fmt: skip
    pool = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True)


class OneShotRunSerializer(serializers.Serializer):
    run_id = serializers.UUIDField()
    lease_id = serializers.UUIDField(help_text="Equal to run_id: each run has its own lease.")
    outcome = serializers.ChoiceField(
        [outcome.value for outcome in OneShotOutcome], allow_null=True,
        help_text="ok: exit code 0; failed: other exit code; timeout, oom_killed: killed; container_failed: the sandbox "
        "did not start, did not respond or was lost; internal: error in the control plane. Null while running.",
    )  # fmt: skip
    failed_by = FailedByField()
    exit_code = serializers.IntegerField(allow_null=True, help_text="128 + n after signal n; null: unknown.")
    stdout = serializers.CharField(help_text="Output; in a GET only its stored beginning.")
    stderr = serializers.CharField()
    truncated = serializers.BooleanField(help_text="The output exceeded the limit; the rest was dropped.")
    duration_seconds = serializers.FloatField(allow_null=True, help_text="Duration including the transfer of the workspace.")
    note = serializers.CharField(help_text="Reason for the outcome, if the exit code does not show it.")
    cleaned_up = serializers.BooleanField(
        help_text="The sandbox is confirmed destroyed. false: the sweeps retry the destruction."
    )


class OneShotResultSerializer(OneShotRunSerializer):
    workspace = serializers.CharField(
        allow_null=True,
        help_text=f"{WORKSPACE} without .home as an uncompressed tar in base64, at most "
        f"{MAX_RETURNED_WORKSPACE_BYTES >> 20} MiB. Null if not requested, or if the copy failed: `note` has the reason.",
    )


NEW_RUN_SERIALIZER = NewRunSerializer()


class OneShotRunCreateView(ApiView):
    max_body_bytes = MAX_NEW_RUN_BODY_BYTES

    @extend_schema(
        operation_id="runs_create",
        summary="Execute a command in a new sandbox",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=NewRunSerializer,
        responses=schema.build_responses(OneShotResultSerializer, 402, 404, 409, 410, 413, 415, 429)
        | {202: QueuedRunSerializer},
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Create a sandbox, run one command, destroy the sandbox and return the result.

        A failure of the command or of its sandbox is a result (200). Invalid input and exhausted capacity, quota or budget are
        errors; the command has then not run.

        With `queued`, the answer is 202 with the queued run, which a runner executes later: in the sandbox of `lease_id`, or in
        a new one."""
        encoding = parse_encoding(request)
        data = self.validate_body(NEW_RUN_SERIALIZER)
        self.caller.require(data["agent_did"])
        if data["queued"]:
            return self._enqueue(data, encoding)
        require_queued(data, "lease_id", "shell")
        workspace_out = io.BytesIO()
        one_shot_request = replace(
            build_one_shot_request(data, encoding, workspace_out), key_id=self.key_id, allowed=self.caller.allowed
        )

        def act(run_id: UUID) -> StatusAndBody:
            with LONG_CALLS.admit():  # before the grant: a refused call leaves no lease
                result = one_shot.run_once(
                    replace(one_shot_request, run_id=run_id), now=self.now, actor=self.actor, admit=self.consume_creation_token
                )
            return 200, serialize_one_shot_result(result, workspace_out.getvalue(), encoding)

        def rebuild(run: Run) -> StatusAndBody | None:
            if data["return_workspace"] or run.outcome == RunOutcome.LOST or run.exit_code is None:
                return None
            result = one_shot.load_result(Lease.objects.get(pk=run.pk))
            if (run.stdout_bytes, run.stderr_bytes) != (len(result.stdout), len(result.stderr)):
                return None
            if result.outcome is None:
                raise InProgress("The command has ended, and its sandbox is not destroyed yet.", run_id=str(run.pk))
            return 200, serialize_one_shot_result(result, b"", encoding)

        max_duration = one_shot_request.max_duration + one_shot.CLEANUP_TIMEOUT + 2 * KILL_GRACE
        own_runs = Run.objects.filter(holder=data.get("run_id"), agent_did=data["agent_did"])
        return self.execute_once(
            act, max_duration=max_duration, repeatable=False, rebuild=rebuild, chosen=build_chosen_id(data, own_runs)
        )

    def _enqueue(self, data: dict[str, Any], encoding: str) -> HttpResponse:
        """Add the command to the queue. Placement, allow lists and lease are checked now, and again when the run starts.

        The rate limit of new leases applies when the run starts, because a run that is only queued has no lease."""
        for name in ("workspace", "return_workspace"):
            if data.get(name):
                raise InvalidRequest(name, "Not with queued.")
        options, limits = build_queue_options(data), data.get("limits") or {}
        lease, pool = self._find_placement(data)
        timeout = seconds_to_timedelta(limits, "timeout_seconds") or settings.EXEC_TIMEOUT
        command = {
            "kind": "exec",
            "argv": data["argv"],
            "cwd": data["cwd"],
            "shell": data.get("shell"),
            "timeout_seconds": int(timeout.total_seconds()),
            "memory_mib": limits.get("memory_mib"),
            "environment_type": data.get("environment_type") or one_shot.DEFAULT_ENVIRONMENT_TYPE,
            "pool": data.get("pool") or "",
            "llm_proxy": has_llm_proxy(data),
            "key_id": self.key_id,
        }
        secrets = {"env": data["env"], "stdin": queue.encode_bytes(decode_input(data["stdin"], encoding, "stdin"))}

        def act(pk: UUID) -> StatusAndBody:
            row = queue.enqueue(
                pk, agent_did=data["agent_did"], lease=lease, pool=pool, request=command, secrets=secrets, options=options,
                now=self.now, actor=self.actor,
            )  # fmt: skip
            runner.get_runner().notify()
            return 202, serialize_queued_run(row)

        return self.execute_once(act, chosen=build_chosen_id(data, Run.objects.none()))

    def _find_placement(self, data: Mapping[str, Any]) -> tuple[Lease | None, Pool]:
        """Return the lease of a queued run, or None, and its pool. Raise the errors of a wrong lease or placement."""
        if not data.get("lease_id"):
            if data.get("shell"):
                raise InvalidRequest("shell", "Only with lease_id.")
            request = leasing.LeaseRequest(
                data["agent_did"], "run", data.get("environment_type") or one_shot.DEFAULT_ENVIRONMENT_TYPE,
                pool=data.get("pool") or "", key_id=self.key_id, allowed=self.caller.allowed,
            )  # fmt: skip
            return None, leasing.find_type_and_pool(request)[1]
        for name in ("environment_type", "pool", "limits.memory_mib"):
            value = (data.get("limits") or {}).get("memory_mib") if "." in name else data.get(name)
            if value is not None:
                raise InvalidRequest(name, "Not with lease_id.")
        if data.get("llm_proxy") is not None:
            raise InvalidRequest("llm_proxy", "Not with lease_id: the other commands of a sandbox share its model proxy.")
        lease = self.caller.get_lease(data["lease_id"])
        if lease.agent_did != data["agent_did"]:
            raise InvalidRequest("lease_id", "The lease belongs to another agent.")
        return leasing.require_active(lease.pk, now=self.now), lease.pool


class OneShotRunView(ApiView):
    @extend_schema(
        operation_id="runs_get",
        summary="Get a one-shot run",
        parameters=[schema.ENCODING_PARAMETER],
        responses=schema.build_responses(OneShotRunSerializer, 404),
    )
    def get(self, request: ApiRequest, run_id: UUID) -> HttpResponse:
        """Return the stored result of a one-shot run, also if the connection of the POST was lost."""
        lease = self.caller.get_lease(run_id)
        if lease.environment_id != f"run-{run_id}":
            raise NotFound("There is no such run.")
        result = one_shot.load_result(leasing.apply_elapsed_clock(lease, self.now))
        return Response(serialize_one_shot_run(result, parse_encoding(request)))


def build_one_shot_request(data: Mapping[str, Any], encoding: str, workspace_out: BinaryIO) -> OneShotRequest:
    limits, workspace = data.get("limits") or {}, data.get("workspace")
    return OneShotRequest(
        agent_did=data["agent_did"],
        argv=data["argv"],
        timeout=seconds_to_timedelta(limits, "timeout_seconds") or settings.EXEC_TIMEOUT,
        stdin=decode_input(data["stdin"], encoding, "stdin"),
        env=data["env"],
        cwd=data["cwd"],
        workspace=None if workspace is None else _decode_workspace(workspace),
        output=workspace_out if data["return_workspace"] else None,
        max_returned_bytes=MAX_RETURNED_WORKSPACE_BYTES,
        memory_mib=limits.get("memory_mib"),
        environment_type=data.get("environment_type") or one_shot.DEFAULT_ENVIRONMENT_TYPE,
        pool=data.get("pool") or "",
        llm_proxy=has_llm_proxy(data),
    )


def has_llm_proxy(data: Mapping[str, Any]) -> bool:
    """Return whether the run of a validated body may make model calls."""
    return bool((data.get("llm_proxy") or {}).get("enabled", True))


def _decode_workspace(text: str) -> BinaryIO:
    """Decode and validate the tar of a workspace."""
    tar = io.BytesIO(decode_input(text, "base64", "workspace"))
    try:
        tar_validation.validate_tar(tar)
    except TooLarge as error:
        raise BodyTooLarge(str(error), field="workspace") from None
    except Rejected as error:
        raise InvalidRequest("workspace", str(error)) from None
    return tar


def serialize_one_shot_run(result: OneShotResult, encoding: str) -> dict[str, Any]:
    return {
        "run_id": str(result.run_id),
        "lease_id": str(result.lease_id),
        "outcome": result.outcome,
        "failed_by": result.failed_by,
        "exit_code": result.exit_code,
        **encode_streams(result, encoding),
        "truncated": result.truncated,
        "duration_seconds": result.duration.total_seconds() if result.duration is not None else None,
        "note": omit_answers(result.note),
        "cleaned_up": result.cleaned_up,
    }


def serialize_one_shot_result(result: OneShotResult, workspace: bytes, encoding: str) -> dict[str, Any]:
    encoded = base64.b64encode(workspace).decode() if result.workspace_returned else None
    return serialize_one_shot_run(result, encoding) | {"workspace": encoded}
