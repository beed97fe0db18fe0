"""Watch for sandboxes that their engine ends: a drained node, a preemption, a deletion by someone else.

The sweep `lifetime` finds the same sandboxes a minute later, and `reconcile` the lost ones, so a watch that fails or dies costs
speed alone. A pass watches for a bounded time under a claim of the engine's host: exactly one process does, and another one
takes over after the end of the claim. The pass reacts to one sandbox after the other. The next pass of `lifetime` helps with
those of a whole node."""

import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q, QuerySet

from sandboxes import eviction, providers
from sandboxes.db.clock import Clock, clock_from
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.hosts import registry
from sandboxes.models import ALIVE_STATES, Host, Sandbox
from sandboxes.pool import lifetimes
from sandboxes.providers.base import ProviderSandbox
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
WATCH_TIME = timedelta(seconds=50)  # of a pass; shorter than the interval of the sweep, so that passes do not overlap
CLAIM_TIME = timedelta(seconds=55)


def watch_ends(*, now: datetime, monotonic: Callable[[], float] = time.monotonic) -> SweepResult:
    """Sweep: watch the engine of this process for sandboxes that it ends, unless another process does, and react to them."""
    result, clock = SweepResult(), clock_from(now)
    for name in registry.find_local_provider_names():
        try:
            if not providers.get_provider(name).watches_ends:
                continue
            host = registry.get_local_host(name, now=now)
            claimed = Host.objects.filter(pk=host.pk, watched_until=now + CLAIM_TIME)
            if not _claim(host, claimed, now=now):
                result.note("watched already")
                continue
            try:
                _watch(name, result, clock=clock, deadline=monotonic() + WATCH_TIME.total_seconds(), monotonic=monotonic)
            finally:
                claimed.update(watched_until=None)
        except (ProviderError, ImproperlyConfigured) as failed:
            result.failures.append(f"{name}: {failed}")
    return result


def _claim(host: Host, claimed: QuerySet[Host], *, now: datetime) -> bool:
    free = Q(watched_until__isnull=True) | Q(watched_until__lte=now)
    with end_if_unanswered(partial(claimed.update, watched_until=None), f"watch of {host}"):
        return bool(Host.objects.filter(free, pk=host.pk).update(watched_until=now + CLAIM_TIME))


def _watch(name: str, result: SweepResult, *, clock: Clock, deadline: float, monotonic: Callable[[], float]) -> None:
    with closing(providers.get_provider(name).watch_ends(timeout=WATCH_TIME)) as hints:
        for hint in hints:
            if monotonic() > deadline:  # storing took long, and another process may watch by now
                return
            try:
                if outcome := react(name, hint, now=clock()):
                    result.note(outcome)
            except ProviderError as failed:
                result.failures.append(f"{hint.ref}: {failed}")


def react(provider_name: str, hint: ProviderSandbox, *, now: datetime) -> str:
    """Take the next step for a sandbox that its engine ends. Return the outcome, "" if no alive sandbox is concerned.

    The sandbox is inspected first: the hint may be late, and storing the state of a lost sandbox takes until its timeouts."""
    alive = Sandbox.objects.filter(registry.filter_local(), provider=provider_name, ref=hint.ref, lost_at__isnull=True)
    sandbox = alive.filter(state__in=ALIVE_STATES).first()
    if sandbox is None:
        return ""
    try:
        registry.get_sandbox_provider(sandbox).inspect(sandbox.ref)
    except Missing as missing:
        return eviction.record_missing(sandbox, str(missing), now=now, actor="sweep") or "lost race"
    return "kept" if hint.is_remnant else lifetimes.end_announced(provider_name, hint, now=now)
