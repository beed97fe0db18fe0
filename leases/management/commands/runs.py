"""manage.py runs: totals, list and interruption of queued runs and of direct agent runs."""

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError
from django.db.models import QuerySet

from leases.agent_runs.models import AgentRun
from leases.management.base import report_errors
from leases.queue import queue, running, statistics
from leases.queue.models import QueuedRun, QueuedRunState
from sandboxes import audit
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Show and interrupt queued runs, and interrupt agent runs that were started without the queue."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        stats = actions.add_parser("stats", help="number of runs by state, and the age of the oldest pending one")
        stats.add_argument("--json", action="store_true", help="print a JSON object")
        listing = actions.add_parser("list", help="list runs, newest first")
        listing.add_argument("--limit", type=int, default=50, help="maximum number of rows; default: %(default)s")
        interrupt = actions.add_parser("interrupt", help="interrupt pending and started runs")
        interrupt.add_argument(
            "run", nargs="*", metavar="ID", help="queued run or agent run; without one, all that the options select"
        )
        interrupt.add_argument("--all", action="store_true", help="required to interrupt without an id or an option")
        for parser_ in (listing, interrupt):
            parser_.add_argument("--agent", default="", help="runs of this agent")
            parser_.add_argument("--lease", default="", help="runs of this lease")
            parser_.add_argument("--state", default="", choices=["", *QueuedRunState.values], help="runs in this state")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(options)

    def _stats(self, options: dict[str, Any]) -> None:
        stats = statistics.get_stats(QueuedRun.objects.all(), AgentRun.objects.all(), now=database_time.now())
        document = {
            **stats.counts,
            "direct_agent_runs": stats.direct_agent_runs,
            "running": stats.running,
            "oldest_pending_seconds": stats.oldest_pending_seconds,
        }
        if options["json"]:
            self.stdout.write(json.dumps(document))
            return
        for name, value in document.items():
            self.stdout.write(f"{name}: {value:g}")

    def _list(self, options: dict[str, Any]) -> None:
        for row in _select(options)[: options["limit"]]:
            error = (row.error or {}).get("message", "")
            self.stdout.write(
                f"{row.pk} {row.state} {row.agent_did} attempt {row.attempt} {row.queued_at:%Y-%m-%dT%H:%M:%SZ} {error}"
            )

    def _interrupt(self, options: dict[str, Any]) -> None:
        if not (options["run"] or options["agent"] or options["lease"] or options["state"] or options["all"]):
            raise CommandError("Name a run, select runs by an option, or pass --all.")
        rows, direct, now = _select(options), _select_direct(options), database_time.now()
        if options["run"]:
            pks = [_parse_id(text) for text in options["run"]]
            rows, direct = rows.filter(pk__in=pks), direct.filter(pk__in=pks)
        stated = [f"{name} {options[name]}" for name in ("agent", "lease", "state") if options[name]]
        detail = ", ".join([*stated, *(f"run {text}" for text in options["run"])]) or "all"
        row = audit.get_installation_row()
        with audit.record_order(row, "Interrupt runs", detail, actor=audit.COMMAND_LINE, now=now) as order:
            order.result = f"{queue.interrupt(rows, now=now) + running.interrupt_direct(direct, now=now)} interrupted"
        self.stdout.write(order.result)


def _select(options: dict[str, Any]) -> QuerySet[QueuedRun]:
    rows = QueuedRun.objects.all()
    if options["agent"]:
        rows = rows.filter(agent_did=options["agent"])
    if options["lease"]:
        rows = rows.filter(lease=_parse_id(options["lease"]))
    return rows.filter(state=options["state"]) if options["state"] else rows


def _select_direct(options: dict[str, Any]) -> QuerySet[AgentRun]:
    rows = AgentRun.objects.all()
    if options["agent"]:
        rows = rows.filter(lease__agent_did=options["agent"])
    if options["lease"]:
        rows = rows.filter(lease=_parse_id(options["lease"]))
    return rows if options["state"] in ("", QueuedRunState.STARTED) else rows.none()


def _parse_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise CommandError(f"not an id: {text[:80]}") from None
