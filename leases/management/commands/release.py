"""manage.py release: release a lease, as the HTTP API does."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases import leasing
from leases.management.base import parse_lease_id, report_errors
from leases.models import Lease
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Release a lease. The next sweep stores its last state and destroys its sandbox. An ended lease is left unchanged."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("lease", metavar="LEASE_ID")
        parser.add_argument(
            "--discard",
            action="store_true",
            help="Destroy the sandbox without storing its last state. Also for an ended lease whose state cannot be stored.",
        )

    def handle(self, *args: Any, lease: str, discard: bool, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            if discard:
                pk = Lease.objects.get(pk=parse_lease_id(lease)).pk
                discarded = leasing.discard(pk, now=database_time.now(), actor=COMMAND_LINE, detail="release --discard")
                self.stdout.write(f"{pk} {'discarded: its last state is not stored' if discarded else 'nothing to discard'}")
                return
            ended = leasing.release(parse_lease_id(lease), now=database_time.now(), actor=COMMAND_LINE)
            at = ended.ended_at.isoformat(timespec="seconds") if ended.ended_at else ""
            self.stdout.write(f"{ended.pk} ended: {ended.end_reason} at {at}")
