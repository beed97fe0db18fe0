"""Destruction of sandboxes, confirmed by their provider. Their unsaved state is stored first.

A row becomes `destroyed`, and its place free, only after the provider has confirmed that the sandbox is gone. Failed and
unknown outcomes are retried with backoff, and end in quarantine."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce, Greatest, NullIf

from sandboxes import quiescence, suspension
from sandboxes.claims import CLAIM_TTL, Claim
from sandboxes.db.clock import Clock, clock_from, compute_backoff, format_timestamp
from sandboxes.deferred_writes import end_if_unanswered, hold_in_flight
from sandboxes.errors import ClaimLost, WorkspaceFull
from sandboxes.hosts import registry
from sandboxes.lifecycle import DESTROYED, DESTROYING, EDGES, SUSPENDED, advance, checkpoint
from sandboxes.models import (
    GONE_STATES,
    FinalPersist,
    Pool,
    Quota,
    Run,
    RunOutcome,
    Sandbox,
    SandboxState,
    StopReason,
    Transition,
    TransitionReason,
)
from sandboxes.models.state import AgentData
from sandboxes.models.webhooks import EventType
from sandboxes.providers.base import DATA, WORKSPACE, Provider
from sandboxes.providers.errors import Missing, ProviderError, Unavailable
from sandboxes.state import data_sync, mounts, workspace
from sandboxes.storage.base import StoreError
from sandboxes.usage import readings
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
# Counted in the row of a sandbox, and added to the row of its pool when the place is released.
SANDBOX_COUNTER_FIELDS = ("warm_hits", "woken_local", "woken_cloud", "woken_vendor", "woken_fresh", "slept")

# Of the commands that the destruction of a sandbox ends.
OPERATOR_STOPS = {TransitionReason.OPERATOR: StopReason.OPERATOR, TransitionReason.DISCARDED: StopReason.OPERATOR}


def schedule_destroy(
    pk: uuid.UUID,
    *,
    now: datetime,
    code: TransitionReason,
    reason: str = "",
    actor: str = "",
    guard: Q | None = None,
    note: str = "",
    was: SandboxState | None = None,
    stop_reason: StopReason | None = None,
) -> bool:
    """Move a sandbox to `destroying`, and close its open Runs as lost. `destroy` or a sweep calls the provider later.

    Returns False if the sandbox was in `destroying` or `destroyed` before, if the guard does not hold, or if EDGES
    does not allow `code` from its state (another process has moved the sandbox). `note` is written to the closed Runs. Unsaved
    state is not stored with the code `discarded`. `stop_reason` is that of the closed Runs that have none. `was` is the state
    if the caller has just read it."""
    discarded = {"final_persist": FinalPersist.NONE} if code == TransitionReason.DISCARDED else {}
    state = was or _read_state(pk)
    while state not in GONE_STATES:
        if code not in EDGES[state, DESTROYING]:
            return False
        if guard is not None and not Sandbox.objects.filter(guard, pk=pk).exists():
            return False
        with transaction.atomic(savepoint=False):
            if advance(
                pk, state, DESTROYING, now=now, code=code, reason=reason, actor=actor, guard=guard,
                claim=None, deadline_at=now, tries=0, idle_at=None, **discarded,
            ):  # fmt: skip
                Run.objects.filter(sandbox=pk, ended_at__isnull=True).update(
                    ended_at=now,
                    outcome=RunOutcome.LOST,
                    note=note or f"Sandbox destroyed: {reason or code.label}",
                    stop_reason=Coalesce(NullIf("stop_reason", Value("")), Value(stop_reason or OPERATOR_STOPS.get(code, ""))),
                )
                if discarded:
                    _record_discard(pk, now=now)
                return True
        state = _read_state(pk)
    return False


def _read_state(pk: uuid.UUID) -> SandboxState:
    return SandboxState(Sandbox.objects.values_list("state", flat=True).get(pk=pk))


def discard(pk: uuid.UUID, *, now: datetime, reason: str, actor: str = "") -> bool:
    """Schedule the destruction of a sandbox without storing its unsaved state, also in `destroying` or in quarantine.

    Records the code `discarded` as a transition. Returns False if the sandbox is destroyed, or was discarded before."""
    if schedule_destroy(pk, now=now, code=TransitionReason.DISCARDED, reason=reason, actor=actor):
        return True
    not_discarded = ~Q(final_persist=FinalPersist.NONE)
    with transaction.atomic():
        discarded = advance(
            pk, DESTROYING, DESTROYING, now=now, code=TransitionReason.DISCARDED, reason=reason, actor=actor,
            guard=not_discarded, final_persist=FinalPersist.NONE, claim=None, deadline_at=now, tries=0, quarantined_at=None,
        )  # fmt: skip
        if discarded:
            _record_discard(pk, now=now)
    return discarded


def discard_by_holder(holder: uuid.UUID, *, now: datetime, reason: str, actor: str = "") -> bool:
    """Discard the sandboxes of a holder that are not destroyed yet. Returns whether there were any."""
    pks = list(Sandbox.objects.filter(holder=holder).exclude(state=DESTROYED).values_list("pk", flat=True))
    discarded = [discard(pk, now=now, reason=reason, actor=actor) for pk in pks]
    return any(discarded)


def _record_discard(pk: uuid.UUID, *, now: datetime) -> None:
    """Record an event if the discarded sandbox has unsaved state."""
    sandbox = Sandbox.objects.get(pk=pk)
    if sandbox.holder and (workspace.has_unsaved_state(sandbox) or data_sync.has_unsaved_changes(sandbox)):
        detail = "An operator destroyed the sandbox without storing its last state."
        data_sync.record_dropped(sandbox, detail, now=now)


def schedule_destroy_by_holder(
    holder: uuid.UUID,
    *,
    now: datetime,
    reason: str,
    actor: str = "",
    discard: bool = False,
    stop_reason: StopReason | None = None,
) -> bool:
    """Move the holder's sandbox to `destroying`. Returns whether it had one. With `discard`, its unsaved state is not stored.

    Call this function in the transaction that ends the lease, so that both happen or neither."""
    # At most one, by the constraint sandbox_one_live_per_holder.
    sandbox = Sandbox.objects.filter(holder=holder).exclude(state__in=GONE_STATES).first()
    if sandbox is None:
        return False
    code = TransitionReason.LEASE_ENDED
    if discard:
        code = TransitionReason.DISCARDED
    elif sandbox.lost_at:
        code = TransitionReason.HOST_LOST if sandbox.host and sandbox.host.lost_at else TransitionReason.PROVIDER_LOST
    return schedule_destroy(
        sandbox.pk, now=now, code=code, reason=reason, actor=actor, was=SandboxState(sandbox.state), stop_reason=stop_reason
    )


def destroy(pk: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """Destroy one sandbox in `destroying` at its provider, and release its place. Returns whether it is destroyed now.

    1. Claim the row, if it is due, not in quarantine, and on a host that this process reaches.
    2. End the commands of an incarnation with state to store, and resume a suspended sandbox before. Persist /data and, as a
       snapshot, the workspace, as `final_persist` says.
    3. Take the last reading.
    4. Destroy at the provider. "Missing" counts as destroyed.
    5. Move the row to `destroyed`, and release its place.

    If step 2 or 4 fails or its outcome is unknown, the sandbox keeps its place and the next try waits longer each time. After
    LEASEHOLD_DESTROY_TRIES tries the row goes to quarantine for an operator. A try is counted when it is claimed, so that a try
    whose process died counts. The claim is kept while the state is being stored. State that the sandbox itself withholds, in
    several tries and after a restart, is given up in the last try and recorded as an event. Idempotent."""
    is_due = Q(deadline_at__lte=now, quarantined_at__isnull=True) & registry.filter_local()
    clock, token = clock_from(now), uuid.uuid4()
    deadline = now + CLAIM_TTL
    claim = Claim(Sandbox.objects.filter(pk=pk, claim=token, state=DESTROYING), deadline=deadline, clock=clock)
    with end_if_unanswered(claim.end, claim):
        claimed = Sandbox.objects.filter(is_due, pk=pk, state=DESTROYING).update(
            deadline_at=deadline, claimed_by=settings.INSTANCE, claim=token, tries=F("tries") + 1
        )
    if not claimed:
        return False
    try:
        with hold_in_flight(claim):
            sandbox = Sandbox.objects.select_related("pool").get(pk=pk)
            return _destroy_claimed(sandbox, claim, clock, actor=actor)
    except ClaimLost:
        log.warning("destroy taken over", sandbox=str(pk))
        return False


def _destroy_claimed(sandbox: Sandbox, claim: Claim, clock: Clock, *, actor: str) -> bool:
    checkpoint("destroy claimed", sandbox)
    if sandbox.tries > settings.DESTROY_TRIES:  # no try has reached its end
        _postpone_destroy(sandbox, "The process that tried to destroy the sandbox died in every try.", clock)
        return False
    provider, reason = registry.get_sandbox_provider(sandbox), ""
    try:
        if not _persist_last_state(sandbox, provider, claim, clock):
            return False
        checkpoint("state stored", sandbox)
        reason = readings.record_final_reading(sandbox, provider, now=clock())
        provider.destroy(sandbox.ref)
    except Missing:
        pass  # already gone
    except (ProviderError, StoreError, WorkspaceFull) as failed:
        _postpone_destroy(sandbox, str(failed), clock, **quiescence.count_unreadable(failed))
        return False
    mounts.detach(sandbox.pk)
    checkpoint("destroy answered", sandbox)
    confirmed_at = clock()
    with transaction.atomic():
        destroyed = advance(
            sandbox.pk, DESTROYING, DESTROYED, now=confirmed_at, code=TransitionReason.CONFIRMED_GONE, reason=reason,
            actor=actor, destroyed_at=confirmed_at, deadline_at=None, claim=None, tries=sandbox.tries - 1, last_error="",
        )  # fmt: skip
        if destroyed:
            release_place(sandbox)
    if destroyed:
        log.info("sandbox destroyed", sandbox=str(sandbox.pk), agent=sandbox.agent_did, provider=sandbox.provider)
    return destroyed


def _persist_last_state(sandbox: Sandbox, provider: Provider, claim: Claim, clock: Clock) -> bool:
    """Store the state that a sandbox about to be destroyed has not stored yet. Returns False if the claim was lost.

    A missing process leaves nothing to store, but its volumes may still exist. Raises the errors of the steps. In the last try,
    state that the sandbox withholds is recorded as dropped instead."""
    if attachment := data_sync.find_current(sandbox):
        data_sync.release_mount(attachment, sandbox, now=clock())
    if sandbox.final_persist == FinalPersist.NONE or _was_stored_and_stopped(sandbox, provider):
        return True
    has_workspace = sandbox.holder and sandbox.final_persist == FinalPersist.ALL and workspace.has_unsaved_state(sandbox)
    if attachment is None and not has_workspace:
        return True
    given_up: list[str] = []
    try:
        suspension.thaw(sandbox, provider)
        quiescence.quiesce(sandbox, provider, now=clock())
        if attachment:
            with _giving_up(sandbox, DATA, claim, given_up):
                data_sync.persist_final(attachment, sandbox, provider, now=clock())
        if has_workspace:
            with _giving_up(sandbox, WORKSPACE, claim, given_up):
                if not workspace.persist_claimed(sandbox, provider, claim, clock=clock):
                    return False
    except Missing as missing:
        _require_missing(sandbox, provider, missing)
        if has_workspace or data_sync.has_unsaved_changes(sandbox):
            detail = f"The sandbox was lost before its last state was stored: {missing}"
            data_sync.record_dropped(sandbox, detail, now=clock())
    return not given_up or claim.update(final_persist=FinalPersist.NONE)


@contextmanager
def _giving_up(sandbox: Sandbox, root: str, claim: Claim, given_up: list[str]) -> Iterator[None]:
    """In the last try, record the state below a root as dropped instead of a failure for which the sandbox is the cause.

    Adds the root to `given_up` then. Raises ClaimLost."""
    try:
        yield
    except quiescence.SANDBOX_FAULTS as failed:
        if not quiescence.is_last_try(sandbox):
            raise
        claim.keep()
        now, stored_at = claim.clock(), _find_stored_time(sandbox, root)
        last_copy = (
            f"Last copy: {stored_at:%Y-%m-%d %H:%M:%S} UTC, {_format_age(now - stored_at)} old" if stored_at else "No copy"
        )
        detail = f"{root} could not be read in {sandbox.unreadable_tries + 1} tries. {last_copy}. {failed}"
        data_sync.record_dropped(sandbox, detail, now=now)
        given_up.append(root)


def _find_stored_time(sandbox: Sandbox, root: str) -> datetime | None:
    """Return the time of the newest stored copy of a root, or None."""
    if root == DATA:
        stored = AgentData.objects.filter(agent_did=sandbox.agent_did, revision__gt=0)
        return stored.values_list("changed_at", flat=True).first()
    assert sandbox.holder
    newest = workspace.find_latest(sandbox.holder)
    return newest.at if newest else None


def _format_age(age: timedelta) -> str:
    return str(timedelta(seconds=max(int(age.total_seconds()), 0)))


def _require_missing(sandbox: Sandbox, provider: Provider, missing: Missing) -> None:
    """Raise Unavailable if the provider has the sandbox: it has only stopped, and keeps its files."""
    try:
        provider.inspect(sandbox.ref)
    except Missing:
        return
    raise Unavailable(f"The sandbox stopped while its state was being stored: {missing}") from missing


def _was_stored_and_stopped(sandbox: Sandbox, provider: Provider) -> bool:
    """Return whether a suspension has stored all state and ended all processes. A start would only cost time and money."""
    if provider.suspend_keeps_processes or not (sandbox.frozen and sandbox.persisted):
        return False
    last = Transition.objects.filter(sandbox=sandbox, to=DESTROYING).order_by("pk").values_list("was", flat=True).first()
    return last == SUSPENDED


def retry_destroy(pk: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """Take a sandbox out of quarantine and reset its tries. The next sweep tries to destroy the sandbox.

    Returns False if the sandbox is not in quarantine."""
    resumed = Sandbox.objects.filter(pk=pk, state=DESTROYING, quarantined_at__isnull=False).update(
        quarantined_at=None, tries=0, deadline_at=now
    )
    if resumed:
        log.info("destroy retried", sandbox=str(pk), actor=actor)
    return bool(resumed)


def _postpone_destroy(sandbox: Sandbox, error: str, clock: Clock, **columns: object) -> None:
    """Record a failed try and the time of the next one, or put the sandbox into quarantine after the last one."""
    now, tries, quarantined = clock(), sandbox.tries, sandbox.tries >= settings.DESTROY_TRIES
    with transaction.atomic():
        own_claim = Q(pk=sandbox.pk, state=DESTROYING, claim=sandbox.claim)  # not that of a worker that took over
        recorded = Sandbox.objects.filter(own_claim, quarantined_at__isnull=True).update(
            deadline_at=now + compute_backoff(tries),
            last_error=error,
            quarantined_at=now if quarantined else None,
            **columns,
        )
        if recorded and quarantined:
            _enqueue_quarantine_event(sandbox, tries, now)
    log.error("destroy failed", sandbox=str(sandbox.pk), tries=tries, quarantined=quarantined, error=error)


def _enqueue_quarantine_event(sandbox: Sandbox, tries: int, now: datetime) -> None:
    payload = {
        "sandbox": str(sandbox.pk),
        "pool": Pool.objects.values_list("name", flat=True).get(pk=sandbox.pool_id),
        "provider": sandbox.provider,
        "ref": sandbox.ref,
        "lease_id": str(sandbox.holder) if sandbox.holder else None,
        "agent_did": sandbox.agent_did,
        "environment_id": sandbox.environment_id,
        "tries": tries,
        "quarantined_at": format_timestamp(now),
    }
    key = f"{sandbox.pk} {payload['quarantined_at']}"
    outbox.enqueue_event(EventType.SANDBOX_QUARANTINED, key=key, payload=payload, now=now)


def release_place(sandbox: Sandbox, *, protect_guaranteed: bool = False, tier: str = "") -> bool:
    """Subtract a sandbox from its agent's quota and its pool, and add its counters to the pool's.

    Call this function in the transaction that moves the row to `destroyed`. With `protect_guaranteed`, returns False and
    changes nothing if the place is guaranteed to its agent."""
    if sandbox.agent_did:
        quota = Quota.objects.filter(pool=sandbox.pool_id, agent_did=sandbox.agent_did, used__gt=0)
        if protect_guaranteed:
            quota = quota.filter(used__gt=F("guaranteed"))
        if not quota.update(used=F("used") - 1) and protect_guaranteed:
            return False
    totals = Sandbox.objects.values(*SANDBOX_COUNTER_FIELDS).get(pk=sandbox.pk)
    counters = {name: F(name) + totals[name] for name in SANDBOX_COUNTER_FIELDS if totals[name]}
    if tier:
        counters[f"evicted_{tier}"] = F(f"evicted_{tier}") + 1
    # `used` does not fall below 0 if it has drifted; the recount sweep corrects it.
    Pool.objects.filter(pk=sandbox.pool_id).update(used=Greatest(F("used"), 1) - 1, **counters)
    return True
