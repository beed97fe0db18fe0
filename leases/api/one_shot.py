"""One-shot runs."""

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
from leases.api import schema
from leases.api.fields import (
    AnyStringField,
    PatternField,
    StrictBooleanField,
    StrictIntegerField,
    build_did_field,
    decode_input,
    encode_output,
    parse_encoding,
    seconds_to_timedelta,
)
from leases.api.idempotency import StatusAndBody
from leases.api.runs import ExecSerializer, ProgramSerializer
from leases.api.views import ApiRequest, ApiView
from leases.errors import InvalidRequest
from leases.errors import RequestTooLarge as BodyTooLarge
from leases.one_shot import OneShotOutcome, OneShotRequest, OneShotResult
from sandboxes.providers.base import WORKSPACE, Rejected, TooLarge
from sandboxes.runs import KILL_GRACE
from sandboxes.state import archives

MAX_NEW_RUN_BODY_BYTES = 32 << 20  # a workspace, mostly
MAX_RETURNED_WORKSPACE_BYTES = 16 << 20  # bytes of a workspace, as a tar, that an answer brings back


class LimitsSerializer(serializers.Serializer):
    timeout_seconds = StrictIntegerField(
        min_value=1, required=False, allow_null=True, help_text="Default: LEASEHOLD_EXEC_TIMEOUT."
    )
    memory_mib = StrictIntegerField(
        min_value=1, required=False, allow_null=True,
        help_text="At most LEASEHOLD_RUN_MEMORY_MOST_MIB. Default: what the pool gives.",
    )  # fmt: skip

    validate_timeout_seconds = ExecSerializer.validate_timeout_seconds


class NewRunSerializer(ProgramSerializer):
    agent_did = build_did_field()
    stdin = AnyStringField(default="")
    workspace = AnyStringField(
        required=False, allow_null=True, help_text=f"An uncompressed tar in base64, unpacked into {WORKSPACE} before."
    )
    return_workspace = StrictBooleanField(default=False, help_text=f"Answer with what is in {WORKSPACE} afterwards.")
    limits = LimitsSerializer(required=False, allow_null=True)
    environment_type = PatternField(
        r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True,
        help_text="What holds for it. Default: run.",
    )  # fmt: skip
    pool = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True)


class OneShotRunSerializer(serializers.Serializer):
    run_id = serializers.UUIDField()
    lease_id = serializers.UUIDField(help_text="The same: the environment of that lease is this run.")
    outcome = serializers.ChoiceField(
        [how.value for how in OneShotOutcome], allow_null=True,
        help_text="ok: exit code 0; failed: another one; timeout, oom_killed: it was killed; container_failed: its sandbox "
        "could not be started, did not answer, or was lost; internal: the control plane failed. Null while it runs.",
    )  # fmt: skip
    exit_code = serializers.IntegerField(allow_null=True, help_text="128 + n after signal n; null if it is not known.")
    stdout = serializers.CharField(help_text="When asked for later: the first bytes, as many as are stored with a Run.")
    stderr = serializers.CharField()
    truncated = serializers.BooleanField(help_text="There was more output than this.")
    duration_seconds = serializers.FloatField(allow_null=True, help_text="With what copying the workspace took.")
    note = serializers.CharField(help_text="Why, when the command itself cannot say.")
    cleaned_up = serializers.BooleanField(help_text="Its sandbox is confirmed gone. If not, the sweeps go on until it is.")


class OneShotResultSerializer(OneShotRunSerializer):
    workspace = serializers.CharField(
        allow_null=True,
        help_text=f"{WORKSPACE} without .home as an uncompressed tar in base64, "
        f"at most {MAX_RETURNED_WORKSPACE_BYTES >> 20} MiB of it. Null "
        "if it was not asked for or could not be brought back: then `note` says why.",
    )


NEW_RUN_SERIALIZER = NewRunSerializer()


