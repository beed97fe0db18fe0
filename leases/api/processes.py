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
from leases.api.idempotency import Answer
from leases.api.leases import Door, encoding_of
from leases.api.pagination import page
from leases.errors import Invalid
from sandboxes import processes
from sandboxes.db.clock import ticking
from sandboxes.errors import ProviderFailed
from sandboxes.models import Process
from sandboxes.processes import START_WITHIN, Launch
from sandboxes.runs import GRACE

NEW = show.NewProcess()
LARGEST_NEW = 1 << 20
USUAL_LENGTH, LONGEST_LENGTH = 1 << 16, 1 << 20
LAST_OFFSET = 10**18 - 1


class ProcessDoor(Door):
    def process(self, pk: UUID, process_id: UUID) -> Process:
        found = processes.of(self.caller.lease(pk).pk).filter(pk=process_id).first()
        if found is None:
            raise NotFound("There is no such process of this lease.")
        return found


class Processes(ProcessDoor):
    @extend_schema(
        operation_id="leases_processes_list",
        parameters=schema.PAGE,
        responses=schema.answers(schema.page_of(show.ProcessShown), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What was started in the background of a lease's sandbox, newest first."""
        processes.look(self.caller.lease(pk).pk, now=self.now)
        found, following = page(processes.of(pk), "started_at", request)
        return JsonResponse({"results": [show.process_shown(process) for process in found], "next": following})

    @extend_schema(
        operation_id="leases_processes_start",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=show.NewProcess,
        responses=schema.answers(show.ProcessStarted, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Start a program in the background of the lease's sandbox. It has no stdin, and ends by itself, by a DELETE, or
        with its sandbox: when that sleeps, which a process does not keep it from, and when the lease ends. At most 16
        run at once. One that does not exist has exited with 127."""
        self.caller.lease(pk)
        body, said = self.read(request, NEW, LARGEST_NEW)
        text, within = said.get("wait_for"), timedelta(seconds=said["wait_seconds"])

        def act(run_id: UUID) -> Answer:
            later = ticking(self.now)
            launch = Launch(said["argv"], said["env"], said["cwd"], said["name"], run_id)
            try:
                process = execution.for_lease(
                    pk,
                    lambda want, at: processes.start(want, launch, now=at, actor=self.actor),
                    now=self.now,
                    actor=self.actor,
                    spends=True,
                )
                found = processes.wait_for_log(process, text, within=within, now=later()) if text else None
            except ProviderFailed as failed:
                failed.extra["run_id"] = str(run_id)  # the process has the same id
                raise
            return 201, show.process_shown(process) | {"found": found}

        patience = settings.SANDBOX_START_TIMEOUT + START_WITHIN + within + 2 * GRACE
        return self.once(request, act, body=body, patience=patience, repeatable=False)


class OneProcess(ProcessDoor):
    @extend_schema(operation_id="leases_processes_get", responses=schema.answers(show.ProcessShown, 404))
    def get(self, request: HttpRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """What one is doing, or what became of it."""
        process = self.process(pk, process_id)
        if process.ended_at is None:
            processes.look(process.holder, now=self.now)
            process.refresh_from_db()
        return JsonResponse(show.process_shown(process))

    @extend_schema(operation_id="leases_processes_kill", responses=schema.answers(show.ProcessShown, 404, 409, 410))
    def delete(self, request: HttpRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Kill one, with all that it has started, by SIGKILL. What it had exited with before stays; safe to repeat."""
        process = self.process(pk, process_id)
        killed = execution.for_lease(pk, lambda want, at: processes.kill(process, now=at), now=self.now, actor=self.actor)
        return JsonResponse(show.process_shown(killed))


class Logs(ProcessDoor):
    @extend_schema(
        operation_id="leases_processes_logs",
        parameters=[*schema.LOG, schema.ENCODING],
        responses=schema.answers(show.LogShown, 404, 409, 410),
    )
    def get(self, request: HttpRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Some of what one has printed, as long as its sandbox stays awake; the last 256 KiB at least are kept. With
        `wait_for`, once that was printed."""
        process, encoding = self.process(pk, process_id), encoding_of(request)
        start = _number(request, "start", 0, least=0, most=LAST_OFFSET)
        length = _number(request, "length", USUAL_LENGTH, least=1, most=LONGEST_LENGTH)
        within = timedelta(seconds=_number(request, "wait_seconds", show.USUAL_WAIT, least=1, most=show.LONGEST_WAIT))
        text = request.GET.get("wait_for", "")
        if len(text) > show.LONGEST_TEXT:
            raise Invalid("wait_for", f"At most {show.LONGEST_TEXT} characters.")

        def act(want: object, at: object) -> HttpResponse:
            later = ticking(self.now)
            found = processes.wait_for_log(process, text, start=start, within=within, now=later()) if text else None
            log = processes.log(process, start=start, length=length)
            return JsonResponse(show.log_shown(log, found, encoding))

        return execution.for_lease(pk, act, now=self.now, actor=self.actor)


def _number(request: HttpRequest, name: str, usual: int, *, least: int, most: int) -> int:
    said = request.GET.get(name, str(usual))
    if not re.fullmatch("[0-9]{1,18}", said) or not least <= int(said) <= most:
        raise Invalid(name, f"A whole number from {least} to {most}.")
    return int(said)
