"""manage.py revoke_key: revoke an API key."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases import api_keys
from leases.grants import revocation
from leases.management.base import report_errors
from leases.tasks import enqueue_reclaim
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.formatting import pluralize


class Command(BaseCommand):
    help = (
        "Revoke an API key for ever. Its terminals, previews, file URLs and streams end within two seconds, and its queued "
        "runs do not start. Its leases go on until their end, and other keys of their agents can use them."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("prefix", help="prefix of the key, as the console shows it")
        parser.add_argument(
            "--end-leases", action="store_true",
            help="also end the active leases that were granted to this key; for a revoked key, too",
        )  # fmt: skip
        parser.add_argument("--dry-run", action="store_true", help="print the number of these leases, and change nothing")

    def handle(self, *args: Any, prefix: str, end_leases: bool, dry_run: bool, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            key = api_keys.find_by_prefix(prefix)
            if key is None:
                raise CommandError(f"There is no API key {prefix[:12]!r}.")
            if dry_run:
                count = revocation.find_leases(key).count()
                self.stdout.write(f"{key.prefix} has {pluralize(count, 'active lease', 'active leases')}")
                return
            done = revocation.revoke(key, end_leases=end_leases, now=database_time.now(), actor=COMMAND_LINE)
            if done.ended_leases:
                enqueue_reclaim()
            ended = f", {pluralize(done.ended_leases, 'lease', 'leases')} ended" if end_leases else ""
            self.stdout.write(f"{key.prefix} {'revoked' if done.revoked else 'was revoked before'}{ended}")
