"""manage.py join: acquire a lease and start its sandbox, as the HTTP API does."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases import leasing, turns
from leases.management.base import parse_did, parse_environment_id, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Acquire the lease of an agent in an environment and start its sandbox. A held lease is printed unchanged."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("environment", metavar="ENVIRONMENT_ID")
        parser.add_argument("--agent", required=True, metavar="DID")
        parser.add_argument("--type", required=True, help="environment type, such as catan")

    def handle(self, *args: Any, environment: str, agent: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            request = leasing.LeaseRequest(parse_did(agent), parse_environment_id(environment), options["type"])
            lease, is_new, sandbox = turns.join_environment(request, now=database_time.now(), actor=COMMAND_LINE)
            outcome = "joined" if is_new else "already a member"
            state = f"sandbox {sandbox.state}" if sandbox else "no sandbox"
            self.stdout.write(f"{lease.pk} {outcome}: {lease.sandbox_id}, {state}")
