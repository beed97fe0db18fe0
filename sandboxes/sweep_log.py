"""Results of sweeps, and the record of the last pass of each sweep."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from django.db.models import Q

from sandboxes.db.clock import clock_from
from sandboxes.models import Host, Sweep

log = structlog.get_logger(__name__)
# Time after which a pass of a sweep that waits for providers or stores begins no further step.
PASS_TIME_LIMIT = timedelta(seconds=60)
MIN_INTERVAL_SHARE = 0.75  # between passes of different hosts: the hosts' schedules are not in phase, and waits shift them


@dataclass
class SweepResult:
    """Outcome of one pass: a count for each kind of outcome, and one line for each row that failed."""

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def note(self, outcome: str, times: int = 1) -> None:
        if times:
            self.counts[outcome] = self.counts.get(outcome, 0) + times

    def add(self, other: "SweepResult") -> None:
        """Add the counts and failures of another pass."""
        for outcome, times in other.counts.items():
            self.note(outcome, times)
        self.failures += other.failures

    def __str__(self) -> str:
        parts = [f"{times} {outcome}" for outcome, times in self.counts.items()]
        if self.failures:
            parts.append(f"{len(self.failures)} failed")
        return ", ".join(parts) or "nothing to do"


def run_recorded(
    name: str,
    sweep: Callable[[], SweepResult],
    *,
    now: datetime,
    every: timedelta,
    host: Host | None = None,
    started_by: Host | None = None,
) -> SweepResult:
    """Run a sweep, and record its times, counts and failures in the row of its name and host, which health checks read.

    `every` is the scheduled interval, `host` the host whose work the sweep does (None: the installation's), and `started_by`
    the host of this process. An installation's sweep that another host has started within the interval is skipped. An
    exception is recorded and raised again."""
    row, created = Sweep.objects.get_or_create(name=name, host=host, defaults={"every": every})
    if created and host:  # of a version without hosts, or from before the engine first responded
        Sweep.objects.filter(name=name, host__isnull=True).delete()
    clock = clock_from(now)
    if not _claim_pass(row, now=now, every=every, started_by=started_by):
        return SweepResult({"left to another host": 1})
    try:
        result = sweep()
    except Exception as failed:
        Sweep.objects.filter(pk=row.pk).update(last_error=f"{type(failed).__name__}: {failed}"[:2000])
        raise
    Sweep.objects.filter(pk=row.pk).update(
        succeeded_at=now, took=clock() - now, counts=result.counts, last_error="\n".join(result.failures)[:2000]
    )
    if result.counts or result.failures:
        log.info("sweep", sweep=name, **result.counts, failed=len(result.failures))
    return result


def _claim_pass(row: Sweep, *, now: datetime, every: timedelta, started_by: Host | None) -> bool:
    """Record the start of a pass. Return False if another host has started one within MIN_INTERVAL_SHARE of the interval."""
    due = Q(started_at__isnull=True) | Q(started_at__lte=now - every * MIN_INTERVAL_SHARE) | Q(started_at__gt=now + every)
    by_this_host = Q(host__isnull=False) | Q(started_by__isnull=True) | Q(started_by=started_by)
    return bool(Sweep.objects.filter(due | by_this_host, pk=row.pk).update(started_at=now, every=every, started_by=started_by))
