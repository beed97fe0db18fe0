"""Scheduled passes over rows. Each takes the time and says what it did; each may run twice, and beside any other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q, QuerySet

from sandboxes import pool, providers, runs
from sandboxes.lifecycle import DESTROYING, WARMING
from sandboxes.models import IN_FLIGHT, Pool, Run, Sandbox, Sweep
from sandboxes.moments import ticking
from sandboxes.providers.base import Found, ProviderError

log = structlog.get_logger(__name__)
BUDGET = timedelta(seconds=60)  # of one pass that waits for providers: a worker busy for longer gives no heartbeat


@dataclass
class Swept:
    """What one pass did: counts by what happened, and one line for each row that failed."""

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def note(self, what: str, times: int = 1) -> None:
        if times:
            self.counts[what] = self.counts.get(what, 0) + times

    def __str__(self) -> str:
        said = [f"{times} {what}" for what, times in self.counts.items()]
        if self.failures:
            said.append(f"{len(self.failures)} failed")
        return ", ".join(said) or "nothing to do"


def reclaim(*, now: datetime, limit: int = 200) -> Swept:
    """Destroy what was given up. A row that fails waits longer each time and does not hold up the others."""
    swept, later = Swept(), ticking(now)
    for pk in given_up(now=now).values_list("pk", flat=True)[:limit]:
        if later() > now + BUDGET:
            break
        try:
            if pool.destroy(pk, now=now, actor="sweep"):
                swept.note("destroyed")
            elif Sandbox.objects.filter(pk=pk, state=DESTROYING).exclude(last_error="").exists():
                swept.failures.append(str(pk))
            else:
                swept.note("lost race")
        except Exception as failed:  # a bug in one provider must not stop the destroys of the others
            log.exception("reclaim failed", sandbox=str(pk))
            swept.failures.append(f"{pk}: {failed}")
    return swept


def given_up(*, now: datetime) -> QuerySet[Sandbox]:
    """What reclaim would destroy now."""
    due = Sandbox.objects.filter(state=DESTROYING, deadline_at__lte=now, quarantined_at__isnull=True)
    return due.order_by("deadline_at")


def stalled(*, now: datetime, limit: int = 200) -> Swept:
    """Take the next step for whatever is past its deadline: whoever was at it has died.

    A Run is closed as lost; a sandbox that never became ready is given up."""
    swept = Swept()
    swept.note("runs closed", runs.close_overdue(now=now, limit=limit))
    for sandbox in overdue_starts(now=now)[:limit]:
        same = {"claim": sandbox.claim, "deadline_at": sandbox.deadline_at}
        gone = pool.give_up(sandbox.pk, now=now, reason="stalled while starting", actor="sweep", guard=Q(**same))
        swept.note("starts given up" if gone else "lost race")
    return swept


def overdue_starts(*, now: datetime) -> QuerySet[Sandbox]:
    """Sandboxes that should have been ready by now."""
    return Sandbox.objects.filter(state=WARMING, deadline_at__lt=now).order_by("deadline_at")


def orphans(*, now: datetime, grace: timedelta) -> Swept:
    """Compare what providers list with the rows, pool by pool.

    What is listed and has no row that wants it is destroyed once it is older than `grace`: younger, its row may be on
    its way. A listing that fails kills nothing, and is a failure of this sweep."""
    swept = Swept()
    for one, name in listings():
        try:
            for found in orphaned(one, name, now=now, grace=grace):
                log.warning("orphan destroyed", name=found.name, provider=name, created_at=found.created_at.isoformat())
                providers.get(name).destroy(found.ref)
                swept.note("orphans destroyed")
        except (ProviderError, ImproperlyConfigured) as failed:
            swept.failures.append(f'pool "{one}", {name}: {failed}')
    return swept


def listings() -> Iterator[tuple[Pool, str]]:
    """Every pool, with each provider that may have something of it."""
    for one in Pool.objects.all():
        for name in {one.provider or providers.default_name(), *used_providers(one)}:
            yield one, name


def used_providers(one: Pool) -> set[str]:
    """Providers that still run something for this pool, also when it was moved to another since."""
    return set(Sandbox.objects.filter(pool=one).exclude(state="destroyed").values_list("provider", flat=True))


def orphaned(one: Pool, provider_name: str, *, now: datetime, grace: timedelta) -> list[Found]:
    """What a provider lists for a pool and no row wants, older than `grace`; all of it, or ProviderError."""
    listed = providers.get(provider_name).list(str(one.owner))
    # Rows are read after the listing: whatever was created since is not in the listing, and is not missed.
    wanted = {s.name for s in Sandbox.objects.filter(pool=one).exclude(state="destroyed")}
    return [found for found in listed if found.name not in wanted and found.created_at <= now - grace]


def recorded(name: str, sweep: Callable[[], Swept], *, now: datetime, every: timedelta) -> Swept:
    """Run a sweep and leave a row that says when it last succeeded, which is what health reads."""
    row, _ = Sweep.objects.get_or_create(name=name, defaults={"every": every})
    later = ticking(now)
    Sweep.objects.filter(pk=row.pk).update(started_at=now, every=every)
    try:
        swept = sweep()
    except Exception as failed:
        Sweep.objects.filter(pk=row.pk).update(last_error=f"{type(failed).__name__}: {failed}"[:2000])
        raise
    Sweep.objects.filter(pk=row.pk).update(
        succeeded_at=now, took=later() - now, counts=swept.counts, last_error="\n".join(swept.failures)[:2000]
    )
    if swept.counts or swept.failures:
        log.info("sweep", sweep=name, **swept.counts, failed=len(swept.failures))
    return swept


def forget_instance(instance: str, *, now: datetime) -> int:
    """What a dead instance of the control plane was at is due now, and the next sweep takes it over; how many rows.

    `instance` is a value of LEASEHOLD_INSTANCE, or what several of them have before a dot. Without this everything
    waits for its deadline, so nothing is lost if it is never called; call it only when no process of it is left."""
    if not instance:
        raise ValueError("rows without an instance may be anybody's")
    its = Q(claimed_by=instance) | Q(claimed_by__startswith=f"{instance}.")
    ahead = Q(deadline_at__gt=now)
    sandboxes = Sandbox.objects.filter(its, ahead, state__in=IN_FLIGHT).update(deadline_at=now)
    started = Q(ended_at__isnull=True, started_at__lt=now)  # deadline > start holds also if a clock was set back
    return sandboxes + Run.objects.filter(its, ahead, started).update(deadline_at=now)
