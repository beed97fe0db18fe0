"""manage.py processes: background processes of a lease, as the HTTP API has them."""

import json
import shlex
import signal
import sys
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from django.core.management.base import BaseCommand, CommandError

from billing.management.options import validate_options
from leases import execution
from leases.api.process_fields import (
    DEFAULT_WAIT_SECONDS,
    MAX_WAIT_SECONDS,
    NewProcessSerializer,
    build_process_spec,
    serialize_process,
)
from leases.api.processes import MAX_LOG_BYTES, SIGNALS
from leases.management.base import add_lease_action, parse_env, parse_lease_id, report_errors
from leases.models import Lease
from sandboxes import formatting, processes
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.management.base import require_utf8
from sandboxes.models import Process, RestartPolicy


class Command(BaseCommand):
    help = (
        "List, start and kill background processes of a lease, and print their output. A process keeps neither its lease nor "
        "its sandbox alive. `manage.py exec` runs a command to its end."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        log_help = f"print the output so far, at most {MAX_LOG_BYTES >> 20} MiB at once"
        listing = add_lease_action(actions, "list", help="list processes, newest first")
        start = add_lease_action(actions, "start", help="start a program in the background; a cold sandbox is woken")
        show = add_lease_action(actions, "show", help="print one process")
        log = add_lease_action(actions, "log", help=log_help, json_lines=False)
        send = add_lease_action(actions, "signal", help="send a signal to a process and its session")
        kill = add_lease_action(actions, "kill", help="kill a process and its descendants, and do not restart it")
        for subparser in (show, log, send, kill):
            subparser.add_argument("process", metavar="PROCESS_ID")
        listing.add_argument("--limit", type=int, default=50, help="maximum number of rows; default: %(default)s")
        log.add_argument("--start", type=int, default=0, metavar="BYTE", help="offset of the first byte")
        send.add_argument("signal", choices=SIGNALS, metavar="SIGNAL", help=" ".join(SIGNALS))
        start.add_argument("--name", help="name of the process")
        start.add_argument("--shell", metavar="NAME", help="shell of the lease whose variables and working directory apply")
        start.add_argument("--cwd", metavar="DIRECTORY", help="default: that of the shell, or /workspace")
        start.add_argument(
            "--env", action="append", default=[], metavar="NAME[=VALUE]",
            help="environment variable; without a value it is that of this command; may be repeated",
        )  # fmt: skip
        start.add_argument("--keep-awake", action="store_true", help="do not suspend the sandbox while the process runs")
        start.add_argument("--restart", choices=RestartPolicy.values, help="restart the process after its exit")
        start.add_argument("--max-restarts", type=int, help="maximum number of restarts in the window")
        start.add_argument("--restart-window-seconds", type=int, metavar="SECONDS")
        start.add_argument("--restart-after-wake", action="store_true", help="start the process again after a wake")
        start.add_argument("--wait-for", metavar="TEXT", help="exit once the process has printed TEXT, else with code 1")
        start.add_argument("--wait-for-port", type=int, metavar="PORT", help="exit once a program listens on this TCP port")
        start.add_argument(
            "--wait-seconds", type=int, metavar="SECONDS", help=f"default: {DEFAULT_WAIT_SECONDS}, at most {MAX_WAIT_SECONDS}"
        )
        start.add_argument("argv", nargs="+", help="after --: program and arguments, run without a shell")

    def handle(self, *args: Any, action: str, verbosity: int, lease: str, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(Lease.objects.get(pk=parse_lease_id(lease)).pk, options)

    def _list(self, pk: UUID, options: dict[str, Any]) -> None:
        processes.refresh_by_holder(pk, now=database_time.now())
        rows = processes.find_by_holder(pk).order_by("-started_at", "-pk")[: max(options["limit"], 0)]
        if options["json"]:
            self.stdout.write(json.dumps({"results": [serialize_process(row) for row in rows]}))
            return
        for row in rows:
            self.stdout.write(_format_line(row))

    def _start(self, pk: UUID, options: dict[str, Any]) -> None:
        stated = {**options, "env": parse_env(options["env"])}
        for name in ("name", "shell", "cwd", "wait_for"):
            require_utf8(f"--{name.replace('_', '-')}", options[name] or "")
        for word in options["argv"]:
            require_utf8("argv", word)
        data = validate_options(NewProcessSerializer, stated)
        text, port, wait = data.get("wait_for"), data.get("wait_for_port"), timedelta(seconds=data["wait_seconds"])
        spec = build_process_spec(pk, data, process_id=uuid4())
        with execution.use_lease(pk, now=database_time.now(), spends=True) as request:
            process = processes.start_process(request, spec, now=database_time.now(), actor=COMMAND_LINE)
        found = processes.wait_for_log(process, text, within=wait, now=database_time.now()) if text else None
        if port:
            found = processes.wait_for_port(process, port, within=wait, now=database_time.now())
        if found is not None:
            processes.refresh_by_holder(pk, now=database_time.now())
            process.refresh_from_db()
        self._print(process, options)
        if found is False:
            ended = "The process ended first." if process.ended_at else "The process goes on."
            raise CommandError(f"Not found within {wait.total_seconds():g} seconds. {ended}")

    def _show(self, pk: UUID, options: dict[str, Any]) -> None:
        processes.refresh_by_holder(pk, now=database_time.now())
        self._print(_find(pk, options), options)

    def _log(self, pk: UUID, options: dict[str, Any]) -> None:
        process = _find(pk, options)
        if options["start"] < 0:
            raise CommandError("--start: must be 0 or more.")
        with execution.use_lease(pk, now=database_time.now()):
            log = processes.read_log(process, start=options["start"], length=MAX_LOG_BYTES, now=database_time.now())
        sys.stdout.buffer.write(log.content)  # self.stdout would decode the bytes
        sys.stdout.flush()
        start = log.next - len(log.content)
        if start > options["start"]:
            self.stderr.write(f"log: older output was dropped; this begins at byte {start}")
        if len(log.content) == MAX_LOG_BYTES:
            self.stderr.write(f"log: continue with --start {log.next}")

    def _signal(self, pk: UUID, options: dict[str, Any]) -> None:
        process, number = _find(pk, options), getattr(signal, f"SIG{options['signal']}")
        with execution.use_lease(pk, now=database_time.now()):
            self._print(processes.send_signal(process, number, now=database_time.now()), options)

    def _kill(self, pk: UUID, options: dict[str, Any]) -> None:
        process = _find(pk, options)
        with execution.use_lease(pk, now=database_time.now()):
            self._print(processes.kill_process(process, now=database_time.now()), options)

    def _print(self, process: Process, options: dict[str, Any]) -> None:
        self.stdout.write(json.dumps(serialize_process(process)) if options["json"] else _format_line(process))


def _find(pk: UUID, options: dict[str, Any]) -> Process:
    try:
        process_id = UUID(options["process"])
    except ValueError:
        raise CommandError(f"{options['process'][:80]!r} is not a process id.") from None
    process = processes.find_by_holder(pk).filter(pk=process_id).first()
    if process is None:
        raise CommandError("The lease has no such process.")
    return process


def _format_line(process: Process) -> str:
    """Format a process: id, state with the exit code, start, name and command."""
    document = serialize_process(process)
    code = "" if process.exit_code is None else f" {process.exit_code}"
    name = f" {process.name}:" if process.name else ""
    line = f"{process.pk} {process.state}{code} {document['started_at']}{name} {shlex.join(process.argv)}"
    return formatting.format_path(line + (f" ({document['note']})" if document["note"] else ""))
