"""Results of sweeps, and the record of the last pass of each sweep."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog

from sandboxes.db.clock import clock_from
from sandboxes.models import Sweep

log = structlog.get_logger(__name__)
# Time after which a pass of a sweep that waits for providers or stores begins no further step.
PASS_TIME_LIMIT = timedelta(seconds=60)


@dataclass
class SweepResult:
    """Outcome of one pass: a count for each kind of outcome, and one line for each row that failed."""

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def note(self, outcome: str, times: int = 1) -> None:
        if times:
            self.counts[outcome] = self.counts.get(outcome, 0) + times

    def __str__(self) -> str:
        parts = [f"{times} {outcome}" for outcome, times in self.counts.items()]
        if self.failures:
            parts.append(f"{len(self.failures)} failed")
        return ", ".join(parts) or "nothing to do"


def run_recorded(name: str, sweep: Callable[[], SweepResult], *, now: datetime, every: timedelta) -> SweepResult:
    """Run a sweep, and record its times, counts and failures in the row `name`, which health checks read.

    `every` is the scheduled interval. An exception is recorded and raised again."""
    row, _ = Sweep.objects.get_or_create(name=name, defaults={"every": every})
    clock = clock_from(now)
    Sweep.objects.filter(pk=row.pk).update(started_at=now, every=every)
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
