"""manage.py sweep: run sweeps once or in a loop, in addition to the scheduler or without it."""

import signal
import time
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from controlplane import dry_run, schedules
from leases.management.base import parse_duration, report_errors
from sandboxes.db import database_time
from sandboxes.management.base import first_line, refuse_unmigrated

TICK_SECONDS = 0.2  # interval between checks for a signal


class Command(BaseCommand):
    help = f"Run the sweeps ({', '.join(schedules.SWEEP_NAMES)}) once, in this order. Exit code 1 if something failed."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(schedules.SWEEP_NAMES)}")
        parser.add_argument("--loop", action="store_true", help="repeat until SIGTERM or Ctrl-C")
        parser.add_argument("--every", default="5s", help='pause between two rounds of --loop: "5s", "1m"')
        parser.add_argument("--dry-run", action="store_true", help="list what each sweep would do, without changes")

    def handle(self, *args: Any, names: list[str], every: str, **options: Any) -> None:
        if unknown := set(names) - set(schedules.SWEEP_NAMES):
            raise CommandError(f"Unknown sweep: {', '.join(sorted(unknown))}. Known: {', '.join(schedules.SWEEP_NAMES)}.")
        pause = parse_duration("--every", every).total_seconds()
        selected = [name for name in schedules.SWEEP_NAMES if name in names or not names]
        with report_errors(options["verbosity"]):
            refuse_unmigrated()  # each sweep would report the missing table otherwise
            if options["dry_run"]:
                self._dry_run(selected)
            elif options["loop"]:
                self._loop(selected, pause)
            elif failed := [name for name in selected if not self._sweep(name)]:
                raise CommandError(f"failed: {', '.join(failed)}")

    def _dry_run(self, names: list[str]) -> None:
        now = database_time.now()
        for name in names:
            lines = [
                f"{name}: would {action} {getattr(item, 'pk', None) or item.name}"
                for action, item in dry_run.iter_actions(name, now=now)
            ]
            self.stdout.write("\n".join(lines) or f"{name}: nothing to do")

    def _loop(self, names: list[str], pause: float) -> None:
        self.stopping = False

        def stop(number: int, frame: object) -> None:
            self.stopping = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        while not self.stopping:
            for name in names:
                self._sweep(name, quiet=True)
            connections.close_all()  # the next round opens a new connection, because this one may be broken
            deadline = time.monotonic() + pause
            while not self.stopping and time.monotonic() < deadline:
                time.sleep(TICK_SECONDS)

    def _sweep(self, name: str, *, quiet: bool = False) -> bool:
        """Run one sweep and print its result on one line. Return False if the sweep or one of its rows failed."""
        try:
            result = schedules.run_sweep(name, now=database_time.now())
        except Exception as error:  # the other sweeps still run, and the next round retries
            self.stderr.write(f"{name}: failed: {type(error).__name__}: {first_line(error)}")
            return False
        if result.counts or result.failures or not quiet:
            self.stdout.write(f"{name}: {result}")
        for line in result.failures:
            self.stderr.write(f"{name}: failed: {line}")
        return not result.failures
