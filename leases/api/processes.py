"""Background processes of a lease."""

import re
from datetime import timedelta
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
from leases.api.fields import StrictCharField, StrictIntegerField, encode_output, parse_encoding
from leases.api.idempotency import StatusAndBody
from leases.api.pagination import paginate
from leases.api.runs import ProgramSerializer
from leases.api.views import ApiRequest, LeaseApiView
from leases.errors import InvalidRequest
from sandboxes import processes
from sandboxes.db.clock import clock_from, format_timestamp
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import Process, ProcessStatus
from sandboxes.processes import START_TIMEOUT, ProcessSpec
from sandboxes.providers.base import ProcessOutput
from sandboxes.runs import KILL_GRACE

MAX_NEW_PROCESS_BODY_BYTES = 1 << 20
DEFAULT_LOG_BYTES, MAX_LOG_BYTES = 1 << 16, 1 << 20
MAX_LOG_OFFSET = 10**18 - 1
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


NEW_PROCESS_SERIALIZER = NewProcessSerializer()


class ProcessApiView(LeaseApiView):
    def process(self, pk: UUID, process_id: UUID) -> Process:
        found = processes.find_by_holder(pk).filter(pk=process_id).first()
        if found is None:
            raise NotFound("There is no such process of this lease.")
        return found


class ProcessListView(ProcessApiView):
    max_body_bytes = MAX_NEW_PROCESS_BODY_BYTES

    @extend_schema(
        operation_id="leases_processes_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(ProcessSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """What was started in the background of a lease's sandbox, newest first."""
        processes.refresh_by_holder(pk, now=self.now)
        found, following = paginate(processes.find_by_holder(pk), "started_at", request)
        return Response({"results": [serialize_process(process) for process in found], "next": following})

    @extend_schema(
        operation_id="leases_processes_start",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewProcessSerializer,
        responses=schema.build_responses(StartedProcessSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Start a program in the background of the lease's sandbox. It has no stdin, and ends by itself, by a DELETE, or
        with its sandbox: when that sleeps, which a process does not keep it from, and when the lease ends. At most 16
        run at once. One that does not exist has exited with 127."""
        said = self.validate_body(NEW_PROCESS_SERIALIZER)
        text, within = said.get("wait_for"), timedelta(seconds=said["wait_seconds"])

        def act(run_id: UUID) -> StatusAndBody:
            later = clock_from(self.now)
            launch = ProcessSpec(said["argv"], said["env"], said["cwd"], said["name"], run_id)
            try:
                process = execution.call_with_lease(
                    pk,
                    lambda want, at: processes.start_process(want, launch, now=at, actor=self.actor),
                    now=self.now,
                    actor=self.actor,
                    spends=True,
                )
                found = processes.wait_for_log(process, text, within=within, now=later()) if text else None
            except ProviderCallFailed as failed:
                failed.extra["run_id"] = str(run_id)  # the process has the same id
                raise
            return 201, serialize_process(process) | {"found": found}

        patience = settings.SANDBOX_START_TIMEOUT + START_TIMEOUT + within + 2 * KILL_GRACE
        return self.execute_once(act, patience=patience, repeatable=False)


class ProcessView(ProcessApiView):
    @extend_schema(operation_id="leases_processes_get", responses=schema.build_responses(ProcessSerializer, 404))
    def get(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """What one is doing, or what became of it."""
        process = self.process(pk, process_id)
        if process.ended_at is None:
            processes.refresh_by_holder(process.holder, now=self.now)
            process.refresh_from_db()
        return Response(serialize_process(process))

    @extend_schema(operation_id="leases_processes_kill", responses=schema.build_responses(ProcessSerializer, 404, 409, 410))
    def delete(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Kill one, with all that it has started, by SIGKILL. What it had exited with before stays; safe to repeat."""
        process = self.process(pk, process_id)
        killed = execution.call_with_lease(
            pk, lambda want, at: processes.kill_process(process, now=at), now=self.now, actor=self.actor
        )
        return Response(serialize_process(killed))


class ProcessLogView(ProcessApiView):
    @extend_schema(
        operation_id="leases_processes_logs",
        parameters=[*schema.LOG_PARAMETERS, schema.ENCODING_PARAMETER],
        responses=schema.build_responses(ProcessLogSerializer, 404, 409, 410),
    )
    def get(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Some of what one has printed, as long as its sandbox stays awake; the last 256 KiB at least are kept. With
        `wait_for`, once that was printed."""
        process, encoding = self.process(pk, process_id), parse_encoding(request)
        start = _parse_integer(request, "start", 0, least=0, most=MAX_LOG_OFFSET)
        length = _parse_integer(request, "length", DEFAULT_LOG_BYTES, least=1, most=MAX_LOG_BYTES)
        within = timedelta(
            seconds=_parse_integer(request, "wait_seconds", DEFAULT_WAIT_SECONDS, least=1, most=MAX_WAIT_SECONDS)
        )
        text = request.GET.get("wait_for", "")
        if len(text) > MAX_WAIT_TEXT_CHARS:
            raise InvalidRequest("wait_for", f"At most {MAX_WAIT_TEXT_CHARS} characters.")

        def act(want: object, at: object) -> HttpResponse:
            later = clock_from(self.now)
            found = processes.wait_for_log(process, text, start=start, within=within, now=later()) if text else None
            log = processes.read_log(process, start=start, length=length)
            return Response(serialize_process_log(log, found, encoding))

        return execution.call_with_lease(pk, act, now=self.now, actor=self.actor)


def _parse_integer(request: ApiRequest, name: str, usual: int, *, least: int, most: int) -> int:
    said = request.GET.get(name, str(usual))
    if not re.fullmatch("[0-9]{1,18}", said) or not least <= int(said) <= most:
        raise InvalidRequest(name, f"A whole number from {least} to {most}.")
    return int(said)


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
