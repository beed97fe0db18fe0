"""Restart of a sandbox: its processes end, and the sandbox starts again with its /workspace and /data.

While the provider restarts a sandbox, its state is `evicting`: no run starts then, and if this process dies, the sweep
`stalled` stores the state of the sandbox and makes it cold."""

import time
import uuid
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Q

from sandboxes import eviction, suspension
from sandboxes.db.clock import Clock, clock_from
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.errors import ProviderCallFailed, SandboxBusy, SandboxLost
from sandboxes.hosts import registry
from sandboxes.lifecycle import COLD, EVICTING, RUNNING, SUSPENDED, WAITING, WARM, advance, checkpoint
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import Run, Sandbox, SandboxState, StopReason, TransitionReason, processes
from sandboxes.pool import allocation
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.runs import stops
from sandboxes.usage import readings

log = structlog.get_logger(__name__)
RUN_END_TIMEOUT = timedelta(seconds=20)  # from the kill of the open runs to their end, before the request is refused
POLL_INTERVAL_SECONDS = 0.05
RESTARTED, GONE, LOST_RACE = "restarted", "gone", "lost race"  # outcomes


def restart_held(holder: uuid.UUID, *, now: datetime, actor: str = "") -> Sandbox | None:
    """Restart the sandbox of a holder. Return it as it is afterwards, or None if the holder has none.

    1. Kill the commands of its open runs, and wait until their callers have closed the runs.
    2. Restart the sandbox, which ends everything else, such as children of earlier commands and background processes.

    A cold sandbox has no processes and is left alone. Raise SandboxBusy if a run does not end or another process is changing
    the sandbox, SandboxLost, WrongHost, or ProviderCallFailed."""
    clock = clock_from(now)
    with LONG_CALLS.admit():
        while True:
            sandbox = allocation.find_by_holder(holder)
            if sandbox is None or sandbox.state == COLD:
                return sandbox
            if sandbox.lost_at:
                raise SandboxLost()
            registry.require_local(sandbox)
            try:
                if _try_restart(sandbox, clock, actor=actor):
                    return allocation.find_by_holder(holder)
            except ProviderError as failed:
                raise ProviderCallFailed(f"The sandbox could not be restarted: {failed}") from failed
            if clock() > now + RUN_END_TIMEOUT:
                raise SandboxBusy("A run of the sandbox has not ended, or the sandbox is changing its state. Try again.")
            time.sleep(POLL_INTERVAL_SECONDS)


def _try_restart(sandbox: Sandbox, clock: Clock, *, actor: str) -> bool:
    """Kill the open runs of a sandbox, or restart it if there are none. Return whether it was restarted or is gone."""
    if sandbox.state == RUNNING:
        provider = registry.get_sandbox_provider(sandbox)
        for run in Run.objects.filter(sandbox=sandbox, ended_at__isnull=True).values_list("pk", flat=True):
            stops.request_stop(run, StopReason.RESTART)
            provider.kill(sandbox.ref, str(run))
        return False
    if sandbox.state not in (WARM, WAITING, SUSPENDED) or suspension.is_in_transition(sandbox, now=clock()):
        return False
    return restart(sandbox, code=TransitionReason.RESTART_REQUESTED, now=clock(), actor=actor) != LOST_RACE


def restart(sandbox: Sandbox, *, code: TransitionReason, now: datetime, actor: str = "") -> str:
    """Restart a sandbox without open runs, and return the outcome. Raise ProviderError; the sandbox then waits again.

    `sandbox` is the row as it was read: a sandbox that was used, suspended or restarted since is left alone."""
    clock, token = clock_from(now), uuid.uuid4()
    unchanged = Q(incarnation=sandbox.incarnation, state_since=sandbox.state_since, lost_at__isnull=True)
    claim = eviction.build_claim(token, clock=clock)
    with end_if_unanswered(claim.end, claim):
        claimed = advance(
            sandbox.pk, SandboxState(sandbox.state), EVICTING, now=now, code=code, actor=actor, guard=unchanged,
            claim=token, claimed_by=settings.INSTANCE, deadline_at=claim.deadline, tries=1, idle_at=None,
        )  # fmt: skip
    if not claimed:
        return LOST_RACE
    checkpoint("restart claimed", sandbox)
    provider = registry.get_sandbox_provider(sandbox)
    try:
        readings.record_reading(sandbox, provider, now=clock(), min_cpu_micros=0)  # a restart resets the counter
        provider.restart(sandbox.ref)
        provider.wait_ready(sandbox.ref, timeout=settings.SANDBOX_START_TIMEOUT)
    except Missing:
        eviction.finish_eviction(sandbox.pk, token, now=clock(), actor=actor)
        return GONE
    except ProviderError as failed:
        reason = f"could not be restarted: {failed}"
        _end_claim(sandbox, token, TransitionReason.RESTART_FAILED, now=clock(), reason=reason, actor=actor)
        raise
    checkpoint("restarted", sandbox)
    if not _end_claim(sandbox, token, TransitionReason.AGENT_RESTARTED, now=clock(), cause=code, actor=actor):
        return LOST_RACE
    log.warning("sandbox restarted", sandbox=str(sandbox.pk), agent=sandbox.agent_did, reason=code.value)
    return RESTARTED


def _end_claim(
    sandbox: Sandbox,
    token: uuid.UUID,
    code: TransitionReason,
    *,
    now: datetime,
    reason: str = "",
    cause: TransitionReason | None = None,
    actor: str,
) -> bool:
    """Move a claimed sandbox back to `waiting`, and close its processes if it was restarted. Return False if another process
    has taken over. A failed restart may have killed the processes as well; the next listing of the processes shows that."""
    is_restarted = code == TransitionReason.AGENT_RESTARTED
    with transaction.atomic():
        ended = advance(
            sandbox.pk, EVICTING, WAITING, now=now, code=code, reason=reason, actor=actor, guard=Q(claim=token), claim=None,
            claimed_by="", deadline_at=None, tries=0, last_error=reason,
            idle_at=sandbox.idle_at or now + sandbox.idle_after, frozen=sandbox.frozen and not is_restarted,
        )  # fmt: skip
        if ended and is_restarted and cause:
            processes.close_all_processes(
                sandbox.pk, now=now, note=f"Sandbox restarted: {cause.label}.", may_wake=False,
                restarts=cause != TransitionReason.RESTART_REQUESTED,
            )  # fmt: skip
    return ended
