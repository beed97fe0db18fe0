"""The door to programs in the background: start one, read what it prints, kill it.

They keep neither the lease nor the sandbox: a sandbox in which nothing else happens sleeps when idle, and they end with it."""

import re
from datetime import timedelta
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import NotFound

from leases import execution
from leases.api import schema
from leases.api import serializers_processes as show
from leases.api.idempotency import StatusAndBody
from leases.api.leases import AgentApiView, parse_encoding
from leases.api.pagination import paginate
from leases.errors import InvalidRequest
from sandboxes import processes
from sandboxes.db.clock import clock_from
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import Process
from sandboxes.processes import START_TIMEOUT, ProcessSpec
from sandboxes.runs import KILL_GRACE

NEW_PROCESS_SERIALIZER = show.NewProcessSerializer()
MAX_NEW_PROCESS_BODY_BYTES = 1 << 20
DEFAULT_LOG_BYTES, MAX_LOG_BYTES = 1 << 16, 1 << 20
MAX_LOG_OFFSET = 10**18 - 1


class ProcessApiView(AgentApiView):
    def process(self, pk: UUID, process_id: UUID) -> Process:
        found = processes.find_by_holder(self.caller.lease(pk).pk).filter(pk=process_id).first()
        if found is None:
            raise NotFound("There is no such process of this lease.")
        return found


class ProcessListView(ProcessApiView):
    @extend_schema(
        operation_id="leases_processes_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(show.ProcessSerializer), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What was started in the background of a lease's sandbox, newest first."""
        processes.refresh_by_holder(self.caller.lease(pk).pk, now=self.now)
        found, following = paginate(processes.find_by_holder(pk), "started_at", request)
        return JsonResponse({"results": [show.serialize_process(process) for process in found], "next": following})

    @extend_schema(
        operation_id="leases_processes_start",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=show.NewProcessSerializer,
        responses=schema.build_responses(show.StartedProcessSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Start a program in the background of the lease's sandbox. It has no stdin, and ends by itself, by a DELETE, or
        with its sandbox: when that sleeps, which a process does not keep it from, and when the lease ends. At most 16
        run at once. One that does not exist has exited with 127."""
        self.caller.lease(pk)
        body, said = self.read(request, NEW_PROCESS_SERIALIZER, MAX_NEW_PROCESS_BODY_BYTES)
        text, within = said.get("wait_for"), timedelta(seconds=said["wait_seconds"])

        def act(run_id: UUID) -> StatusAndBody:
            later = clock_from(self.now)
            launch = ProcessSpec(said["argv"], said["env"], said["cwd"], said["name"], run_id)
            try:
                with execution.use_lease(pk, now=self.now, spends=True) as wanted:
                    process = processes.start_process(wanted, launch, now=self.now, actor=self.actor)
                found = processes.wait_for_log(process, text, within=within, now=later()) if text else None
            except ProviderCallFailed as failed:
                failed.extra["run_id"] = str(run_id)  # the process has the same id
                raise
            return 201, show.serialize_process(process) | {"found": found}

        patience = settings.SANDBOX_START_TIMEOUT + START_TIMEOUT + within + 2 * KILL_GRACE
        return self.once(request, act, body=body, patience=patience, repeatable=False)


class ProcessView(ProcessApiView):
    @extend_schema(operation_id="leases_processes_get", responses=schema.build_responses(show.ProcessSerializer, 404))
    def get(self, request: HttpRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """What one is doing, or what became of it."""
        process = self.process(pk, process_id)
        if process.ended_at is None:
            processes.refresh_by_holder(process.holder, now=self.now)
            process.refresh_from_db()
        return JsonResponse(show.serialize_process(process))

    @extend_schema(
        operation_id="leases_processes_kill", responses=schema.build_responses(show.ProcessSerializer, 404, 409, 410)
    )
    def delete(self, request: HttpRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Kill one, with all that it has started, by SIGKILL. What it had exited with before stays; safe to repeat."""
        process = self.process(pk, process_id)
        with execution.use_lease(pk, now=self.now):
            killed = processes.kill_process(process, now=self.now)
        return JsonResponse(show.serialize_process(killed))


class ProcessLogView(ProcessApiView):
    @extend_schema(
        operation_id="leases_processes_logs",
        parameters=[*schema.LOG_PARAMETERS, schema.ENCODING_PARAMETER],
        responses=schema.build_responses(show.ProcessLogSerializer, 404, 409, 410),
    )
    def get(self, request: HttpRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Some of what one has printed, as long as its sandbox stays awake; the last 256 KiB at least are kept. With
        `wait_for`, once that was printed."""
        process, encoding = self.process(pk, process_id), parse_encoding(request)
        start = _parse_integer(request, "start", 0, least=0, most=MAX_LOG_OFFSET)
        length = _parse_integer(request, "length", DEFAULT_LOG_BYTES, least=1, most=MAX_LOG_BYTES)
        within = timedelta(
            seconds=_parse_integer(request, "wait_seconds", show.DEFAULT_WAIT_SECONDS, least=1, most=show.MAX_WAIT_SECONDS)
        )
        text = request.GET.get("wait_for", "")
        if len(text) > show.MAX_WAIT_TEXT_CHARS:
            raise InvalidRequest("wait_for", f"At most {show.MAX_WAIT_TEXT_CHARS} characters.")
        with execution.use_lease(pk, now=self.now):
            found = processes.wait_for_log(process, text, start=start, within=within, now=self.now) if text else None
            log = processes.read_log(process, start=start, length=length)
        return JsonResponse(show.serialize_process_log(log, found, encoding))


def _parse_integer(request: HttpRequest, name: str, usual: int, *, least: int, most: int) -> int:
    said = request.GET.get(name, str(usual))
    if not re.fullmatch("[0-9]{1,18}", said) or not least <= int(said) <= most:
        raise InvalidRequest(name, f"A whole number from {least} to {most}.")
    return int(said)
