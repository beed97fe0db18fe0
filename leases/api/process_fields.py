"""Fields and document of a background process, for the API and the command that start one."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from rest_framework import serializers

from leases import shells
from leases.api.base.fields import StrictBooleanField, StrictCharField, StrictIntegerField
from leases.api.runs import LeaseProgramSerializer
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.models import Process, ProcessStatus, RestartPolicy
from sandboxes.processes import ProcessSpec
from sandboxes.redaction.texts import omit_answers

DEFAULT_WAIT_SECONDS, MAX_WAIT_SECONDS = 30, 300
MAX_WAIT_TEXT_CHARS = 1000
MAX_RESTARTS, MAX_RESTART_WINDOW_SECONDS = 100, 86_400


class NewProcessSerializer(LeaseProgramSerializer):
    name = StrictCharField(max_length=100, allow_blank=True, default="", help_text="Name chosen by the caller.")
    wait_for = StrictCharField(
        max_length=MAX_WAIT_TEXT_CHARS, required=False, allow_null=True,
        help_text="Literal text: respond once the process has printed it or has ended, or after `wait_seconds`.",
    )  # fmt: skip
    wait_for_port = StrictIntegerField(
        min_value=1, max_value=65535, required=False, allow_null=True,
        help_text="TCP port: respond once a program in the sandbox listens on it or the process has ended, or after "
        "`wait_seconds`. Not together with `wait_for`.",
    )  # fmt: skip
    wait_seconds = StrictIntegerField(min_value=1, max_value=MAX_WAIT_SECONDS, default=DEFAULT_WAIT_SECONDS)
    keep_awake = StrictBooleanField(
        default=False,
        help_text="Do not suspend the sandbox while the process runs, for at most LEASEHOLD_KEEP_AWAKE_LIMIT (24 hours). It is "
        "still evicted when it is idle.",
    )

    stdin = StrictBooleanField(default=False, help_text="Keep stdin open for `/stdin`. Else it is empty.")

    restart = serializers.ChoiceField(
        RestartPolicy.choices, default=RestartPolicy.NEVER,
        help_text="Restart the process after its exit: never, on_failure (exit code other than 0) or always. With a backoff of "
        "5 seconds, doubled up to 10 minutes, and at most two further minutes.",
    )  # fmt: skip
    max_restarts = StrictIntegerField(
        min_value=1, max_value=MAX_RESTARTS, default=5, help_text="Maximum number of restarts in the window."
    )
    restart_window_seconds = StrictIntegerField(min_value=10, max_value=MAX_RESTART_WINDOW_SECONDS, default=600)
    restart_after_wake = StrictBooleanField(
        default=False, help_text="Start a process that ran at the eviction of its sandbox again after the wake."
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if attrs.get("wait_for") and attrs.get("wait_for_port"):
            raise serializers.ValidationError({"wait_for_port": "Not together with wait_for."})
        return attrs


class ProcessSerializer(serializers.Serializer):
    process_id = serializers.UUIDField()
    name = serializers.CharField()
    argv = serializers.ListField(child=serializers.CharField())
    cwd = serializers.CharField()
    env_names = serializers.ListField(child=serializers.CharField())
    state = serializers.ChoiceField(
        ProcessStatus.choices,
        help_text="exited: ended on its own; killed: ended on request; gone: ended with its sandbox; failed: not started.",
    )
    keep_awake = serializers.BooleanField(help_text="The sandbox is not suspended while the process runs.")
    is_terminal = serializers.BooleanField(help_text="Its output and input are a terminal. Connect to it by a terminal URL.")
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True, help_text="Time at which the end was observed.")
    exit_code = serializers.IntegerField(allow_null=True, help_text="128 + n if ended by signal n.")
    restart = serializers.ChoiceField(RestartPolicy.choices)
    max_restarts = serializers.IntegerField()
    restart_window_seconds = serializers.IntegerField()
    restart_after_wake = serializers.BooleanField()
    restarts = serializers.IntegerField(help_text="Restarts so far, by the policy and after wakes.")
    restarted_at = serializers.DateTimeField(allow_null=True, help_text="Time of the last restart.")
    next_restart_at = serializers.DateTimeField(allow_null=True, help_text="Earliest time of the next restart.")
    note = serializers.CharField(help_text="Reason of the end, if the exit code does not show it.")


def build_process_spec(pk: UUID, data: Mapping[str, Any], *, process_id: UUID) -> ProcessSpec:
    """Return the process that the fields of NewProcessSerializer state. Raise ShellNotFound or ShellDecryptionFailed."""
    context = shells.build_context(pk, data.get("shell"), cwd=data.get("cwd"), env=data["env"])
    return ProcessSpec(
        data["argv"], context.env, context.cwd, data["name"], process_id, data["keep_awake"], stdin=data["stdin"],
        restart=RestartPolicy(data["restart"]), max_restarts=data["max_restarts"],
        restart_window=timedelta(seconds=data["restart_window_seconds"]), restart_after_wake=data["restart_after_wake"],
    )  # fmt: skip


def serialize_process(process: Process) -> dict[str, Any]:
    return {
        "process_id": str(process.pk),
        "name": process.name,
        "argv": process.argv,
        "cwd": process.cwd,
        "env_names": process.env_names,
        "state": process.state,
        "keep_awake": process.keep_awake,
        "is_terminal": process.is_terminal,
        "started_at": format_timestamp(process.started_at),
        "ended_at": format_optional_timestamp(process.ended_at),
        "exit_code": process.exit_code,
        "restart": process.restart,
        "max_restarts": process.max_restarts,
        "restart_window_seconds": process.restart_window_seconds,
        "restart_after_wake": process.restart_after_wake,
        "restarts": process.restarts,
        "restarted_at": format_timestamp(process.restarted_at) if process.restarted_at else None,
        "next_restart_at": format_timestamp(process.restart_at) if process.restart_at else None,
        "note": omit_answers(process.note),
    }
