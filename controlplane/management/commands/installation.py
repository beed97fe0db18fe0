"""manage.py installation: show whether database, store and state directory belong together, and confirm that they do."""

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from controlplane import dry_run
from leases.management.base import report_errors
from sandboxes.db import database_time
from sandboxes.sweeps import installation

DELETING_SWEEPS = ("reconcile", "prune")  # delete containers and objects that have no row in this database


class Command(BaseCommand):
    help = "Show the marks of this installation in the store and the state directory. Exit code 1 if they do not match."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", nargs="?", choices=["show", "confirm"], default="show")
        parser.add_argument("--yes", action="store_true", help="with confirm: accept what the next sweeps would delete")

    def handle(self, *args: Any, action: str, yes: bool, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            mismatch = installation.find_mismatch()
            self._show()
            if action == "confirm":
                self._confirm(mismatch, yes)
            elif mismatch:
                raise CommandError(f"Destructive sweeps are refused. {mismatch}")

    def _show(self) -> None:
        row = installation.get_installation()
        self.stdout.write(f"database: {row.identity}, generation {row.generation}")
        for place, mark in (("store", installation.read_store_mark()), ("state directory", installation.read_directory_mark())):
            self.stdout.write(f"{place}: {mark.identity}, generation {mark.generation}" if mark else f"{place}: no mark")
        if settings.OBSERVE:
            self.stdout.write("observe mode: nothing is destroyed or deleted; sweeps only count what they would do")

    def _confirm(self, mismatch: str, yes: bool) -> None:
        if not mismatch:
            self.stdout.write("nothing to confirm")
            return
        self.stdout.write(mismatch)
        now = database_time.now()
        deletions = [
            f"would {action} {getattr(item, 'pk', None) or item.name}"
            for name in DELETING_SWEEPS
            for action, item in dry_run.iter_actions(name, now=now)
        ]
        self.stdout.write("\n".join(deletions) or "The next sweeps would delete nothing.")
        if not yes:
            raise CommandError("Nothing was changed. Repeat the command with --yes to accept this.")
        row = installation.confirm(now=now, actor="command line")
        self.stdout.write(f"confirmed: generation {row.generation}")
