"""manage.py installation: show whether database, store and state directory belong together, and confirm that they do."""

from argparse import ArgumentParser
from datetime import datetime
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from controlplane import dry_run
from leases.management.base import report_errors
from sandboxes import installation_marks
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.formatting import pluralize
from sandboxes.state import unrecorded
from sandboxes.state.pruning import ORPHAN_GRACE
from sandboxes.sweeps import installation

# Sweeps that delete containers and objects without a row in this database, and the age from which they do.
DELETING_GRACES = {"reconcile": settings.ORPHAN_GRACE, "prune": ORPHAN_GRACE}


class Command(BaseCommand):
    help = "Show the marks of this installation in the store and the state directory. Exit code 1 if they do not match."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", nargs="?", choices=["show", "confirm"], default="show")
        parser.add_argument("--yes", action="store_true", help="with confirm: accept what the next sweeps would delete")
        parser.add_argument(
            "--discard", action="store_true", help="with confirm --yes: also changes in /data that cannot be kept as copies"
        )

    def handle(self, *args: Any, action: str, yes: bool, discard: bool, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            mismatch = installation_marks.find_mismatch()
            self._show()
            if action == "confirm":
                self._confirm(mismatch, yes, discard)
            elif mismatch:
                raise CommandError(f"Destructive sweeps are refused. {mismatch}")

    def _show(self) -> None:
        row = installation_marks.get_installation()
        self.stdout.write(f"database: {row.identity}, generation {row.generation}")
        for place, mark in (
            ("store", installation_marks.read_store_mark()),
            ("state directory", installation_marks.read_directory_mark()),
        ):
            self.stdout.write(f"{place}: {mark.identity}, generation {mark.generation}" if mark else f"{place}: no mark")
        if settings.OBSERVE:
            self.stdout.write("observe mode: nothing is destroyed or deleted; sweeps only count what they would do")

    def _confirm(self, mismatch: str, yes: bool, discard: bool) -> None:
        if not mismatch:
            self.stdout.write("nothing to confirm")
            return
        self.stdout.write(mismatch)
        now = database_time.now()
        due = [line for name in DELETING_GRACES for line in _list_deletions(name, now=now)]
        later = [
            f"{line} in up to {grace.total_seconds():.0f} s, once its grace period is over"
            for name, grace in DELETING_GRACES.items()
            for line in _list_deletions(name, now=now + grace)
            if line not in due
        ]
        self.stdout.write("\n".join([*due, *later]) or "The next sweeps would delete nothing.")
        if not yes:
            raise CommandError(
                "Nothing was changed. Repeat the command with --yes to accept this. Later files of sleeping leases in the "
                "store become snapshots of them first, and those of agents' data copies in .conflicts."
            )
        self._keep_stored(discard, now)
        row = installation.confirm(now=now, actor=COMMAND_LINE)
        self.stdout.write(f"confirmed: generation {row.generation}")

    def _keep_stored(self, discard: bool, now: datetime) -> None:
        """Keep stored files that the database does not record, also of leases and agents without a wake since the loss."""
        kept = unrecorded.recover_all_stored(now=now)
        if snapshots := kept.counts.get("snapshots"):
            self.stdout.write(f"{pluralize(snapshots, 'snapshot', 'snapshots')} of leases kept, of the kind found")
        if files := kept.counts.get("files"):
            self.stdout.write(f"{pluralize(files, 'file', 'files')} of agents' data kept as copies in .conflicts")
        if kept.failures and not discard:
            raise CommandError(
                "Nothing was confirmed. Some changes in agents' data cannot be kept. Make room in it, or repeat the command "
                "with --discard to lose them:\n" + "\n".join(kept.failures)
            )


def _list_deletions(name: str, *, now: datetime) -> list[str]:
    """Return a line for each deletion by a sweep at a time."""
    actions = dry_run.iter_actions(name, now=now)
    return [f"would {action} {getattr(item, 'pk', None) or item.name}" for action, item in actions]
