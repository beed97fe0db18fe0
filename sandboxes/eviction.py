"""Eviction of sandboxes: from alive to cold, and release of places for other holders.

State is stored before the process is destroyed. As in sandboxes.pool, each function claims with a guarded UPDATE, calls
the provider outside any transaction, and records the outcome."""

import uuid
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet

from sandboxes import destruction, installation_marks, quiescence, suspension
from sandboxes.claims import CLAIM_TTL, Claim
from sandboxes.db.clock import Clock, clock_from, compute_backoff
from sandboxes.deferred_writes import end_if_unanswered, hold_in_flight
from sandboxes.errors import ClaimLost, WorkspaceFull
from sandboxes.hosts import registry
from sandboxes.lifecycle import COLD, DESTROYED, DESTROYING, EVICTING, SUSPENDED, WAITING, WARM, advance, checkpoint
from sandboxes.models import (
    GONE_STATES,
    NEVER_STARTED,
    Pool,
    Quota,
    Run,
    Sandbox,
    TransitionReason,
    processes,
)
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.state import data_sync, mounts, unrecorded, vendor_snapshots, workspace
from sandboxes.storage.base import StoreError
from sandboxes.usage import readings

log = structlog.get_logger(__name__)
# A client that got its place from the admission queue has this time for its first command. Without it, requests that wait would
# evict each other's sandboxes before one of them was used.
FIRST_USE_PERIOD = timedelta(seconds=30)


# --- eviction ---------------------------------------------------------------------------------------------------------


def evict(
    pk: uuid.UUID,
    *,
    now: datetime,
    code: TransitionReason = TransitionReason.IDLE,
    reason: str = "",
    actor: str = "",
    guard: Q | None = None,
) -> bool:
    """Evict one sandbox: store its state, then destroy its process. Returns whether it is cold now.

    Only `warm`, `waiting` and `suspended` sandboxes are evicted. A sandbox with an open Run is `running`, so the claiming
    UPDATE does not match it. `guard` is a further condition of that UPDATE. If its state cannot be stored, the sandbox stays
    alive and `last_error` has the cause. Raises WrongHost."""
    if settings.OBSERVE:
        return False  # the provider would refuse the destroy, and the sandbox would stay in `evicting`
    sandbox = Sandbox.objects.get(pk=pk)
    token = uuid.uuid4()
    registry.require_local(sandbox)
    evictable = Q(holder__isnull=False, incarnation=sandbox.incarnation, lost_at__isnull=True)
    claim = build_claim(token, clock=clock_from(now))
    with end_if_unanswered(claim.end, claim):
        claimed = any(
            advance(
                pk, was, EVICTING, now=now, code=code, reason=reason, actor=actor,
                guard=evictable & suspension.filter_unclaimed(now) & (guard or Q()),
                claim=token, claimed_by=settings.INSTANCE, deadline_at=claim.deadline, tries=1, idle_at=None,
            )
            for was in (WAITING, WARM, SUSPENDED)
        )  # fmt: skip
    return claimed and finish_eviction(pk, token, now=now, actor=actor)


def build_claim(token: uuid.UUID, *, clock: Clock) -> Claim:
    """Build the claim on the sandboxes in `evicting` that a worker claims, or has claimed, by this token."""
    return Claim(Sandbox.objects.filter(claim=token, state=EVICTING), deadline=clock() + CLAIM_TTL, clock=clock)


def request_eviction(pk: uuid.UUID, *, now: datetime, actor: str, reason: str, guard: Q | None = None) -> bool:
    """Make one sandbox due for the next idle sweep, as if its idle time had passed. A use before the sweep cancels the request.

    Returns False if the sandbox cannot be evicted, because it is running, in flight, cold, lost or without a holder.
    Idempotent."""
    evictable = Q(state__in=(WAITING, WARM, SUSPENDED), holder__isnull=False, lost_at__isnull=True)
    due = Sandbox.objects.filter(evictable, guard or Q(), pk=pk).update(idle_at=now)
    if due:
        log.info("eviction requested", sandbox=str(pk), actor=actor, reason=reason)
    return bool(due)


