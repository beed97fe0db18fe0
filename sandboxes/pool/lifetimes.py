"""Vendor lifetimes: a vendor may end every sandbox at a fixed age, also while a command runs in it.

The state of such a sandbox is stored, and the sandbox put to sleep, before that. Its next use wakes it in a new sandbox of the
vendor. From LIFETIME_MARGIN before the end the sweep puts it to sleep as soon as no run is open, and no further run begins in
it. From LAST_MARGIN before the end the commands of open runs are killed, because the vendor would end them without the state
being stored."""

from datetime import datetime, timedelta

import structlog
from django.db.models import Q, QuerySet

from sandboxes import destruction, eviction
from sandboxes.db.clock import clock_from
from sandboxes.hosts import registry
from sandboxes.lifecycle import RUNNING, SUSPENDED, WAITING, WARM
from sandboxes.models import ALIVE_STATES, Run, Sandbox, TransitionReason
from sandboxes.providers.base import Missing, ProviderError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
LIFETIME_MARGIN = timedelta(minutes=30)  # before the end: time to store a large workspace, also after failures
LAST_MARGIN = timedelta(minutes=10)  # before the end, in which no run is waited for


def is_ending(sandbox: Sandbox, *, now: datetime) -> bool:
    """Return whether the vendor ends this incarnation within LIFETIME_MARGIN."""
    return sandbox.lifetime_ends_at is not None and sandbox.lifetime_ends_at <= now + LIFETIME_MARGIN


def find_ending(*, now: datetime) -> QuerySet[Sandbox]:
    """Select the alive sandboxes of this process's hosts that their vendors end within LIFETIME_MARGIN."""
    ending = Sandbox.objects.filter(registry.filter_local(), lifetime_ends_at__lte=now + LIFETIME_MARGIN, lost_at__isnull=True)
    return ending.filter(state__in=ALIVE_STATES).order_by("lifetime_ends_at")


def put_to_sleep(sandbox: Sandbox, *, now: datetime, actor: str = "") -> bool:
    """Store the state of an idle sandbox whose lifetime ends, and destroy it at the vendor. Returns whether it is cold now.

    `sandbox` is the row as it was read."""
    if sandbox.state not in (WARM, WAITING, SUSPENDED):
        return False
    same = Q(incarnation=sandbox.incarnation)
    return eviction.evict(sandbox.pk, now=now, code=TransitionReason.LIFETIME, actor=actor, guard=same)


def end_lifetimes(*, now: datetime, limit: int = 200) -> SweepResult:
    """Sweep: put the sandboxes to sleep whose lifetime ends, and destroy those without a holder."""
    result, clock = SweepResult(), clock_from(now)
    for sandbox in find_ending(now=now)[:limit]:
        if clock() > now + PASS_TIME_LIMIT:
            break
        try:
            result.note(_end_lifetime(sandbox, now=clock()))
        except Missing:
            result.note("gone")  # reconcile handles missing sandboxes
        except ProviderError as failed:
            result.failures.append(f"{sandbox.pk}: {failed}")
    return result


def _end_lifetime(sandbox: Sandbox, *, now: datetime) -> str:
    """Take the next step for one sandbox, and return the outcome."""
    assert sandbox.lifetime_ends_at is not None
    if sandbox.holder is None:
        unheld = Q(incarnation=sandbox.incarnation, state=WARM, holder__isnull=True)
        code = TransitionReason.LIFETIME
        destroyed = destruction.schedule_destroy(sandbox.pk, now=now, code=code, actor="sweep", guard=unheld)
        return "unheld destroyed" if destroyed else "lost race"
    if sandbox.state == RUNNING:
        if sandbox.lifetime_ends_at > now + LAST_MARGIN:
            return "in use"
        return "runs stopped" if _kill_runs(sandbox) else "in use"
    return "put to sleep" if put_to_sleep(sandbox, now=now, actor="sweep") else "not put to sleep"


def _kill_runs(sandbox: Sandbox) -> int:
    """Kill the commands of the open runs of a sandbox. Their workers record the results. Returns the number of runs."""
    provider = registry.get_sandbox_provider(sandbox)
    runs = Run.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation, ended_at__isnull=True)
    marks = [str(pk) for pk in runs.values_list("pk", flat=True)]
    for mark in marks:
        log.warning("run stopped: the vendor's lifetime of its sandbox ends", sandbox=str(sandbox.pk), run=mark)
        provider.kill(sandbox.ref, mark)
    return len(marks)
