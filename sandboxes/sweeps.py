"""Scheduled passes over rows. Each takes the time and says what it did; each may run twice, and beside any other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from django.db.models import Q

from sandboxes import pool, providers, runs
from sandboxes.lifecycle import DESTROYING, WARMING
from sandboxes.models import Pool, Sandbox, Sweep
from sandboxes.moments import ticking
from sandboxes.providers.base import ProviderError

log = structlog.get_logger(__name__)


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
    swept = Swept()
    due = Sandbox.objects.filter(state=DESTROYING, deadline_at__lte=now, quarantined_at__isnull=True)
    for pk in due.order_by("deadline_at").values_list("pk", flat=True)[:limit]:
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


def stalled(*, now: datetime, limit: int = 200) -> Swept:
    """Take the next step for whatever is past its deadline: whoever was at it has died.

    A Run is closed as lost; a sandbox that never became ready is given up."""
    swept = Swept()
    swept.note("runs closed", runs.close_overdue(now=now, limit=limit))
    late = Sandbox.objects.filter(state=WARMING, deadline_at__lt=now).order_by("deadline_at")
    for sandbox in late[:limit]:
        same = {"claim": sandbox.claim, "deadline_at": sandbox.deadline_at}
        gone = pool.give_up(sandbox.pk, now=now, reason="stalled while starting", actor="sweep", guard=Q(**same))
        swept.note("starts given up" if gone else "lost race")
    return swept


def orphans(*, now: datetime, grace: timedelta) -> Swept:
    """Compare what providers list with the rows, pool by pool.

    What is listed and has no row that wants it is destroyed once it is older than `grace`: younger, its row may be on
    its way. A listing that fails kills nothing, and is a failure of this sweep."""
    swept = Swept()
    for one in Pool.objects.all():
        for name in {one.provider or providers.default_name(), *used_providers(one)}:
            try:
                _orphans_of(one, name, swept, now=now, grace=grace)
            except ProviderError as failed:
                swept.failures.append(f'pool "{one}", {name}: {failed}')
    return swept


def used_providers(one: Pool) -> set[str]:
    """Providers that still run something for this pool, also when it was moved to another since."""
    return set(Sandbox.objects.filter(pool=one).exclude(state="destroyed").values_list("provider", flat=True))


def _orphans_of(one: Pool, provider_name: str, swept: Swept, *, now: datetime, grace: timedelta) -> None:
    provider = providers.get(provider_name)
    listed = provider.list(str(one.owner))
    # Rows are read after the listing: whatever was created since is not in the listing, and is not missed.
    wanted = {s.name for s in Sandbox.objects.filter(pool=one).exclude(state="destroyed")}
    for found in listed:
        if found.name not in wanted and found.created_at <= now - grace:
            log.warning("orphan destroyed", name=found.name, provider=provider_name, created_at=found.created_at.isoformat())
            provider.destroy(found.ref)
            swept.note("orphans destroyed")


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


