"""manage.py release: release a lease, as the HTTP API does."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases import leasing
from leases.management.base import parse_lease_id, report_errors
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Release a lease. The next sweep destroys its sandbox. An ended lease is left unchanged."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("lease", metavar="LEASE_ID")

    def handle(self, *args: Any, lease: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            ended = leasing.release(parse_lease_id(lease), now=database_time.now(), actor="command line")
            at = ended.ended_at.isoformat(timespec="seconds") if ended.ended_at else ""
            self.stdout.write(f"{ended.pk} ended: {ended.end_reason} at {at}")
