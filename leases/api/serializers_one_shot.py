"""What requests say and answers show of one-shot runs."""

import base64
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from leases.api.fields import AnyStringField, PatternField, StrictIntegerField, build_did_field, encode_output
from leases.api.serializers import ExecSerializer, ProgramSerializer
from leases.one_shot import OneShotOutcome, OneShotResult
from sandboxes.providers.base import WORKSPACE

MAX_RETURNED_WORKSPACE_BYTES = 16 << 20  # bytes of a workspace, as a tar, that an answer brings back


@extend_schema_field({"type": "boolean"})
class StrictBooleanField(serializers.Field):
    """true or false, and nothing that could be meant as one."""

    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            raise serializers.ValidationError("true or false.")
        return data


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
