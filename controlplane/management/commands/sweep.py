"""manage.py sweep: every sweep, once or over and over, beside the scheduler or instead of it."""

import signal
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import connections
from django.utils import timezone

from billing.models import Budget, Unpriced
from controlplane import schedules
from leases import budget_enforcement, turns
from leases import sweeps as leases
from leases.management.base import duration, first_line, one_line
from leases.models import Lease
from sandboxes import runs
from sandboxes import sweeps as sandboxes
from sandboxes.egress import access_log, authorization, model_pricing
from sandboxes.models import ModelRate, Pool, Sandbox
from sandboxes.providers.base import Found
from sandboxes.state import data_sync, pruning
from sandboxes.usage import readings
from sandboxes.webhooks import delivery, outbox

TICK = 0.2  # seconds until a signal is noticed
SHOWN = 200  # of what each sweep would do


@dataclass(frozen=True)
class Named:
    name: str


def _unwanted(now: datetime) -> Iterable[Named]:
    keys = (key for shelf in pruning.SHELVES for key in pruning.orphans(shelf, now - pruning.GRACE))
    return (Named(key) for key in islice(keys, SHOWN))


def _orphans(now: datetime) -> Iterable[Found]:
    for one, name in sandboxes.listings():
        yield from sandboxes.orphaned(one, name, now=now, grace=settings.ORPHAN_GRACE)


# What each sweep would do, from the same queries.
WOULD: dict[str, dict[str, Callable[[datetime], Iterable[Any]]]] = {
    "expire": {"end lease": lambda now: leases.elapsed(now=now)[:SHOWN]},
    "stalled": {
        "close run": lambda now: runs.overdue(now=now)[:SHOWN],
        "give up sandbox": lambda now: sandboxes.overdue_starts(now=now)[:SHOWN],
        "finish putting to sleep": lambda now: sandboxes.overdue_evictions(now=now)[:SHOWN],
        "skip turn": lambda now: turns.overdue(now=now)[:SHOWN],
        "close model call": lambda now: authorization.overdue(now=now)[:SHOWN],
        "forget answer": lambda now: leases.forgettable(now=now)[:SHOWN],
    },
    "persist": {"store data of sandbox": lambda now: data_sync.unsaved()[:SHOWN]},
    "reclaim": {
        "destroy sandbox": lambda now: sandboxes.given_up(now=now)[:SHOWN],
        "close lease": lambda now: leases.cleared()[:SHOWN],
    },
    "idle": {"put to sleep": lambda now: sandboxes.due_for_sleep(now=now)[:SHOWN]},
    "cold": {
        "drop": lambda now: sandboxes.forgotten(now=now)[:SHOWN],
        "remove local copy": lambda now: sandboxes.local_leftovers()[:SHOWN],
        "remove stored copy": lambda now: leases.outlived(now=now)[:SHOWN],
    },
    "warm": {
        "give up": lambda now: Sandbox.objects.filter(pk__in=sandboxes.surplus()),
        "warm up in pool": lambda now: sandboxes.short_of_warm(now=now),
    },
    "reconcile": {"destroy": _orphans, "end lease as lost": lambda now: leases.lost()},
    "recount": {"count pool": lambda now: Pool.objects.order_by("pk")},
    "measure": {"measure": lambda now: sandboxes.unmeasured()[:SHOWN]},
    "weigh": {"weigh data": lambda now: pruning.mounted().order_by("pk")[:SHOWN]},
    "read": {"read sandbox": lambda now: readings.readable()[:SHOWN]},
    "prune": {
        "remove outdated": lambda now: data_sync.outdated()[:SHOWN],
        "remove": _unwanted,
        "remove event": lambda now: outbox.old(now=now)[:SHOWN],
    },
    "collect": {
        "close model call": lambda now: access_log.forsaken(now=now)[:SHOWN],
        "price model call": lambda now: model_pricing.priceable([*ModelRate.objects.filter(valid_from__lte=now)], now=now)[
            :SHOWN
        ],
    },
    "meter": {
        "meter sandbox": lambda now: Sandbox.objects.filter(metered=False).order_by("pk")[:SHOWN],
        "price day": lambda now: Unpriced.objects.order_by("pk")[:SHOWN],
    },
    "budgets": {
        "settle budget": lambda now: Budget.objects.filter(active=True)[:SHOWN],
        "end lease": lambda now: Lease.objects.filter(pk__in=[*budget_enforcement.due(now=now)][:SHOWN]),
    },
    "webhooks": {"try delivery": lambda now: delivery.deliverable(now=now)[:SHOWN]},
}


class Command(BaseCommand):
    help = f"Run the sweeps ({', '.join(schedules.SWEEPS)}) once, in this order. Exit code 1 if something failed."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(schedules.SWEEPS)}")
        parser.add_argument("--loop", action="store_true", help="again and again, until SIGTERM or Ctrl-C")
        parser.add_argument("--every", default="5s", help='pause between two rounds of --loop: "5s", "1m"')
        parser.add_argument("--dry-run", action="store_true", help="list what each would do, and change nothing")

    def handle(self, *args: Any, names: list[str], every: str, **options: Any) -> None:
        if wrong := set(names) - set(schedules.SWEEPS):
            raise CommandError(f"There is no sweep {', '.join(sorted(wrong))}. Known: {', '.join(schedules.SWEEPS)}.")
        pause = duration("--every", every).total_seconds()
        chosen = [name for name in schedules.SWEEPS if name in names or not names]
        with one_line(options["verbosity"]):
            if options["dry_run"]:
                self._tell(chosen)
            elif options["loop"]:
                self._loop(chosen, pause)
            elif failed := [name for name in chosen if not self._sweep(name)]:
                raise CommandError(f"failed: {', '.join(failed)}")

    def _tell(self, names: list[str]) -> None:
        now = timezone.now()
        for name in names:
            lines = [
                f"{name}: would {act} {getattr(one, 'pk', None) or one.name}"
                for act, due in WOULD[name].items()
                for one in due(now)
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
            connections.close_all()  # the next round starts with one that works, whatever became of this
            until = time.monotonic() + pause
            while not self.stopping and time.monotonic() < until:
                time.sleep(TICK)

    def _sweep(self, name: str, *, quiet: bool = False) -> bool:
        """Run one sweep and say in one line what it did. False if it failed, or a row of it."""
        try:
            swept = schedules.sweep(name, now=timezone.now())
        except Exception as failed:  # the next sweep may go well, and the next round of this one
            self.stderr.write(f"{name}: failed: {type(failed).__name__}: {first_line(failed)}")
            return False
        if swept.counts or swept.failures or not quiet:
            self.stdout.write(f"{name}: {swept}")
        for line in swept.failures:
            self.stderr.write(f"{name}: failed: {line}")
        return not swept.failures
