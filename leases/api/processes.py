"""Background processes of a lease: start, read output, kill.

A process keeps neither its lease nor its sandbox alive. The eviction of an idle sandbox ends its processes."""

import re
import signal
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
from leases.api.base import schema
from leases.api.base.fields import (
    AnyStringField,
    PatternField,
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
    decode_input,
    encode_output,
    parse_encoding,
)
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.api.leases import EMPTY_SERIALIZER, SandboxSerializer, serialize_sandbox
from leases.api.process_fields import (
    DEFAULT_WAIT_SECONDS,
    MAX_WAIT_SECONDS,
    MAX_WAIT_TEXT_CHARS,
    NewProcessSerializer,
    ProcessSerializer,
    build_process_spec,
    serialize_process,
)
from leases.errors import InvalidRequest
from sandboxes import processes, restarts
from sandboxes.claims import KILL_GRACE
from sandboxes.db.clock import clock_from
from sandboxes.errors import ProviderCallFailed
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import Process, Run, RunOutcome
from sandboxes.output_search import MAX_PATTERN_CHARS, BadPattern, PatternSearch
from sandboxes.processes import START_TIMEOUT, OutputWait
from sandboxes.providers.command_results import ProcessOutput

MAX_NEW_PROCESS_BODY_BYTES = 1 << 20
MAX_STDIN_BODY_BYTES = 2 << 20
SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "CONT", "STOP", "WINCH", "KILL")
DEFAULT_LOG_BYTES, MAX_LOG_BYTES = 1 << 16, 1 << 20
MAX_LOG_OFFSET = 10**18 - 1
WAIT_GRACE = timedelta(minutes=1)  # after the wait, for the last reads of the output
WAIT_OUTCOMES = ("matched", "timed_out", "process_ended")


class SignalSerializer(StrictSerializer):
    signal = PatternField(f"(?:{'|'.join(SIGNALS)})", f"one of {', '.join(SIGNALS)}")


class StdinSerializer(StrictSerializer):
    content = AnyStringField(default="", help_text="Text, or bytes in base64 with `encoding=base64`.")
    offset = StrictIntegerField(
        min_value=0, max_value=MAX_LOG_OFFSET,
        help_text="Number of bytes sent before. Bytes that were received already are skipped, so a request may be repeated.",
    )  # fmt: skip
    last = StrictBooleanField(default=False, help_text="Close stdin after this content.")


class WrittenSerializer(serializers.Serializer):
    next = serializers.IntegerField(help_text="Number of bytes received in all: the offset of the next request.")


class StartedProcessSerializer(ProcessSerializer):
    found = serializers.BooleanField(
        allow_null=True, help_text="true: what the request waited for has happened; null if it waited for nothing."
    )


class ProcessLogSerializer(serializers.Serializer):
    content = serializers.CharField(help_text="stdout and stderr, interleaved in the order written.")
    start = serializers.IntegerField(
        help_text="Offset of the first byte of `content`; above the requested one if older output was dropped."
    )
    next = serializers.IntegerField(help_text="Offset to continue reading from.")
    found = serializers.BooleanField(
        allow_null=True, help_text="true: the text in `wait_for` was printed; null without `wait_for`."
    )


class PatternWaitSerializer(StrictSerializer):
    pattern = StrictCharField(
        max_length=MAX_PATTERN_CHARS,
        help_text="Regular expression of RE2: without back-references and look-around. `(?m)` lets ^ and $ match at lines.",
    )
    start = StrictIntegerField(
        min_value=0, max_value=MAX_LOG_OFFSET, default=0, help_text="Offset of the first byte to search."
    )
    wait_seconds = StrictIntegerField(min_value=1, max_value=MAX_WAIT_SECONDS, default=DEFAULT_WAIT_SECONDS)


class PatternResultSerializer(serializers.Serializer):
    outcome = serializers.ChoiceField(
        WAIT_OUTCOMES,
        help_text="matched; timed_out: not within `wait_seconds`; process_ended: ended without a match, or its output is gone.",
    )
    match = serializers.CharField(allow_null=True, help_text="Matching output, at most 64 KiB.")
    start = serializers.IntegerField(allow_null=True, help_text="Offset of the first byte of the match.")
    end = serializers.IntegerField(allow_null=True, help_text="Offset after the match.")
    next = serializers.IntegerField(help_text="Value of `start` with which another request continues.")


class RestartedSerializer(serializers.Serializer):
    sandbox = SandboxSerializer(allow_null=True, help_text="null: the lease has no sandbox yet.")
    agent_outdated = serializers.BooleanField(
        help_text="The sandbox still runs the agent of another version, because the engine has no image with the present one. "
        "Background processes and terminals fail."
    )


NEW_PROCESS_SERIALIZER = NewProcessSerializer()
SIGNAL_SERIALIZER, STDIN_SERIALIZER = SignalSerializer(), StdinSerializer()
PATTERN_WAIT_SERIALIZER = PatternWaitSerializer()


