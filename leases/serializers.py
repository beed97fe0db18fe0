"""What requests say and answers show. Instances of the serializers are made once: they keep nothing of a request."""

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.validators import RegexValidator
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.models_budgets import Unit
from leases.errors import Invalid, TooLarge
from leases.models import CONDITION, CONDITION_ACCEPTS, DID, DID_ACCEPTS, NAME, NAME_ACCEPTS, Agent, Lease, Status, Turn
from sandboxes import durations
from sandboxes.models import RUN_KINDS, Outcome, Pool, Quota, Run, Sandbox, State
from sandboxes.providers.base import WORKSPACE, ExecResult
from sandboxes.stats import PoolStats, Stats

LONGEST_TTL = int(durations.LONGEST.total_seconds())
LARGEST_COMMAND = 128 << 10  # bytes of argv, and of env: Linux takes no longer string, and twice this always fits
LAST_TURN = 1 << 62
ENCODINGS = ("utf-8", "base64")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
RESERVED = ("LEASEHOLD_", "LLM_SOCKET")  # what tells programs in a sandbox where they are


# --- fields -------------------------------------------------------------------------------------------------------


class Text(serializers.CharField):
    """A JSON string as it is: nothing is trimmed, and a number is none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"trim_whitespace": False, **options})

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class Matching(Text):
    def __init__(self, pattern: str, accepts: str, **options: Any) -> None:
        validators = [RegexValidator(rf"\A{pattern}\Z", f"Not {accepts}.")]
        super().__init__(**{"validators": validators, **options})


class Whole(serializers.IntegerField):
    """A JSON integer: not a string of digits, not true, not 1.0."""

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int):
            self.fail("invalid")
        return data


@extend_schema_field({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["5m", "30s"]}]})
class Duration(serializers.Field):
    def to_internal_value(self, data: Any) -> timedelta:
        try:
            return durations.parse(data)
        except ValueError as wrong:
            raise serializers.ValidationError(f"{wrong}.") from None


@extend_schema_field({"type": "object", "additionalProperties": True})
class Document(serializers.Field):
    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise serializers.ValidationError("A JSON object.")
        return data


@extend_schema_field({"type": "string"})
class Input(serializers.Field):
    """Any string at all: it is not stored."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            raise serializers.ValidationError("A string.")
        return data


@extend_schema_field({"type": "array", "items": {"type": "string"}, "minItems": 1})
class Words(serializers.Field):
    """What execve takes: strings without NUL, not too long, the first being the program."""

    def to_internal_value(self, data: Any) -> list[str]:
        if not isinstance(data, list) or not all(isinstance(word, str) and "\0" not in word for word in data):
            raise serializers.ValidationError("A list of strings without NUL.")
        if not data or not data[0]:
            raise serializers.ValidationError("The first element names a program.")
        _fits("argv", data)
        return data


@extend_schema_field({"type": "object", "additionalProperties": {"type": "string"}})
class Variables(serializers.Field):
    def to_internal_value(self, data: Any) -> dict[str, str]:
        if not isinstance(data, dict) or any(not isinstance(value, str) or "\0" in value for value in data.values()):
            raise serializers.ValidationError("An object of strings without NUL.")
        for name in data:
            if not ENV_NAME.fullmatch(name):
                raise serializers.ValidationError(f"{name[:40]!r} is not a name of letters, digits and _.")
            if name.startswith(RESERVED):
                raise serializers.ValidationError(f"{name[:40]} is reserved.")
        _fits("env", [*data, *data.values()])
        return data


def _fits(field: str, words: list[str]) -> None:
    if sum(len(word.encode()) + 1 for word in words) > LARGEST_COMMAND:
        raise TooLarge(f"{field} has at most {LARGEST_COMMAND} bytes.", field=field)


def did() -> Matching:
    return Matching(DID, DID_ACCEPTS, max_length=255)


def seconds(**options: Any) -> Whole:
    return Whole(min_value=1, max_value=LONGEST_TTL, required=False, allow_null=True, **options)


# --- requests -----------------------------------------------------------------------------------------------------


