"""What requests say and answers show of programs in the background."""

from typing import Any

from rest_framework import serializers

from leases.api.fields import StrictCharField, StrictIntegerField, encode_output
from leases.api.serializers import ProgramSerializer
from sandboxes.db.clock import format_timestamp
from sandboxes.models import Process, ProcessStatus
from sandboxes.providers.base import ProcessOutput

DEFAULT_WAIT_SECONDS, MAX_WAIT_SECONDS = 30, 300  # seconds
MAX_WAIT_TEXT_CHARS = 1000


class NewProcessSerializer(ProgramSerializer):
    name = StrictCharField(max_length=100, allow_blank=True, default="", help_text="What you call it.")
    wait_for = StrictCharField(
        max_length=MAX_WAIT_TEXT_CHARS, required=False, allow_null=True,
        help_text="Text: answer once it has printed that, or ended, or when the time is up. No pattern.",
    )  # fmt: skip
    wait_seconds = StrictIntegerField(min_value=1, max_value=MAX_WAIT_SECONDS, default=DEFAULT_WAIT_SECONDS)


class ProcessSerializer(serializers.Serializer):
    process_id = serializers.UUIDField()
    name = serializers.CharField()
    argv = serializers.ListField(child=serializers.CharField())
    cwd = serializers.CharField()
    env_names = serializers.ListField(child=serializers.CharField())
    state = serializers.ChoiceField(
        ProcessStatus.choices, help_text="exited: by itself; killed: on request; gone: with its sandbox; failed: never started."
    )
    started_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True, help_text="When its end was noticed.")
    exit_code = serializers.IntegerField(allow_null=True, help_text="128 + n after signal n.")
    note = serializers.CharField(help_text="Why it ended, when an exit code does not say it.")


class StartedProcessSerializer(ProcessSerializer):
    found = serializers.BooleanField(allow_null=True, help_text="It has printed what was waited for; null: nothing was.")


class ProcessLogSerializer(serializers.Serializer):
    content = serializers.CharField(help_text="stdout and stderr, in the order in which they were written.")
    start = serializers.IntegerField(help_text="Offset of its first byte: more than was asked for if the oldest was dropped.")
    next = serializers.IntegerField(help_text="Offset to go on from.")
    found = serializers.BooleanField(allow_null=True, help_text="It has printed what was waited for; null: nothing was.")


def serialize_process(process: Process) -> dict[str, Any]:
    return {
        "process_id": str(process.pk),
        "name": process.name,
        "argv": process.argv,
        "cwd": process.cwd,
        "env_names": process.env_names,
        "state": process.state,
        "started_at": format_timestamp(process.started_at),
        "ended_at": format_timestamp(process.ended_at) if process.ended_at else None,
        "exit_code": process.exit_code,
        "note": process.note,
    }


def serialize_process_log(log: ProcessOutput, found: bool | None, encoding: str) -> dict[str, Any]:
    return {
        "content": encode_output(log.content, encoding),
        "start": log.next - len(log.content),
        "next": log.next,
        "found": found,
    }