class ProcessApiView(LeaseApiView):
    def get_process(self, process_id: UUID) -> Process:
        process = processes.find_by_holder(self.lease.pk).filter(pk=process_id).first()
        if process is None:
            raise NotFound("The lease has no such process.")
        return process


class ProcessListView(ProcessApiView):
    max_body_bytes = MAX_NEW_PROCESS_BODY_BYTES

    @extend_schema(
        operation_id="leases_processes_list",
        summary="List background processes",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(ProcessSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the background processes of a lease, newest first."""
        processes.refresh_by_holder(pk, now=self.now)
        page, next_url = paginate(processes.find_by_holder(pk), "started_at", request)
        return Response({"results": [serialize_process(process) for process in page], "next": next_url})

    @extend_schema(
        operation_id="leases_processes_start",
        summary="Start a background process",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewProcessSerializer,
        responses=schema.build_responses(StartedProcessSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Start a program in the background of the lease's sandbox. At most 16 run at once.

        The process ends on its own, by DELETE, when the sandbox is evicted, or when the lease ends. It does not delay the
        eviction. With `keep_awake` the sandbox is not suspended while the process runs. A program that does not exist exits
        with 127."""
        data = self.validate_body(NEW_PROCESS_SERIALIZER)
        text, port, wait = data.get("wait_for"), data.get("wait_for_port"), timedelta(seconds=data["wait_seconds"])

        def act(run_id: UUID) -> StatusAndBody:
            clock = clock_from(self.now)
            spec = build_process_spec(pk, data, process_id=run_id)
            try:
                with LONG_CALLS.admit():  # one call: after the start, the wait is not refused
                    with execution.use_lease(pk, now=self.now, spends=True) as sandbox_request:
                        process = processes.start_process(sandbox_request, spec, now=clock(), actor=self.actor)
                    found = processes.wait_for_log(process, text, within=wait, now=clock()) if text else None
                    if port:
                        found = processes.wait_for_port(process, port, within=wait, now=clock())
            except ProviderCallFailed as error:
                error.extra["run_id"] = str(run_id)  # the process has the same id
                raise
            return 201, serialize_process(process) | {"found": found}

        def rebuild(run: Run) -> StatusAndBody | None:
            process = None if text or port else find_started_process(run)
            return (201, serialize_process(process) | {"found": None}) if process else None

        max_duration = settings.SANDBOX_START_TIMEOUT + START_TIMEOUT + wait + 2 * KILL_GRACE
        return self.execute_once(act, max_duration=max_duration, repeatable=False, rebuild=rebuild)


def find_started_process(run: Run) -> Process | None:
    """Return the process that a Run has started, None if the Run is open or its start is not known to have succeeded."""
    return Process.objects.filter(pk=run.pk).first() if run.outcome == RunOutcome.OK else None


class SandboxRestartView(LeaseApiView):
    @extend_schema(
        operation_id="leases_restart",
        summary="Restart the sandbox",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(RestartedSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Kill every process in the lease's sandbox, and start it again with its /workspace and /data.

        Also kills what finished commands have left behind, as after a fork bomb. Commands in progress end with exit code 137.
        The agent of another version is replaced by the present one, if the engine has an image with it.
        A cold sandbox has no processes, and is not woken."""
        self.validate_body(EMPTY_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            sandbox = execution.restart_sandbox(pk, now=self.now, actor=self.actor)
            outdated = sandbox is not None and execution.has_outdated_agent(sandbox)
            return 200, {"sandbox": serialize_sandbox(sandbox) if sandbox else None, "agent_outdated": outdated}

        max_duration = restarts.RUN_END_TIMEOUT + settings.SANDBOX_START_TIMEOUT + 2 * KILL_GRACE
        return self.execute_once(act, max_duration=max_duration)


class ProcessView(ProcessApiView):
    @extend_schema(
        operation_id="leases_processes_get",
        summary="Get a background process",
        responses=schema.build_responses(ProcessSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Return one process with its current state."""
        process = self.get_process(process_id)
        if process.ended_at is None:
            processes.refresh_by_holder(process.holder, now=self.now)
            process.refresh_from_db()
        return Response(serialize_process(process))

    @extend_schema(
        operation_id="leases_processes_kill",
        summary="Kill a background process",
        responses=schema.build_responses(ProcessSerializer, 404, 409, 410),
    )
    def delete(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Kill a process and its descendants with SIGKILL. Idempotent: the exit code of an ended process stays.

        A killed process is not restarted, by its policy or after a wake."""
        process, clock = self.get_process(process_id), clock_from(self.now)
        with execution.use_lease(pk, now=self.now):
            killed = processes.kill_process(process, now=clock())
        return Response(serialize_process(killed))


class ProcessSignalView(ProcessApiView):
    @extend_schema(
        operation_id="leases_processes_signal",
        summary="Send a signal to a background process",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=SignalSerializer,
        responses=schema.build_responses(ProcessSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Send a signal to a process and to the processes in its session. DELETE kills what remains.

        A process that a signal ends is restarted by its policy, as after any other exit."""
        number = getattr(signal, f"SIG{self.validate_body(SIGNAL_SERIALIZER)['signal']}")

        def act(run_id: UUID) -> StatusAndBody:
            process, clock = self.get_process(process_id), clock_from(self.now)
            with execution.use_lease(pk, now=self.now):
                return 200, serialize_process(processes.send_signal(process, number, now=clock()))

        return self.execute_once(act)


class ProcessStdinView(ProcessApiView):
    max_body_bytes = MAX_STDIN_BODY_BYTES

    @extend_schema(
        operation_id="leases_processes_stdin",
        summary="Write to the stdin of a background process",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=StdinSerializer,
        responses=schema.build_responses(WrittenSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Write to the stdin of a process that was started with `stdin`. The response is sent once there is room for more."""
        encoding, data = parse_encoding(request), self.validate_body(STDIN_SERIALIZER)
        content = decode_input(data["content"], encoding, "content")

        def act(run_id: UUID) -> StatusAndBody:
            process, clock = self.get_process(process_id), clock_from(self.now)
            with execution.use_lease(pk, now=self.now, spends=True):
                received = processes.write_stdin(process, content, offset=data["offset"], last=data["last"], now=clock())
            return 200, {"next": received}

        return self.execute_once(act)


class ProcessLogView(ProcessApiView):
    @extend_schema(
        operation_id="leases_processes_logs",
        summary="Read process output",
        parameters=[*schema.LOG_PARAMETERS, schema.ENCODING_PARAMETER],
        responses=schema.build_responses(ProcessLogSerializer, 404, 409, 410),
    )
    def get(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Return output of a process. At least the last 256 KiB are retained while the sandbox is awake.

        With `wait_for` the response is sent once the text has been printed."""
        process, encoding = self.get_process(process_id), parse_encoding(request)
        start = _parse_integer(request, "start", 0, minimum=0, maximum=MAX_LOG_OFFSET)
        length = _parse_integer(request, "length", DEFAULT_LOG_BYTES, minimum=1, maximum=MAX_LOG_BYTES)
        wait = timedelta(
            seconds=_parse_integer(request, "wait_seconds", DEFAULT_WAIT_SECONDS, minimum=1, maximum=MAX_WAIT_SECONDS)
        )
        text = request.GET.get("wait_for", "")
        if len(text) > MAX_WAIT_TEXT_CHARS:
            raise InvalidRequest("wait_for", f"Must have at most {MAX_WAIT_TEXT_CHARS} characters.")

        clock = clock_from(self.now)
        with execution.use_lease(pk, now=self.now):
            found = processes.wait_for_log(process, text, start=start, within=wait, now=clock()) if text else None
            log = processes.read_log(process, start=start, length=length, now=clock())
        return Response(serialize_process_log(log, found, encoding))


class ProcessWaitView(ProcessApiView):
    @extend_schema(
        operation_id="leases_processes_wait",
        summary="Wait for a regular expression in process output",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=PatternWaitSerializer,
        responses=schema.build_responses(PatternResultSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Respond once the output of a process matches, also across its chunks, or the process has ended, or the time is over.

        The first match from `start` is returned, of at most 64 KiB. A match at the end of the output so far, as of `[0-9]+`,
        may be longer in later output: end the pattern with the character that follows."""
        encoding, data = parse_encoding(request), self.validate_body(PATTERN_WAIT_SERIALIZER)
        try:
            search = PatternSearch(data["pattern"], start=data["start"])
        except BadPattern as error:
            raise InvalidRequest("pattern", str(error)) from None
        wait = timedelta(seconds=data["wait_seconds"])

        def act(run_id: UUID) -> StatusAndBody:
            process, clock = self.get_process(process_id), clock_from(self.now)
            with execution.use_lease(pk, now=self.now):
                result = processes.wait_for_pattern(process, search, start=data["start"], within=wait, now=clock())
            return 200, serialize_pattern_wait(result, search, encoding)

        return self.execute_once(act, max_duration=wait + WAIT_GRACE)


def _parse_integer(request: ApiRequest, name: str, default: int, *, minimum: int, maximum: int) -> int:
    text = request.GET.get(name, str(default))
    if not re.fullmatch("[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
        raise InvalidRequest(name, f"Must be an integer from {minimum} to {maximum}.")
    return int(text)


def serialize_pattern_wait(result: OutputWait, search: PatternSearch, encoding: str) -> dict[str, Any]:
    match = result.match
    return {
        "outcome": "matched" if match else "process_ended" if result.ended else "timed_out",
        "match": encode_output(match.content, encoding) if match else None,
        "start": match.start if match else None,
        "end": match.end if match else None,
        "next": match.end if match else search.resume_offset,
    }


def serialize_process_log(log: ProcessOutput, found: bool | None, encoding: str) -> dict[str, Any]:
    return {
        "content": encode_output(log.content, encoding),
        "start": log.next - len(log.content),
        "next": log.next,
        "found": found,
    }
