"""Vendor lifetimes: a vendor may end every sandbox at a fixed age, also while a command runs. A cluster announces shortly
before that it ends a sandbox, when a node is drained.

The state of such a sandbox is stored, and the sandbox put to sleep, before that. Its next use wakes it in a new sandbox of the
vendor. From LIFETIME_MARGIN before the end the sweep puts it to sleep as soon as no run is open, and no further run begins in
it. From LAST_MARGIN before the end the commands of open runs are killed, because the vendor would end them without the state
being stored."""

import time
from datetime import datetime, timedelta

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q, QuerySet

from sandboxes import destruction, eviction, providers
from sandboxes.db.clock import clock_from
from sandboxes.engine_turns import EngineTurns, list_by_engine
from sandboxes.hosts import registry
from sandboxes.lifecycle import RUNNING, SUSPENDED, WAITING, WARM
from sandboxes.models import ALIVE_STATES, Run, Sandbox, TransitionReason
from sandboxes.providers.base import ProviderSandbox
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
LIFETIME_MARGIN = timedelta(minutes=30)  # before the end: time to store a large workspace, also after failures
HASTE_MARGIN = timedelta(minutes=5)  # before the end: a sandbox whose runs were stopped is put to sleep in the same pass
SETTLE_SECONDS = 10.0  # for the workers of stopped runs to record them
SETTLE_POLL_SECONDS = 0.2
LAST_MARGIN = timedelta(minutes=10)  # before the end, in which no run is waited for


def note_announced_ends(result: SweepResult, *, now: datetime) -> None:
    """Record the ends that the engines of this process have announced, as the ends of the sandboxes' lifetimes."""
    for name in registry.find_local_provider_names():
        try:
            provider = providers.get_provider(name)
            listed = provider.list_all() if provider.announces_end else []
        except (ProviderError, ImproperlyConfigured) as failed:
            result.failures.append(f"{name}: {failed}")
            continue
        result.note("ends announced", sum(_note_announced_end(name, entry) for entry in listed))


def _note_announced_end(provider_name: str, entry: ProviderSandbox) -> bool:
    """Record the announced end of a sandbox. Return whether it was not known."""
    if entry.ends_at is None or entry.is_remnant:
        return False
    alive = Sandbox.objects.filter(registry.filter_local(), provider=provider_name, ref=entry.ref, state__in=ALIVE_STATES)
    later = Q(lifetime_ends_at__isnull=True) | Q(lifetime_ends_at__gt=entry.ends_at)
    if not alive.filter(later).update(lifetime_ends_at=entry.ends_at):
        return False
    log.warning("sandbox ends soon", ref=entry.ref, ends_at=entry.ends_at.isoformat(), reason=entry.end_reason)
    return True


def end_announced(provider_name: str, entry: ProviderSandbox, *, now: datetime) -> str:
    """Record the announced end of one sandbox, and put it to sleep. Return the outcome, "" if it is not alive.

    Raise ProviderError."""
    _note_announced_end(provider_name, entry)
    sandbox = find_ending(now=now).filter(provider=provider_name, ref=entry.ref).first()
    try:
        return _end_lifetime(sandbox, now=now) if sandbox else ""
    except Missing:
        return "gone"  # reconcile handles missing sandboxes


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
    """Sweep: put the sandboxes to sleep whose lifetime ends, and destroy those without a holder.

    Engines take turns. Of each, the sandbox whose lifetime ends first comes first."""
    result, clock = SweepResult(), clock_from(now)
    note_announced_ends(result, now=now)
    rows = list_by_engine(find_ending(now=now), limit=limit)
    for sandbox in (turns := EngineTurns(rows, clock=clock, until=now + PASS_TIME_LIMIT)):
        try:
            result.note(_end_lifetime(sandbox, now=clock()))
        except Missing:
            result.note("gone")  # reconcile handles missing sandboxes
        except ProviderError as failed:
            turns.note_failure()
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
        killed = _kill_runs(sandbox)
        if sandbox.lifetime_ends_at > now + HASTE_MARGIN or not _await_idle(sandbox):
            return "runs stopped" if killed else "in use"
    return "put to sleep" if put_to_sleep(sandbox, now=now, actor="sweep") else "not put to sleep"


def _await_idle(sandbox: Sandbox) -> bool:
    """Wait until the stopped runs of a sandbox are recorded, and read its row again. Returns False if a run is still open."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        sandbox.refresh_from_db()
        if sandbox.state != RUNNING:
            return True
        time.sleep(SETTLE_POLL_SECONDS)
    return False


def _kill_runs(sandbox: Sandbox) -> int:
    """Kill the commands of the open runs of a sandbox. Their workers record the results. Returns the number of runs."""
    provider = registry.get_sandbox_provider(sandbox)
    runs = Run.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation, ended_at__isnull=True)
    marks = [str(pk) for pk in runs.values_list("pk", flat=True)]
    for mark in marks:
        log.warning("run stopped: the vendor's lifetime of its sandbox ends", sandbox=str(sandbox.pk), run=mark)
        provider.kill(sandbox.ref, mark)
    return len(marks)
