"""Restart of sandboxes whose agent, their process 1, is connected to the gateway and does not respond.

Commands and file operations in such a sandbox fail until its processes end, and its state cannot be stored. The engine ends
them and starts the sandbox again, with its /workspace and /data. While that happens the sandbox is `evicting`: no run starts in
it, and if this process dies, the sweep `stalled` stores its state and makes it cold.

Left alone are a sandbox with an open run, because the run has a deadline, at which it is killed from outside, and a sandbox
whose agent is not connected, because its commands are executed by the engine."""

import uuid
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Q

from sandboxes import destruction, eviction
from sandboxes.claims import CLAIM_TTL
from sandboxes.db.clock import Clock, clock_from
from sandboxes.hosts import registry
from sandboxes.lifecycle import EVICTING, WAITING, WARM, advance, checkpoint
from sandboxes.models import Sandbox, SandboxState, Transition, TransitionReason, processes
from sandboxes.providers.base import Missing, ProviderError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult
from sandboxes.usage import readings

log = structlog.get_logger(__name__)
# Longer than an agent waits for the processor beside commands that use all of it.
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
    clock, token, was = clock_from(now), uuid.uuid4(), SandboxState(sandbox.state)
    code, unchanged = TransitionReason.AGENT_UNRESPONSIVE, Q(incarnation=sandbox.incarnation, state_since=sandbox.state_since)
    if sandbox.holder is None:
        unheld = unchanged & Q(state=WARM, holder__isnull=True)
        destroyed = destruction.schedule_destroy(sandbox.pk, now=now, code=code, actor=actor, guard=unheld)
        return "unheld destroyed" if destroyed else "lost race"
    if _count_restarts(sandbox, since=now - RESTART_PERIOD) >= MAX_RESTARTS:
        log.error("agent does not respond", sandbox=str(sandbox.pk), restarts=MAX_RESTARTS)
        return "not restarted again"
    if not advance(
        sandbox.pk, was, EVICTING, now=now, code=code, actor=actor, guard=unchanged & Q(lost_at__isnull=True),
        claim=token, claimed_by=settings.INSTANCE, deadline_at=now + CLAIM_TTL, tries=1, idle_at=None,
    ):  # fmt: skip
        return "lost race"
    checkpoint("restart claimed", sandbox)
    return _finish_restart(sandbox, token, clock, actor=actor)


def _count_restarts(sandbox: Sandbox, *, since: datetime) -> int:
    begun = Transition.objects.filter(sandbox=sandbox, at__gt=since, to=EVICTING, code=TransitionReason.AGENT_UNRESPONSIVE)
    return begun.count()


def _finish_restart(sandbox: Sandbox, token: uuid.UUID, clock: Clock, *, actor: str) -> str:
    """Restart a claimed sandbox, and end the claim."""
    provider = registry.get_sandbox_provider(sandbox)
    try:
        readings.record_reading(sandbox, provider, now=clock(), min_cpu_micros=0)  # a restart resets the counter
        provider.restart(sandbox.ref)
        provider.wait_ready(sandbox.ref, timeout=settings.SANDBOX_START_TIMEOUT)
    except Missing:
        eviction.finish_eviction(sandbox.pk, token, now=clock(), actor=actor)
        return "gone"
    except ProviderError as failed:
        _end_claim(sandbox, token, TransitionReason.RESTART_FAILED, f"could not be restarted: {failed}", clock, actor=actor)
        raise
    checkpoint("restarted", sandbox)
    if not _end_claim(sandbox, token, TransitionReason.AGENT_RESTARTED, "", clock, actor=actor):
        return "lost race"
    log.warning("sandbox restarted", sandbox=str(sandbox.pk), agent=sandbox.agent_did)
    return "restarted"


def _end_claim(sandbox: Sandbox, token: uuid.UUID, code: TransitionReason, reason: str, clock: Clock, *, actor: str) -> bool:
    """Move a claimed sandbox back to `waiting`. Returns False if another process has taken over."""
    now = clock()
    with transaction.atomic():
        ended = advance(
            sandbox.pk, EVICTING, WAITING, now=now, code=code, reason=reason, actor=actor, guard=Q(claim=token), claim=None,
            claimed_by="", deadline_at=None, tries=0, last_error=reason[:2000], idle_at=sandbox.idle_at,
        )  # fmt: skip
        if ended and code == TransitionReason.AGENT_RESTARTED:
            note = "Sandbox restarted: its agent did not respond."
            processes.close_all_processes(sandbox.pk, now=now, note=note)
    return ended
