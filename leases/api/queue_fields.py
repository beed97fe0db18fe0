"""Fields and documents of queued runs, for the views that add them to the queue."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rest_framework import serializers

from leases.api.base.fields import FailedByField, StrictBooleanField, StrictIntegerField, StrictSerializer, encode_streams
from leases.errors import InvalidRequest
from leases.queue.models import QueuedRun, QueuedRunState
from leases.queue.queue import QueueOptions, build_turn_result, classify, omit_error_answers
from sandboxes.db.clock import format_optional_timestamp
from sandboxes.failed_by import FailedBy
from sandboxes.models import Run
from sandboxes.state.run_outputs import RunOutput, load_output

MAX_PENDING_SECONDS = 7 * 24 * 3600
QUEUE_FIELDS = ("priority", "repeatable", "max_attempts", "pending_timeout_seconds")


class QueueSerializer(StrictSerializer):
    """Fields of a request that may be queued."""

    queued = StrictBooleanField(default=False, help_text="Add the run to the queue, and respond 202 at once.")
    priority = StrictIntegerField(
        min_value=-100, max_value=100, required=False, help_text="Higher first, among the agent's queued runs. Default: 0."
    )
    repeatable = StrictBooleanField(
        required=False, help_text="Repeat an attempt whose outcome is unknown: the command may then be executed twice."
    )
    max_attempts = StrictIntegerField(
        min_value=1, max_value=10, required=False, help_text="Of a repeatable run. Default: 3 if repeatable."
    )
    pending_timeout_seconds = StrictIntegerField(
        min_value=1,
        max_value=MAX_PENDING_SECONDS,
        required=False,
        help_text="Time in which the run must start. Default: 3,600.",
    )


class QueuedRunSerializer(serializers.Serializer):
    queued_run_id = serializers.UUIDField()
    state = serializers.ChoiceField(QueuedRunState.choices)
    kind = serializers.ChoiceField(["exec", "agent_run", "turn"])
    agent_did = serializers.CharField()
    lease_id = serializers.UUIDField(allow_null=True, help_text="Null: the run gets a sandbox of its own.")
    priority = serializers.IntegerField()
    repeatable = serializers.BooleanField()
    attempt = serializers.IntegerField(help_text="Number of attempts begun.")
    max_attempts = serializers.IntegerField()
    run_id = serializers.UUIDField(allow_null=True, help_text="Run of the last attempt.")
    queued_at = serializers.DateTimeField()
    available_at = serializers.DateTimeField(help_text="Not started before.")
    expires_at = serializers.DateTimeField(help_text="End of the pending timeout.")
    started_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)
    interrupted_at = serializers.DateTimeField(allow_null=True)
    exit_code = serializers.IntegerField(allow_null=True)
    failed_by = FailedByField()
    error = serializers.DictField(
        allow_null=True, help_text="code, operation, provider, cause, message, retryable: of the last attempt that failed."
    )


class QueuedTurnSerializer(serializers.Serializer):
    """Fields of a queued turn, null for other kinds and while the turn has no answer."""

    turn_number = serializers.IntegerField(allow_null=True)
    action = serializers.DictField(allow_null=True, help_text="Output of the turn command, or `skip_turn`.")
    skipped = serializers.BooleanField(allow_null=True)
    reason = serializers.CharField(allow_null=True, help_text="Reason of a skipped turn.")


class QueuedRunOutputSerializer(QueuedTurnSerializer, QueuedRunSerializer):
    stdout = serializers.CharField(help_text="Stored beginning of the output of the last attempt.")
    stderr = serializers.CharField()


def build_queue_options(data: Mapping[str, Any]) -> QueueOptions:
    """Return the options of a validated body."""
    repeatable = bool(data.get("repeatable", False))
    if not repeatable and data.get("max_attempts", 1) > 1:
        raise InvalidRequest("max_attempts", "More than one attempt needs repeatable.")
    return QueueOptions(
        data.get("priority", 0),
        repeatable,
        data.get("max_attempts", 3 if repeatable else 1),
        timedelta(seconds=data.get("pending_timeout_seconds", 3600)),
    )


def require_queued(data: Mapping[str, Any], *names: str) -> None:
    """Raise InvalidRequest for a field that only queued runs have, in a request that is not to be queued."""
    for name in (*QUEUE_FIELDS, *names):
        if data.get(name) is not None:
            raise InvalidRequest(name, "Only with queued.")


def serialize_queued_run(row: QueuedRun) -> dict[str, Any]:
    return serialize_queued_runs([row])[0]


def serialize_queued_runs(rows: Sequence[QueuedRun]) -> list[dict[str, Any]]:
    origins = classify(rows)
    return [_serialize(row, origins[row.pk]) for row in rows]


def _serialize(row: QueuedRun, failed_by: FailedBy | None) -> dict[str, Any]:
    return {
        "queued_run_id": str(row.pk),
        "state": row.state,
        "kind": row.request["kind"],
        "agent_did": row.agent_did,
        "lease_id": str(row.lease_id) if row.lease_id else None,
        "priority": row.priority,
        "repeatable": row.repeatable,
        "attempt": row.attempt,
        "max_attempts": row.max_attempts,
        "run_id": str(row.run_id) if row.attempt else None,
        "exit_code": row.exit_code,
        "failed_by": failed_by,
        "error": omit_error_answers(row.error),
    } | {name: format_optional_timestamp(getattr(row, name)) for name in TIMESTAMPS}


TIMESTAMPS = ("queued_at", "available_at", "expires_at", "started_at", "ended_at", "interrupted_at")


def serialize_queued_run_output(row: QueuedRun, encoding: str) -> dict[str, Any]:
    run = Run.objects.filter(pk=row.run_id).first()
    output = load_output(run) if run else RunOutput(b"", b"")
    return serialize_queued_run(row) | build_turn_result(row) | encode_streams(output, encoding)
