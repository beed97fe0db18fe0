"""Results of sweeps, and the record of the last pass of each sweep."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db.models import Q, QuerySet

from sandboxes.claims import RENEWAL_INTERVAL, Progress, hold
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.models import Host, Sweep
from sandboxes.redaction.texts import redact

log = structlog.get_logger(__name__)
# Time after which a pass of a sweep that waits for providers or stores begins no further step.
PASS_TIME_LIMIT = timedelta(seconds=60)
RUN_TTL = timedelta(minutes=2)  # without progress, until another host may begin a pass for the installation
MIN_INTERVAL_SHARE = 0.75  # between passes of different hosts: the hosts' schedules are not in phase, and waits shift them


class SweepsInProgress:
    """Names of the installation's sweeps that a thread of this process runs."""

    def __init__(self) -> None:
        self._lock, self._names = threading.Lock(), set[str]()

    @contextmanager
    def entering(self, name: str) -> Iterator[bool]:
        """Yield whether no other thread of this process runs the sweep."""
        with self._lock:
            is_first = name not in self._names
            self._names.add(name)
        try:
            yield is_first
        finally:
            if is_first:
                self._names.discard(name)


IN_PROGRESS = SweepsInProgress()


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

    @contextmanager
    def catching(self, row: object) -> Iterator[None]:
        """Record an error of one row, or of one step of the sweep, as a failure: it does not delay the others.

        A lost connection to the database is raised, because the others would fail, too."""
        try:
            yield
        except CONNECTION_ERRORS:
            raise
        except Exception as failed:
            log.exception("sweep failed", row=str(row))
            self.failures.append(f"{row}: {failed or type(failed).__name__}")

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
    the host of this process. An installation's sweep is skipped if another host has started it within the interval, or if it
    still runs anywhere: a second pass would wait for the locks of the first one, and repeat its work. An exception is recorded
    and raised again."""
    row, created = Sweep.objects.get_or_create(name=name, host=host, defaults={"every": every})
    if created and host:  # of a version without hosts, or from before the engine first responded
        Sweep.objects.filter(name=name, host__isnull=True).delete()
    clock = clock_from(now)
    if host:
        Sweep.objects.filter(pk=row.pk).update(started_at=now, every=every, started_by=started_by)
        return _run(row, sweep, now=now, clock=clock)
    with IN_PROGRESS.entering(name) as is_first:
        if not is_first:
            return SweepResult({"still running": 1})
        token = uuid.uuid4()
        running = RunningPass(Sweep.objects.filter(pk=row.pk, claim=token), clock, until=now + RUN_TTL)
        with end_if_unanswered(running.end, row):
            if not _claim_pass(row, token, now=now, every=every, started_by=started_by):
                return SweepResult({"left to another process": 1})
        try:
            with hold(running):
                result = _run(row, sweep, now=now, clock=clock)
        except Exception:  # not the death of the process, after which the deadline passes
            running.end()
            raise
        running.end()
        return result


def _run(row: Sweep, sweep: Callable[[], SweepResult], *, now: datetime, clock: Clock) -> SweepResult:
    try:
        result = sweep()
    except Exception as failed:
        Sweep.objects.filter(pk=row.pk).update(last_error=redact(f"{type(failed).__name__}: {failed}"))
        raise
    Sweep.objects.filter(pk=row.pk).update(
        succeeded_at=now, took=clock() - now, counts=result.counts, last_error=redact("\n".join(result.failures))
    )
    if result.counts or result.failures:
        log.info("sweep", sweep=row.name, **result.counts, failed=len(result.failures))
    return result


def _claim_pass(row: Sweep, token: uuid.UUID, *, now: datetime, every: timedelta, started_by: Host | None) -> bool:
    """Record the start of a pass of the installation, under the claim `token`.

    Return False if another host has started one within MIN_INTERVAL_SHARE of the interval, or if any process runs one: a host
    may have several workers. The claim of a dead process passes, or its successor releases it (passes.release_instance)."""
    is_due = Q(started_at__isnull=True) | Q(started_at__lte=now - every * MIN_INTERVAL_SHARE) | Q(started_at__gt=now + every)
    is_over = Q(running_until__isnull=True) | Q(running_until__lte=now) | Q(running_until__gt=now + RUN_TTL)
    by_this_host = Q(started_by__isnull=True) | Q(started_by=started_by)
    claimed = Sweep.objects.filter(is_due | by_this_host, is_over, pk=row.pk)
    return bool(
        claimed.update(
            started_at=now, running_until=now + RUN_TTL, claim=token, claimed_by=settings.INSTANCE, every=every,
            started_by=started_by,
        )
    )  # fmt: skip


def release_instance(claimed: Q, *, now: datetime) -> int:
    """End the claims of passes of a dead instance, which `claimed` selects. Return their number."""
    return Sweep.objects.filter(claimed, running_until__gt=now).update(running_until=None, claim=None)


class RunningPass(Progress):
    """Deadline of a pass of the installation, which the heartbeat extends while the pass makes progress.

    `own` selects the row of the sweep while it has the claim of this pass: a pass that began after it has another token."""

    def __init__(self, own: QuerySet[Sweep], clock: Clock, *, until: datetime) -> None:
        super().__init__()
        self._own, self._clock, self._until, self._seen_steps = own, clock, until, 0

    def beat(self) -> None:
        with self.lock:
            steps, until = self.steps, self._clock() + RUN_TTL
            if steps != self._seen_steps and until >= self._until + RENEWAL_INTERVAL:
                self._own.update(running_until=until)
                self._seen_steps, self._until = steps, until

    def end(self) -> None:
        """End the claim of this pass. A beat that comes later changes nothing."""
        self._own.update(running_until=None, claim=None)