class OneShotRunCreateView(ApiView):
    max_body_bytes = MAX_NEW_RUN_BODY_BYTES

    @extend_schema(
        operation_id="runs_create",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=NewRunSerializer,
        responses=schema.build_responses(OneShotResultSerializer, 402, 409, 413, 415, 429),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Run one command in a sandbox of its own, made for it and destroyed before this answers. However it ended is an
        answer, also that there was no sandbox to be had; no place, no quota and bad input are errors, and nothing has run."""
        encoding = parse_encoding(request)
        said = self.validate_body(NEW_RUN_SERIALIZER)
        self.caller.require(said["agent_did"])
        back = io.BytesIO()
        wish = replace(build_one_shot_request(said, encoding, back), key_id=self.key_id)

        def act(run_id: UUID) -> StatusAndBody:
            result = one_shot.run_once(
                replace(wish, run_id=run_id), now=self.now, actor=self.actor, admit=self.consume_creation_token
            )
            return 200, serialize_one_shot_result(result, back.getvalue(), encoding)

        patience = wish.longest + one_shot.CLEANUP_TIMEOUT + 2 * KILL_GRACE
        return self.execute_once(act, patience=patience, repeatable=False)


class OneShotRunView(ApiView):
    @extend_schema(
        operation_id="runs_get",
        parameters=[schema.ENCODING_PARAMETER],
        responses=schema.build_responses(OneShotRunSerializer, 404),
    )
    def get(self, request: ApiRequest, run_id: UUID) -> HttpResponse:
        """What is known of a one-shot run, also after the connection that asked for it was lost."""
        lease = self.caller.get_lease(run_id)
        if lease.environment_id != f"run-{run_id}":
            raise NotFound("There is no such run.")
        result = one_shot.load_result(leasing.apply_elapsed_clock(lease, self.now))
        return Response(serialize_one_shot_run(result, parse_encoding(request)))


def build_one_shot_request(said: Mapping[str, Any], encoding: str, back: BinaryIO) -> OneShotRequest:
    limits, workspace = said.get("limits") or {}, said.get("workspace")
    return OneShotRequest(
        agent_did=said["agent_did"],
        argv=said["argv"],
        timeout=seconds_to_timedelta(limits, "timeout_seconds") or settings.EXEC_TIMEOUT,
        stdin=decode_input(said["stdin"], encoding, "stdin"),
        env=said["env"],
        cwd=said["cwd"],
        workspace=None if workspace is None else _decode_workspace(workspace),
        back=back if said["return_workspace"] else None,
        max_returned_bytes=MAX_RETURNED_WORKSPACE_BYTES,
        memory_mib=limits.get("memory_mib"),
        environment_type=said.get("environment_type") or one_shot.DEFAULT_ENVIRONMENT_TYPE,
        pool=said.get("pool") or "",
    )


def _decode_workspace(text: str) -> BinaryIO:
    """The workspace of a request, checked."""
    tar = io.BytesIO(decode_input(text, "base64", "workspace"))
    try:
        archives.validate_tar(tar)
    except TooLarge as wrong:
        raise BodyTooLarge(str(wrong), field="workspace") from None
    except Rejected as wrong:
        raise InvalidRequest("workspace", str(wrong)) from None
    return tar


def serialize_one_shot_run(result: OneShotResult, encoding: str) -> dict[str, Any]:
    return {
        "run_id": str(result.run_id),
        "lease_id": str(result.lease_id),
        "outcome": result.outcome,
        "exit_code": result.exit_code,
        "stdout": encode_output(result.stdout, encoding),
        "stderr": encode_output(result.stderr, encoding),
        "truncated": result.truncated,
        "duration_seconds": result.duration.total_seconds() if result.duration is not None else None,
        "note": result.note,
        "cleaned_up": result.cleaned_up,
    }


def serialize_one_shot_result(result: OneShotResult, workspace: bytes, encoding: str) -> dict[str, Any]:
    back = base64.b64encode(workspace).decode() if result.workspace_returned else None
    return serialize_one_shot_run(result, encoding) | {"workspace": back}