def finish_eviction(pk: uuid.UUID, token: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """Finish the eviction of a claimed sandbox. Returns whether it is cold now. Safe to repeat after a crash at any step.

    1. Store the state, unless it is stored since the last run or the incarnation has had no run. Resume a suspended sandbox
       before, and end its commands. Afterwards have the vendor take its own snapshot, where that is configured.
    2. Destroy the process.
    3. Move the row to `cold`.

    If step 1 fails the sandbox returns to `waiting`. If step 2 fails it stays in `evicting`, and a sweep repeats the step.
    The claim is kept while the state is being stored, however long that takes."""
    clock, claimed = clock_from(now), Sandbox.objects.filter(claim=token, pk=pk, state=EVICTING)
    try:
        with hold_in_flight(Claim(claimed, deadline=now, clock=clock)) as claim:
            sandbox = claimed.select_related("pool").first()
            return sandbox is not None and _finish_claimed_eviction(sandbox, claim, clock, actor=actor)
    except ClaimLost:
        log.warning("eviction taken over", sandbox=str(pk))
        return False


def _finish_claimed_eviction(sandbox: Sandbox, claim: Claim, clock: Clock, *, actor: str) -> bool:
    pk, own_claim, provider = sandbox.pk, Q(claim=sandbox.claim), registry.get_sandbox_provider(sandbox)
    checkpoint("eviction claimed", sandbox)
    try:
        claim.keep()
        if not _persist_state(sandbox, provider, claim, clock):
            return False
        checkpoint("persisted", sandbox)
        vendor_snapshots.take(sandbox, provider, claim, clock=clock)
    except Missing as missing:
        mark_lost(sandbox, str(missing), now=clock())
        return False
    except (ProviderError, StoreError, WorkspaceFull) as failed:
        failures = sandbox.persist_failures + 1
        log.error("state not stored", sandbox=str(pk), tries=failures, error=str(failed))
        with transaction.atomic():
            is_waiting = advance(
                pk, EVICTING, WAITING, now=clock(), actor=actor, guard=own_claim,
                code=TransitionReason.PERSIST_FAILED, reason=f"state could not be stored: {failed}",
                claim=None, deadline_at=None, tries=0, persist_failures=failures,
                last_error=f"State could not be stored: {failed}",
                idle_at=clock() + compute_backoff(failures, initial=timedelta(minutes=1)),
                **quiescence.count_unreadable(failed),
            )  # fmt: skip
            if is_waiting and workspace.has_unsaved_state(sandbox):
                note = "Ended for an eviction: the state could not be stored, and the sandbox goes on"
                processes.close_all_processes(pk, now=clock(), note=note, may_wake=False, resumes=True)
        return False
    reason = readings.record_final_reading(sandbox, provider, now=clock())
    try:
        provider.destroy(sandbox.ref)
    except ProviderError as failed:  # the state is stored; the sweep repeats this step
        Sandbox.objects.filter(own_claim, pk=pk, state=EVICTING).update(
            last_error=str(failed), deadline_at=clock() + compute_backoff(sandbox.tries)
        )
        return False
    mounts.detach(pk)
    checkpoint("process gone", sandbox)
    slept = advance(
        pk, EVICTING, COLD, now=clock(), code=TransitionReason.PERSISTED, reason=reason, actor=actor, guard=own_claim,
        claim=None, deadline_at=None, tries=0, persist_failures=0, last_error="", slept=F("slept") + 1,
    )  # fmt: skip
    if slept:
        installation_marks.note_change(sandbox, COLD)
        log.info("sleep", sandbox=str(pk), agent=sandbox.agent_did, bytes=sandbox.workspace_bytes)
    return slept


def _persist_state(sandbox: Sandbox, provider: Provider, claim: Claim, clock: Clock) -> bool:
    """Store the state of this incarnation, unless nothing in it is unsaved. Returns False if the claim was lost."""
    if not workspace.has_unsaved_state(sandbox):
        return True
    attachment = data_sync.find_current(sandbox)
    if attachment:
        data_sync.release_mount(attachment, sandbox, now=clock())
    suspension.thaw(sandbox, provider)
    quiescence.quiesce(sandbox, provider, now=clock())
    if attachment:
        data_sync.persist_final(attachment, sandbox, provider, now=clock())
    return workspace.persist_claimed(sandbox, provider, claim, clock=clock)


def record_missing(
    sandbox: Sandbox, cause: str, *, now: datetime, actor: str = "", unstarted_run: uuid.UUID | None = None
) -> str:
    """Record that the provider does not have this incarnation. Returns the outcome, or "" if the row has moved.

    - "unheld destroyed": the sandbox has no holder.
    - "found cold": the sandbox had no unsaved state. The next use wakes it from its stored state, if any. In a database that
      has lost changes, also if later files of it are found: the next use wakes it from these.
    - "lost": a Run may have left changes that are stored nowhere.

    `unstarted_run` is an ended Run that did not reach the sandbox and therefore changed no file."""
    unchanged = Q(incarnation=sandbox.incarnation)
    if sandbox.holder is None:
        code = TransitionReason.PROVIDER_LOST
        destroyed = destruction.schedule_destroy(sandbox.pk, now=now, code=code, actor=actor, guard=unchanged)
        return "unheld destroyed" if destroyed else ""
    runs = Run.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation)
    if unstarted_run:
        runs = runs.exclude(pk=unstarted_run)
    if sandbox.frozen and (stored_at := workspace.find_stored_time(sandbox)):
        runs = runs.filter(started_at__gte=stored_at)  # stored by a suspension, before the run that failed
    # A file operation may have changed files before it failed.
    runs = runs.exclude(NEVER_STARTED, kind__in=("exec", "turn"))
    unused = ~Exists(runs.filter(sandbox=OuterRef("pk"))) | Q(persisted=True)
    is_stored = sandbox.persisted or not runs.exists()
    if not is_stored and installation_marks.has_lost_changes():
        try:
            is_stored = unrecorded.replace_missing(sandbox, registry.get_sandbox_provider(sandbox), now=now)
        except (ProviderError, StoreError, WorkspaceFull) as failed:
            log.error("unrecorded files not kept", sandbox=str(sandbox.pk), error=str(failed))
            return ""
        unused = Q() if is_stored else unused
    if is_stored:
        with transaction.atomic():
            for was in (WARM, WAITING, SUSPENDED):
                if advance(
                    sandbox.pk, was, EVICTING, now=now, code=TransitionReason.PROVIDER_LOST, actor=actor,
                    guard=unchanged & unused, claim=uuid.uuid4(), deadline_at=now, idle_at=None,
                ) and advance(
                    sandbox.pk, EVICTING, COLD, now=now, code=TransitionReason.NOTHING_UNSAVED, actor=actor,
                    claim=None, deadline_at=None,
                ):  # fmt: skip
                    return "found cold"
        return ""
    # The row may have been read before an eviction that has stored the state and destroyed the process since.
    return "lost" if mark_lost(sandbox, cause, now=now, guard=Q(persisted=False)) else ""


