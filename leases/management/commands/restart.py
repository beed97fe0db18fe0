"""manage.py restart: restart the sandbox of a lease, as the HTTP API does."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases import execution
from leases.management.base import parse_lease_id, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Kill every process in a lease's sandbox, and start it again with its files. A cold sandbox is left unchanged."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("lease", metavar="LEASE_ID")

    def handle(self, *args: Any, lease: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            sandbox = execution.restart_sandbox(parse_lease_id(lease), now=database_time.now(), actor=COMMAND_LINE)
            self.stdout.write(f"{sandbox.pk} {sandbox.state}" if sandbox else "the lease has no sandbox")
            if sandbox and execution.has_outdated_agent(sandbox):
                self.stderr.write("The sandbox still runs the agent of another version. Run `manage.py build_image` first.")
