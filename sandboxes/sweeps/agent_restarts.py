"""Restart of sandboxes whose agent, their process 1, is connected to the gateway and does not respond.

Commands and file operations in such a sandbox fail until its processes end, and its state cannot be stored.

Left alone are a sandbox with an open run, because the run has a deadline, at which it is killed from outside, and a sandbox
whose agent is not connected, because its commands are executed by the engine."""

import uuid
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta

import structlog
from django.db.models import Q

from sandboxes import destruction, restarts
from sandboxes.db.clock import clock_from
from sandboxes.hosts import registry
from sandboxes.lifecycle import EVICTING, WAITING, WARM
from sandboxes.models import Sandbox, Transition, TransitionReason
from sandboxes.providers.errors import ProviderError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
# Longer than an agent waits for CPU time beside commands that use all cores.
RESPONSE_TIMEOUT = timedelta(seconds=30)
MAX_RESTARTS, RESTART_PERIOD = 3, timedelta(hours=1)  # of one sandbox; a restart ends all of its processes


def restart_unresponsive(*, now: datetime) -> SweepResult:
    """Sweep: restart the sandboxes whose agent does not respond, and destroy those without a holder."""
    result, clock = SweepResult(), clock_from(now)
    for sandbox in find_unresponsive():
        if clock() > now + RESPONSE_TIMEOUT + PASS_TIME_LIMIT:
            break
        try:
            result.note(restart(sandbox, now=clock(), actor="sweep"))
        except ProviderError as failed:
            result.failures.append(f"{sandbox.pk}: {failed}")
    return result


def find_unresponsive() -> list[Sandbox]:
    """Return the idle sandboxes of this process's hosts whose agent does not respond. Waits for RESPONSE_TIMEOUT or longer."""
    idle = Sandbox.objects.filter(registry.filter_local(), state__in=(WARM, WAITING), frozen=False, lost_at__isnull=True)
    by_host: Mapping[tuple[str, uuid.UUID | None], list[Sandbox]] = defaultdict(list)
    for sandbox in idle.order_by("state_since"):
        by_host[sandbox.provider, sandbox.host_id].append(sandbox)
    return [sandbox for sandboxes in by_host.values() for sandbox in _filter_unresponsive(sandboxes)]


def _filter_unresponsive(sandboxes: list[Sandbox]) -> list[Sandbox]:
    """Return those of these sandboxes of one host whose agent does not respond."""
    provider = registry.get_sandbox_provider(sandboxes[0])
    refs = provider.find_unresponsive([sandbox.ref for sandbox in sandboxes], timeout=RESPONSE_TIMEOUT)
    return [sandbox for sandbox in sandboxes if sandbox.ref in refs]


def restart(sandbox: Sandbox, *, now: datetime, actor: str = "") -> str:
    """Restart one idle sandbox, and return the outcome. Raises ProviderError; the sandbox then waits again.

    `sandbox` is the row as it was read: a sandbox that was used, suspended or restarted since is left alone."""
    code = TransitionReason.AGENT_UNRESPONSIVE
    if sandbox.holder is None:
        unheld = Q(incarnation=sandbox.incarnation, state_since=sandbox.state_since, state=WARM, holder__isnull=True)
        destroyed = destruction.schedule_destroy(sandbox.pk, now=now, code=code, actor=actor, guard=unheld)
        return "unheld destroyed" if destroyed else restarts.LOST_RACE
    if _count_restarts(sandbox, since=now - RESTART_PERIOD) >= MAX_RESTARTS:
        log.error("agent does not respond", sandbox=str(sandbox.pk), restarts=MAX_RESTARTS)
        return "not restarted again"
    return restarts.restart(sandbox, code=code, now=now, actor=actor)


def _count_restarts(sandbox: Sandbox, *, since: datetime) -> int:
    begun = Transition.objects.filter(sandbox=sandbox, at__gt=since, to=EVICTING, code=TransitionReason.AGENT_UNRESPONSIVE)
    return begun.count()
