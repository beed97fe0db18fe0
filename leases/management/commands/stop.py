"""manage.py stop: stop all work of an agent, of an environment or of the installation."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases import stops
from leases.management.base import parse_did, parse_environment_id, report_errors
from leases.models import LeaseStatus
from leases.stops import Scope
from leases.tasks import enqueue_reclaim
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = (
        "Interrupt the queued runs and agent runs of a scope, and kill its commands, turns and background processes. "
        "Work that begins afterwards is not affected."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        scope = parser.add_mutually_exclusive_group(required=True)
        scope.add_argument("--agent", default="", metavar="DID", help="work of this agent")
        scope.add_argument("--environment", default="", metavar="ID", help="work of all agents in this environment")
        scope.add_argument("--all", action="store_true", help="all work of the installation")
        parser.add_argument("--end-leases", action="store_true", help="end the active leases, too; their states are stored")
        parser.add_argument("--dry-run", action="store_true", help="print what would be stopped")

    def handle(self, *args: Any, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            scope = Scope(
                parse_did(options["agent"]) if options["agent"] else "",
                parse_environment_id(options["environment"]) if options["environment"] else "",
            )
            stops.require_scope(scope)
            if options["dry_run"]:
                self._print(scope, end_leases=options["end_leases"])
                return
            result = stops.stop(scope, end_leases=options["end_leases"], now=database_time.now(), actor=COMMAND_LINE)
            if result.leases:
                enqueue_reclaim()
            result.require_complete()
            self.stdout.write(result.describe())

    def _print(self, scope: Scope, *, end_leases: bool) -> None:
        counts = {
            "active leases": scope.find_leases().filter(status=LeaseStatus.ACTIVE).count() if end_leases else 0,
            "queued runs": scope.find_queued_runs().count(),
            "direct agent runs": scope.find_agent_runs().count(),
            "commands": scope.find_commands().count(),
            "background processes": scope.find_processes().count(),
        }
        for name, count in counts.items():
            self.stdout.write(f"{name}: {count}")