def mark_lost(sandbox: Sandbox, cause: str, *, now: datetime, guard: Q | None = None) -> bool:
    """Record that the provider has lost this incarnation, and close its processes. The caller, or a sweep, ends the lease.

    Returns False if the loss was recorded before, if this incarnation has ended, or if the guard does not hold."""
    not_lost = Sandbox.objects.filter(guard or Q(), pk=sandbox.pk, incarnation=sandbox.incarnation, lost_at__isnull=True)
    with transaction.atomic():
        lost = not_lost.exclude(state__in=(COLD, *GONE_STATES)).update(lost_at=now, last_error=f"Lost: {cause}")
        if lost:
            processes.close_all_processes(sandbox.pk, now=now, note=f"Sandbox lost by the provider: {cause}")
    if lost:
        log.error("sandbox lost", sandbox=str(sandbox.pk), error=cause)
    return bool(lost)


def is_lost(sandbox: Sandbox) -> bool:
    """Return whether a loss of this incarnation is recorded."""
    return Sandbox.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation, lost_at__isnull=False).exists()


# --- capacity ---------------------------------------------------------------------------------------------------------


def free_place(pool: Pool, *, agent_did: str, now: datetime, actor: str = "", spare_unused: bool = False) -> bool:
    """Free a place for this agent: cold before warm before waiting or suspended, the least recently used of each tier first.

    Never evicts a running sandbox, one that a guarantee protects, or with `spare_unused` one that has just been started for its
    first use. Returns False if no sandbox can be evicted. True means that one attempt was made: it may have failed, or a
    concurrent request may have taken the place."""
    clock = clock_from(now)
    victim = find_victim(pool, agent_did=agent_did, now=now, spare_unused=spare_unused)
    if victim is None:
        return False
    code, reason = TransitionReason.CAPACITY, f"place needed by {agent_did}"
    if victim.holder is None:
        _destroy_unheld(victim, now=clock(), reason=reason, actor=actor)
        return True
    if victim.state != COLD and not evict(
        victim.pk, now=clock(), code=code, reason=reason, actor=actor, guard=Q(state=victim.state)
    ):
        return True  # the victim is in use again, or its state could not be stored and find_victim skips it until its next try
    tier = WAITING if victim.state == SUSPENDED else victim.state
    release_cold(victim.pk, now=clock(), reason=reason, actor=actor, for_agent=agent_did, tier=tier)
    return True


def find_victim(pool: Pool, *, agent_did: str, now: datetime, spare_unused: bool = False) -> Sandbox | None:
    """Return the sandbox to evict next when this agent needs a place, or None. One query, served by an index."""
    victims = _order_victims(agent_did=agent_did, now=now).filter(pool=pool)
    if spare_unused:
        victims = victims.exclude(state=WARM, holder__isnull=False, state_since__gt=now - FIRST_USE_PERIOD)
    return victims.first()


