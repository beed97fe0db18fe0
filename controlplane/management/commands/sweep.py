"""manage.py sweep: run sweeps once or in a loop, in addition to the scheduler or without it."""

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
from leases.management.base import first_line, parse_duration, report_errors
from leases.models import Lease
from sandboxes import reconciliation, runs
from sandboxes import sweeps as sandboxes
from sandboxes.egress import authorization, model_pricing
from sandboxes.egress.logs import access_log
from sandboxes.models import ModelRate, Pool, Sandbox
from sandboxes.providers.base import ProviderSandbox
from sandboxes.state import data_sync, pruning
from sandboxes.usage import readings
from sandboxes.webhooks import delivery, outbox

TICK_SECONDS = 0.2  # interval between checks for a signal
MAX_LISTED = 200  # rows that --dry-run lists per query


@dataclass(frozen=True)
class ListedKey:
    name: str


def _iter_unreferenced_keys(now: datetime) -> Iterable[ListedKey]:
    keys = (key for category in pruning.OBJECT_CATEGORIES for key in pruning.find_orphans(category, now - pruning.ORPHAN_GRACE))
    return (ListedKey(key) for key in islice(keys, MAX_LISTED))


def _iter_orphans(now: datetime) -> Iterable[ProviderSandbox]:
    for item, name in reconciliation.iter_pool_providers():
        yield from reconciliation.find_orphans(item, name, now=now, grace=settings.ORPHAN_GRACE)


# For --dry-run: the queries of each sweep, by the action that the sweep would take.
DRY_RUN_QUERIES: dict[str, dict[str, Callable[[datetime], Iterable[Any]]]] = {
    "expire": {"end lease": lambda now: leases.find_elapsed_leases(now=now)[:MAX_LISTED]},
    "stalled": {
        "close run": lambda now: runs.find_overdue(now=now)[:MAX_LISTED],
        "destroy overdue sandbox": lambda now: sandboxes.find_overdue_starts(now=now)[:MAX_LISTED],
        "finish eviction of sandbox": lambda now: sandboxes.find_overdue_evictions(now=now)[:MAX_LISTED],
        "skip turn": lambda now: turns.find_overdue_turns(now=now)[:MAX_LISTED],
        "close model call": lambda now: authorization.find_overdue(now=now)[:MAX_LISTED],
        "delete idempotent response": lambda now: leases.find_expired_idempotent_requests(now=now)[:MAX_LISTED],
    },
    "persist": {"store data of sandbox": lambda now: data_sync.find_unsaved()[:MAX_LISTED]},
    "reclaim": {
        "destroy sandbox": lambda now: sandboxes.find_due_for_destroy(now=now)[:MAX_LISTED],
        "close lease": lambda now: leases.find_leases_to_close()[:MAX_LISTED],
    },
    "idle": {"put sandbox to sleep": lambda now: sandboxes.find_idle(now=now)[:MAX_LISTED]},
    "cold": {
        "destroy cold sandbox": lambda now: sandboxes.find_expired_cold(now=now)[:MAX_LISTED],
        "delete local copy": lambda now: sandboxes.find_leftover_local_copies()[:MAX_LISTED],
        "delete snapshot": lambda now: leases.find_expired_snapshots(now=now)[:MAX_LISTED],
    },
    "warm": {
        "destroy surplus sandbox": lambda now: Sandbox.objects.filter(pk__in=sandboxes.find_surplus()),
        "start sandbox in pool": lambda now: sandboxes.find_pools_below_target(now=now),
    },
    "reconcile": {"destroy orphan": _iter_orphans, "end lease as lost": lambda now: leases.find_lost_leases()},
    "recount": {"recount pool": lambda now: Pool.objects.order_by("pk")},
    "measure": {"measure workspace of sandbox": lambda now: sandboxes.find_unmeasured()[:MAX_LISTED]},
    "weigh": {"measure data": lambda now: pruning.find_mounted().order_by("pk")[:MAX_LISTED]},
    "read": {"read sandbox": lambda now: readings.find_readable()[:MAX_LISTED]},
    "prune": {
        "delete outdated object": lambda now: data_sync.find_outdated_objects()[:MAX_LISTED],
        "delete unreferenced object": _iter_unreferenced_keys,
        "delete event": lambda now: outbox.find_old_events(now=now)[:MAX_LISTED],
    },
    "collect": {
        "close model call": lambda now: access_log.find_abandoned(now=now)[:MAX_LISTED],
        "price model call": lambda now: model_pricing.find_priceable([*ModelRate.objects.filter(valid_from__lte=now)], now=now)[
            :MAX_LISTED
        ],
    },
    "meter": {
        "meter sandbox": lambda now: Sandbox.objects.filter(metered=False).order_by("pk")[:MAX_LISTED],
        "price day": lambda now: Unpriced.objects.order_by("pk")[:MAX_LISTED],
    },
    "budgets": {
        "total budget": lambda now: Budget.objects.filter(active=True)[:MAX_LISTED],
        "end lease": lambda now: Lease.objects.filter(
            pk__in=[*budget_enforcement.find_leases_over_budget(now=now)][:MAX_LISTED]
        ),
    },
    "webhooks": {"attempt delivery": lambda now: delivery.find_deliverable(now=now)[:MAX_LISTED]},
}


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
            if options["dry_run"]:
                self._dry_run(selected)
            elif options["loop"]:
                self._loop(selected, pause)
            elif failed := [name for name in selected if not self._sweep(name)]:
                raise CommandError(f"failed: {', '.join(failed)}")

    def _dry_run(self, names: list[str]) -> None:
        now = timezone.now()
        for name in names:
            lines = [
                f"{name}: would {action} {getattr(item, 'pk', None) or item.name}"
                for action, due in DRY_RUN_QUERIES[name].items()
                for item in due(now)
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
            result = schedules.run_sweep(name, now=timezone.now())
        except Exception as error:  # the other sweeps still run, and the next round retries
            self.stderr.write(f"{name}: failed: {type(error).__name__}: {first_line(error)}")
            return False
        if result.counts or result.failures or not quiet:
            self.stdout.write(f"{name}: {result}")
        for line in result.failures:
            self.stderr.write(f"{name}: failed: {line}")
        return not result.failures