class Join(serializers.Serializer):
    agent_did = did()
    environment_type = Matching(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _")
    ttl_seconds = seconds(help_text="Ends when unused for this long. Default: what the environment type says.")
    max_ttl_seconds = seconds(help_text="Ends this long after it was granted, whatever happens.")
    sleep_after = Duration(required=False, allow_null=True, help_text="The sandbox sleeps when unused for this long.")
    expiry_conditions = serializers.ListField(
        child=Matching(CONDITION, CONDITION_ACCEPTS), max_length=32, required=False, allow_null=True,
        help_text="Posted facts that end the lease. Default: what the environment type says.",
    )  # fmt: skip
    pool = Matching(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True)

    def validate_expiry_conditions(self, value: list[str] | None) -> list[str] | None:
        if value and len(set(value)) < len(value):
            raise serializers.ValidationError("A condition is named twice.")
        return value


class Acquire(Join):
    environment_id = Matching(NAME, NAME_ACCEPTS)


class Condition(serializers.Serializer):
    condition = Matching(CONDITION, CONDITION_ACCEPTS)


class Program(serializers.Serializer):
    argv = Words(help_text="The program and its arguments; no shell.")
    env = Variables(default=dict, help_text="Values are neither stored nor logged.")
    cwd = Text(default=WORKSPACE, max_length=4000)

    def validate_cwd(self, value: str) -> str:
        if not value.startswith("/"):
            raise serializers.ValidationError("An absolute path.")
        return value


class Exec(Program):
    stdin = Input(default="")
    timeout_seconds = Whole(min_value=1, required=False, allow_null=True, help_text="Default: LEASEHOLD_EXEC_TIMEOUT.")

    def validate_timeout_seconds(self, value: int | None) -> int | None:
        most = int(settings.EXEC_TIMEOUT_MOST.total_seconds())
        if value and value > most:
            raise serializers.ValidationError(f"At most {most}.")
        return value


class PlayTurn(serializers.Serializer):
    turn_number = Whole(min_value=0, max_value=LAST_TURN)
    state = Document(help_text="What the agent is to act on; at most 1 MiB.")


class NewAgent(serializers.Serializer):
    did = did()
    name = Text(max_length=100, allow_blank=True, default="")


# --- answers: the classes are for the schema, the functions write them ----------------------------------------------


class SandboxShown(serializers.Serializer):
    id = serializers.UUIDField()
    state = serializers.ChoiceField(State.choices)
    provider = serializers.CharField()
    isolated = serializers.BooleanField()


class LeaseShown(serializers.Serializer):
    id = serializers.UUIDField()
    sandbox_id = serializers.CharField(help_text="Agent and environment: the same for every incarnation of the lease.")
    agent_did = serializers.CharField()
    environment_id = serializers.CharField()
    environment_type = serializers.CharField()
    status = serializers.ChoiceField(Status.choices)
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
    sandbox = SandboxShown(allow_null=True, help_text="It comes with the first use.")


class Renewed(serializers.Serializer):
    expires_at = serializers.DateTimeField()


class Ended(serializers.Serializer):
    ended = serializers.ListField(child=serializers.UUIDField())


class ExecShown(serializers.Serializer):
    run_id = serializers.UUIDField()
    exit_code = serializers.IntegerField(help_text="128 + n after signal n.")
    stdout = serializers.CharField()
    stderr = serializers.CharField()
    timed_out = serializers.BooleanField()
    oom = serializers.BooleanField()
    truncated = serializers.BooleanField(help_text="The output was longer than what is kept.")
    duration_seconds = serializers.FloatField()


class TurnShown(serializers.Serializer):
    turn_number = serializers.IntegerField(max_value=LAST_TURN)
    action = Document(help_text='{"action": "skip_turn", "reason": …} if the sandbox gave none.')
    skipped = serializers.BooleanField()
    run_id = serializers.UUIDField(allow_null=True)
    duration_seconds = serializers.FloatField(allow_null=True, help_text="Null while it is being played.")


class RunShown(serializers.Serializer):
    run_id = serializers.UUIDField()
    kind = serializers.ChoiceField(RUN_KINDS)
    argv = serializers.ListField(child=serializers.CharField())
    cwd = serializers.CharField()
    env_names = serializers.ListField(child=serializers.CharField())
    turn_number = serializers.IntegerField(allow_null=True, max_value=LAST_TURN)
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    outcome = serializers.ChoiceField(Outcome.choices)
    exit_code = serializers.IntegerField(allow_null=True)
    timed_out = serializers.BooleanField()
    oom = serializers.BooleanField()
    truncated = serializers.BooleanField()
    duration_seconds = serializers.FloatField(allow_null=True)
    note = serializers.CharField(help_text="Why it was closed, when the command itself cannot say.")


class RunOutputShown(RunShown):
    stdout = serializers.CharField(help_text="The first bytes, as many as are stored with a Run.")
    stderr = serializers.CharField()


class AgentShown(serializers.Serializer):
    did = serializers.CharField()
    name = serializers.CharField()
    created_at = serializers.DateTimeField()


def number(**options: Any) -> serializers.IntegerField:
    return serializers.IntegerField(required=False, min_value=0, **options)


class PoolNumbers(serializers.Serializer):
    """What an operator's key sees of a pool, or of all of them together. Hits, `slept` and `evicted_*` only grow."""

    total = number(help_text="Sandboxes that exist, in whatever state.")
    cold = number(help_text="Asleep: state stored, no process.")
    warming = number()
    warm = number()
    waiting = number()
    running = number()
    evicting = number()
    destroying = number()
    max_capacity = number()
    used = number(help_text="Places taken; the same as total.")
    resume_warm_hits = number(help_text="Uses that found their sandbox alive.")
    resume_cold_hits = number(help_text="Uses that had to wake it: the sum of the next three.")
    resume_cold_local_hits = number(help_text="Its state came from this host's copy.")
    resume_cold_cloud_hits = number(help_text="Its state came from the store.")
    resume_cold_fresh_hits = number(help_text="There was no state to bring back.")
    pre_warm_hits = number(help_text="Leases that were given a sandbox which was ready beforehand.")
    slept = number(help_text="Times a sandbox was put to sleep, when idle or for any other reason.")
    evicted_cold = number(help_text="Places taken from a sleeping sandbox for another one.")
    evicted_warm = number(help_text="The same, from one with nothing unsaved in it.")
    evicted_waiting = number(help_text="The same, from one that was put to sleep for it.")
    quarantined = number(help_text="Destroying them failed too often.")
    stalled = number(help_text="Past a deadline, and no sweep has taken care.")
    lost = number(help_text="Lost by their provider while a lease held them.")
    oldest_waiting_seconds = serializers.FloatField(required=False, help_text="Since its last use; 0 if none waits.")
    warm_target = number(help_text="To be kept ready that nobody holds.")
    warm_ready = number(help_text="Ready, and nobody holds them.")


class QuotaShown(serializers.Serializer):
    agent_did = serializers.CharField()
    most = serializers.IntegerField(allow_null=True, help_text="Sandboxes it may have at once; null: no limit.")
    guaranteed = serializers.IntegerField(help_text="While it has no more than these, nobody else is given a place of its.")
    used = serializers.IntegerField()


class PoolShown(PoolNumbers):
    """Its name, its places and the quotas for everybody, the rest with an operator's key."""

    name = serializers.CharField()
    max_capacity = serializers.IntegerField(help_text="Sandboxes that may exist at once.")
    used = serializers.IntegerField(help_text="Of these places; asleep sandboxes count.")
    draining = serializers.BooleanField(help_text="It takes nothing new.")
    quotas = QuotaShown(many=True, help_text="Of the agents this key speaks for, or of the one that was asked for.")
    warm_paused_until = serializers.DateTimeField(
        required=False, allow_null=True, help_text="Starts have failed, so nothing is kept ready until then."
    )
    warm_error = serializers.CharField(required=False, help_text="What the last start said that failed.")


class PoolsShown(PoolNumbers):
    """Every pool, and with an operator's key their sum."""

    pools = PoolShown(many=True)


class FieldProblem(serializers.Serializer):
    field = serializers.CharField()
    detail = serializers.CharField()


@extend_schema_field({"oneOf": [{"type": "integer"}, {"type": "string"}]})
class Limit(serializers.Field):
    """A whole number of things, or a decimal number as text."""


class Problem(serializers.Serializer):
    """RFC 9457."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField(help_text="For people.")
    code = serializers.CharField(help_text="For programs.")
    field = serializers.CharField(required=False, help_text="What is at fault.")
    errors = FieldProblem(many=True, required=False, help_text="All that is at fault.")  # type: ignore[assignment]
    end_reason = serializers.CharField(required=False, help_text="With 410 lease_ended.")
    ended_at = serializers.DateTimeField(required=False, help_text="With 410 lease_ended.")
    run_id = serializers.UUIDField(required=False, help_text="The Run that says what is known.")
    limit = Limit(
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


def stamp(moment: datetime) -> str:
    """RFC 3339 in UTC, ending in Z."""
    return moment.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"


def shown(lease: Lease, sandbox: Sandbox | None, *, is_new: bool = False) -> dict[str, Any]:
    return {
        "id": str(lease.pk),
        "sandbox_id": lease.sandbox_id,
        "agent_did": lease.agent_did,
        "environment_id": lease.environment_id,
        "environment_type": lease.environment_type_id,
        "status": lease.status,
        "is_new": is_new,
        "leased_at": stamp(lease.leased_at),
        "last_activity": stamp(lease.last_activity_at),
        "ttl_seconds": int(lease.ttl.total_seconds()),
        "expires_at": stamp(lease.expires_at),
        "max_expires_at": stamp(lease.max_expires_at),
        "sleep_after": int(lease.sleep_after.total_seconds()),
        "expiry_conditions": lease.expiry_conditions,
        "ended_at": stamp(lease.ended_at) if lease.ended_at else None,
        "end_reason": lease.end_reason,
        "sandbox": {
            "id": str(sandbox.pk),
            "state": sandbox.state,
            "provider": sandbox.provider,
            "isolated": sandbox.isolated,
        } if sandbox else None,
    }  # fmt: skip


def exec_shown(run: Run, result: ExecResult, encoding: str) -> dict[str, Any]:
    return {
        "run_id": str(run.pk),
        "exit_code": result.exit_code,
        "stdout": encoded(result.stdout, encoding),
        "stderr": encoded(result.stderr, encoding),
        "timed_out": result.timed_out,
        "oom": result.oom,
        "truncated": result.truncated,
        "duration_seconds": result.duration.total_seconds(),
    }


def turn_shown(turn: Turn) -> dict[str, Any]:
    return {
        "turn_number": turn.number,
        "action": turn.action,
        "skipped": turn.skipped,
        "run_id": str(turn.run_id) if turn.run_id else None,
        "duration_seconds": (turn.ended_at - turn.started_at).total_seconds() if turn.ended_at else None,
    }


def run_shown(run: Run) -> dict[str, Any]:
    return {
        "run_id": str(run.pk),
        "kind": run.kind,
        "argv": run.argv,
        "cwd": run.cwd,
        "env_names": run.env_names,
        "turn_number": run.turn_number,
        "started_at": stamp(run.started_at),
        "ended_at": stamp(run.ended_at) if run.ended_at else None,
        "outcome": run.outcome,
        "exit_code": run.exit_code,
        "timed_out": run.timed_out,
        "oom": run.oom,
        "truncated": run.truncated,
        "duration_seconds": run.duration.total_seconds() if run.duration is not None else None,
        "note": run.note,
    }


def run_output_shown(run: Run, encoding: str) -> dict[str, Any]:
    output = {"stdout": encoded(bytes(run.stdout), encoding), "stderr": encoded(bytes(run.stderr), encoding)}
    return run_shown(run) | output


def agent_shown(agent: Agent) -> dict[str, Any]:
    return {"did": agent.did, "name": agent.name, "created_at": stamp(agent.created_at)}


def pool_numbers(of: Stats) -> dict[str, Any]:
    return {
        "total": of.total,
        "cold": of.cold,
        "warming": of.warming,
        "warm": of.warm,
        "waiting": of.waiting,
        "running": of.running,
        "evicting": of.evicting,
        "destroying": of.destroying,
        "max_capacity": of.capacity,
        "used": of.used,
        "resume_warm_hits": of.warm_hits,
        "resume_cold_hits": of.woken,
        "resume_cold_local_hits": of.woken_local,
        "resume_cold_cloud_hits": of.woken_cloud,
        "resume_cold_fresh_hits": of.woken_fresh,
        "pre_warm_hits": of.claimed_warm,
        "slept": of.slept,
        "evicted_cold": of.evicted_cold,
        "evicted_warm": of.evicted_warm,
        "evicted_waiting": of.evicted_waiting,
        "quarantined": of.quarantined,
        "stalled": of.stalled,
        "lost": of.lost,
        "oldest_waiting_seconds": of.oldest_waiting.total_seconds(),
        "warm_target": of.warm_target,
        "warm_ready": of.warm_ready,
    }


def pool_shown(of: Pool | PoolStats, quotas: Sequence[Quota]) -> dict[str, Any]:
    """One pool; with its numbers if they were counted."""
    shown = {
        "name": of.name,
        "max_capacity": of.capacity,
        "used": of.used,
        "draining": of.draining,
        "quotas": [
            {"agent_did": one.agent_did, "most": one.most, "guaranteed": one.guaranteed, "used": one.used} for one in quotas
        ],
    }
    if isinstance(of, PoolStats):
        until = of.warm_paused_until
        shown |= pool_numbers(of) | {"warm_paused_until": stamp(until) if until else None, "warm_error": of.warm_error}
    return shown


def encoded(output: bytes, encoding: str) -> str:
    return base64.b64encode(output).decode() if encoding == "base64" else output.decode("utf-8", "replace")


def decoded(text: str, encoding: str, field: str) -> bytes:
    if encoding != "base64":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Invalid(field, "Not base64.") from None


def span(said: Mapping[str, Any], name: str) -> timedelta | None:
    """A duration given in whole seconds, None if it was not."""
    return timedelta(seconds=said[name]) if said.get(name) else None