def free_quota(pool: Pool, *, agent_did: str, now: datetime, actor: str = "") -> bool:
    """Release the place of this agent's least recently used cold sandbox in the pool, so that its quota has room.

    Returns False if the agent has none. True means that one attempt was made: the sandbox may have woken meanwhile."""
    victim = _order_victims(agent_did=agent_did, now=now).filter(pool=pool, agent_did=agent_did, state=COLD).first()
    if victim is None:
        return False
    release_cold(victim.pk, now=now, reason=f"quota needed by {agent_did}", actor=actor, for_agent=agent_did, tier=COLD)
    return True


def free_slot(*, agent_did: str, now: datetime, actor: str = "") -> bool:
    """Free an egress slot for this agent: warm before waiting or suspended, the least recently used of each tier first.

    The evicted sandbox is cold and keeps its place. Exceptions and the returned value are those of free_place."""
    clock = clock_from(now)
    victim = _order_victims(agent_did=agent_did, now=now).filter(slot__isnull=False).first()
    if victim is None:
        return False
    code, reason = TransitionReason.CAPACITY, f"egress slot needed by {agent_did}"
    if victim.holder is None:
        _destroy_unheld(victim, now=clock(), reason=reason, actor=actor)
    else:
        evict(victim.pk, now=clock(), code=code, reason=reason, actor=actor, guard=Q(state=victim.state))
    return True


def _destroy_unheld(victim: Sandbox, *, now: datetime, reason: str, actor: str) -> None:
    """Destroy a pre-warmed sandbox, unless it was claimed meanwhile."""
    clock, unused = clock_from(now), Q(state=WARM, holder__isnull=True)
    with transaction.atomic():
        scheduled = destruction.schedule_destroy(
            victim.pk, now=now, code=TransitionReason.CAPACITY, reason=reason, actor=actor, guard=unused
        )
        if scheduled:
            Pool.objects.filter(pk=victim.pool_id).update(evicted_warm=F("evicted_warm") + 1)
    if scheduled:
        log.info("evict", sandbox=str(victim.pk), tier="warm", agent="")
        destruction.destroy(victim.pk, now=clock(), actor=actor)


def _order_victims(*, agent_did: str, now: datetime) -> QuerySet[Sandbox]:
    """Select the sandboxes of all pools that may be evicted when this agent needs room, in the order of eviction.

    Sandboxes with a process are those of this process's hosts; the place of a cold one is released in the database alone.
    A sandbox whose state could not be stored is skipped until its next try, so that it does not block others. A run
    resets the count of failures and makes the sandbox a candidate again."""
    guaranteed = Quota.objects.filter(
        pool=OuterRef("pool"), agent_did=OuterRef("agent_did"), guaranteed__gt=0, used__lte=F("guaranteed")
    ).exclude(agent_did=agent_did)
    postponed = Q(persist_failures__gt=0, idle_at__gt=now)
    within_reach = Q(tier=0) | registry.filter_local()
    in_transition = Q(state=SUSPENDED, deadline_at__isnull=False)
    candidates = Sandbox.objects.filter(
        ~Exists(guaranteed), ~postponed, ~in_transition, within_reach, tier__isnull=False, lost_at__isnull=True
    )
    return candidates.order_by("tier", "last_used_at")


def release_cold(
    pk: uuid.UUID,
    *,
    now: datetime,
    reason: str = "",
    actor: str = "",
    for_agent: str = "",
    tier: str = "",
    guard: Q | None = None,
    code: TransitionReason | None = None,
) -> bool:
    """Release the place of a cold sandbox. Its row becomes `destroyed`; its snapshots stay for the holder's next use.

    `for_agent` is the agent that needs the place; empty: the cold TTL has passed, unless `code` is another cause. `tier` is the
    state before the eviction (`waiting` for a suspended sandbox) and selects the pool's counter. Returns False if the sandbox
    woke meanwhile, or if the release would take a guaranteed place for another agent."""
    sandbox = Sandbox.objects.get(pk=pk)
    code = code or (TransitionReason.CAPACITY if for_agent else TransitionReason.COLD_TTL)
    with transaction.atomic():
        released = advance(
            pk, COLD, DESTROYING, now=now, code=code, reason=reason, actor=actor, guard=guard, deadline_at=now, claim=None
        ) and advance(
            pk,
            DESTROYING,
            DESTROYED,
            now=now,
            code=TransitionReason.NO_PROCESS,
            actor=actor,
            destroyed_at=now,
            deadline_at=None,
        )
        if released and not destruction.release_place(
            sandbox, protect_guaranteed=bool(for_agent) and for_agent != sandbox.agent_did, tier=tier
        ):
            transaction.set_rollback(True)
            return False
    if released:
        log.info("evict", sandbox=str(pk), tier=tier or "cold", agent=sandbox.agent_did)
    return released
