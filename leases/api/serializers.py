"""What requests say and answers show. Instances of the serializers are made once: they keep nothing of a request."""

from typing import Any

from django.conf import settings
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.models.budgets import Unit
from leases.api.fields import (
    AnyStringField,
    ArgvField,
    DurationField,
    EnvField,
    JsonObjectField,
    PatternField,
    StrictCharField,
    StrictIntegerField,
    build_did_field,
    build_seconds_field,
    encode_output,
)
from leases.models import (
    CONDITION_DESCRIPTION,
    CONDITION_PATTERN,
    ENVIRONMENT_ID_DESCRIPTION,
    ENVIRONMENT_ID_PATTERN,
    Agent,
    Lease,
    LeaseStatus,
    Turn,
)
from sandboxes.db.clock import format_timestamp
from sandboxes.models import RUN_KINDS, Run, RunOutcome, Sandbox, SandboxState
from sandboxes.providers.base import WORKSPACE, ExecResult

MAX_TURN_NUMBER = 1 << 62

# --- requests -----------------------------------------------------------------------------------------------------


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


class ConditionSerializer(serializers.Serializer):
    condition = PatternField(CONDITION_PATTERN, CONDITION_DESCRIPTION)


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


class PlayTurnSerializer(serializers.Serializer):
    turn_number = StrictIntegerField(min_value=0, max_value=MAX_TURN_NUMBER)
    state = JsonObjectField(help_text="What the agent is to act on; at most 1 MiB.")


class NewAgentSerializer(serializers.Serializer):
    did = build_did_field()
    name = StrictCharField(max_length=100, allow_blank=True, default="")


# --- answers: the classes are for the schema, the functions write them ----------------------------------------------


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


class RenewedSerializer(serializers.Serializer):
    expires_at = serializers.DateTimeField()


class EndedLeasesSerializer(serializers.Serializer):
    ended = serializers.ListField(child=serializers.UUIDField())


class ExecResultSerializer(serializers.Serializer):
    run_id = serializers.UUIDField()
    exit_code = serializers.IntegerField(help_text="128 + n after signal n.")
    stdout = serializers.CharField()
    stderr = serializers.CharField()
    timed_out = serializers.BooleanField()
    oom = serializers.BooleanField()
    truncated = serializers.BooleanField(help_text="The output was longer than what is kept.")
    duration_seconds = serializers.FloatField()


class TurnSerializer(serializers.Serializer):
    turn_number = serializers.IntegerField(max_value=MAX_TURN_NUMBER)
    action = JsonObjectField(help_text='{"action": "skip_turn", "reason": …} if the sandbox gave none.')
    skipped = serializers.BooleanField()
    run_id = serializers.UUIDField(allow_null=True)
    duration_seconds = serializers.FloatField(allow_null=True, help_text="Null while it is being played.")


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


class AgentSerializer(serializers.Serializer):
    did = serializers.CharField()
    name = serializers.CharField()
    created_at = serializers.DateTimeField()


class FieldProblemSerializer(serializers.Serializer):
    field = serializers.CharField()
    detail = serializers.CharField()


@extend_schema_field({"oneOf": [{"type": "integer"}, {"type": "string"}]})
class LimitField(serializers.Field):
    """A whole number of things, or a decimal number as text."""


class ProblemSerializer(serializers.Serializer):
    """RFC 9457."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField(help_text="For people.")
    code = serializers.CharField(help_text="For programs.")
    field = serializers.CharField(required=False, help_text="What is at fault.")
    errors = FieldProblemSerializer(many=True, required=False, help_text="All that is at fault.")  # type: ignore[assignment]
    end_reason = serializers.CharField(required=False, help_text="With 410 lease_ended.")
    ended_at = serializers.DateTimeField(required=False, help_text="With 410 lease_ended.")
    run_id = serializers.UUIDField(required=False, help_text="The Run that says what is known.")
    limit = LimitField(
        required=False,
        help_text="With 429 quota_exceeded: sandboxes the agent may have. With 402 budget_exhausted: a decimal number.",
    )
    spent = serializers.CharField(required=False, help_text="With 402 budget_exhausted: a decimal number, in this period.")
    unit = serializers.ChoiceField(Unit.values, required=False, help_text="With 402 budget_exhausted.")
    resets_at = serializers.DateTimeField(
        required=False, allow_null=True, help_text="With 402 budget_exhausted: when it begins anew; null: not by itself."
    )
    workspace_bytes = serializers.IntegerField(required=False, help_text="With 409 workspace_full.")
    limit_bytes = serializers.IntegerField(required=False, help_text="With 409 workspace_full.")


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


def serialize_turn(turn: Turn) -> dict[str, Any]:
    return {
        "turn_number": turn.number,
        "action": turn.action,
        "skipped": turn.skipped,
        "run_id": str(turn.run_id) if turn.run_id else None,
        "duration_seconds": (turn.ended_at - turn.started_at).total_seconds() if turn.ended_at else None,
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


def serialize_agent(agent: Agent) -> dict[str, Any]:
    return {"did": agent.did, "name": agent.name, "created_at": format_timestamp(agent.created_at)}
