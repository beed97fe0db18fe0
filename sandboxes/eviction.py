"""Who sleeps, who makes room, who goes. Nothing is given up before its state is stored, and none is gone before its provider
says so. Verbs as in pool: a guarded UPDATE claims, the provider acts outside any transaction, the rest is recorded."""

import uuid
from contextlib import suppress
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q
from django.db.models.functions import Greatest

from sandboxes import providers
from sandboxes.db.clock import Clock, clock_from, compute_backoff, format_timestamp
from sandboxes.lifecycle import COLD, DESTROYED, DESTROYING, EVICTING, WAITING, WARM, advance, checkpoint
from sandboxes.models import GONE_STATES, Pool, Quota, Run, RunOutcome, Sandbox, SandboxState, Snapshot, processes
from sandboxes.models.state import SnapshotKind
from sandboxes.models.webhooks import EventType
from sandboxes.providers.base import WORKSPACE, Missing, Provider, ProviderError
from sandboxes.state import data_sync, mounts, workspace
from sandboxes.storage.base import StoreError
from sandboxes.usage import readings
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
DESTROY_CLAIM_TIMEOUT = timedelta(minutes=2)  # a destroy that takes longer is tried by the next sweep as well
EVICTION_TIMEOUT = timedelta(minutes=10)  # storing a large workspace takes a while
SANDBOX_COUNTER_FIELDS = (
    "warm_hits",
    "woken_local",
    "woken_cloud",
    "woken_fresh",
    "slept",
)  # by a sandbox while it lives, then by its pool


# --- sleeping ---------------------------------------------------------------------------------------------------------


def evict(pk: uuid.UUID, *, now: datetime, reason: str, actor: str = "", guard: Q | None = None) -> bool:
    """Put one sandbox to sleep: store its state, then destroy its process. True if it is cold now.

    Only `warm` and `waiting` sleep: one with an open Run is `running`, and the UPDATE that claims says so. `guard` is
    why it is eligible, said again in that UPDATE. If its state cannot be stored it stays, and last_error says why."""
    sandbox = Sandbox.objects.get(pk=pk)
    token = uuid.uuid4()
    held = Q(holder__isnull=False, incarnation=sandbox.incarnation, lost_at__isnull=True)
    for was in (WAITING, WARM):
        if advance(
            pk, was, EVICTING, now=now, reason=reason, actor=actor, guard=held & (guard or Q()),
            claim=token, claimed_by=settings.INSTANCE, deadline_at=now + EVICTION_TIMEOUT, idle_at=None,
        ):  # fmt: skip
            return finish_eviction(pk, token, now=now, actor=actor)
    return False


def request_eviction(pk: uuid.UUID, *, now: datetime, actor: str, reason: str, guard: Q | None = None) -> bool:
    """Make one sandbox due for the next idle sweep, as if its idle time were over. A use before that keeps it awake.

    False if it is not one that sleeps: it runs, sleeps, is lost, or nobody holds it. Safe to repeat."""
    may = Q(state__in=(WAITING, WARM), holder__isnull=False, lost_at__isnull=True)
    due = Sandbox.objects.filter(may, guard or Q(), pk=pk).update(idle_at=now)
    if due:
        log.info("sleep asked for", sandbox=str(pk), actor=actor, reason=reason)
    return bool(due)


def finish_eviction(pk: uuid.UUID, token: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """The rest of `sleep` for whoever holds the claim: persist, destroy, cold. Safe to repeat after a crash anywhere."""
    later = clock_from(now)
    mine = Q(claim=token)
    sandbox = Sandbox.objects.select_related("pool").filter(mine, pk=pk, state=EVICTING).first()
    if sandbox is None:
        return False
    provider = providers.get_provider(sandbox.provider)
    checkpoint("eviction claimed", sandbox)
    try:
        if not _persist_state(sandbox, provider, mine, later):
            return False
        checkpoint("persisted", sandbox)
    except Missing as gone:
        mark_lost(sandbox, str(gone), now=later())
        return False
    except (ProviderError, StoreError) as failed:
        tries = sandbox.tries + 1
        log.error("state not stored", sandbox=str(pk), tries=tries, error=str(failed))
        advance(
            pk, EVICTING, WAITING, now=later(), reason=f"its state could not be stored: {failed}", actor=actor, guard=mine,
            claim=None, deadline_at=None, tries=tries, last_error=f"Its state could not be stored: {failed}"[:2000],
            idle_at=later() + compute_backoff(tries, initial=timedelta(minutes=1)),
        )  # fmt: skip
        return False
    readings.record_final_reading(sandbox, provider, now=later())
    try:
        provider.destroy(sandbox.ref)
    except ProviderError as failed:  # its state is safe; the sweep repeats this step
        Sandbox.objects.filter(mine, pk=pk, state=EVICTING).update(
            tries=F("tries") + 1, last_error=str(failed)[:2000], deadline_at=later() + compute_backoff(sandbox.tries + 1)
        )
        return False
    mounts.detach(pk)
    checkpoint("process gone", sandbox)
    slept = advance(
        pk, EVICTING, COLD, now=later(), reason="stored", actor=actor, guard=mine,
        claim=None, deadline_at=None, tries=0, last_error="", slept=F("slept") + 1,
    )  # fmt: skip
    if slept:
        log.info("sleep", sandbox=str(pk), agent=sandbox.agent_did, bytes=sandbox.workspace_bytes)
    return slept


def _persist_state(sandbox: Sandbox, provider: Provider, mine: Q, later: Clock) -> bool:
    """Have the state of this incarnation in a Snapshot, unless it is, or there is none. False if the claim was lost."""
    used = Run.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation).exists()
    slept = Snapshot.objects.filter(sandbox=sandbox, incarnation=sandbox.incarnation, kind=SnapshotKind.SLEEP)
    if not used or slept.exists():
        return True
    data_sync.persist_final(sandbox, provider, now=later())
    size = provider.size(sandbox.ref, WORKSPACE)
    snapshot = workspace.persist(sandbox, provider, now=later())
    checkpoint("objects stored", sandbox)
    sandbox.workspace_bytes = size
    with transaction.atomic():  # the pointer moves only for whoever still holds the claim
        moved = Sandbox.objects.filter(mine, pk=sandbox.pk, state=EVICTING).update(
            workspace_bytes=size, measured_at=later(), deadline_at=later() + EVICTION_TIMEOUT
        )
        if moved:
            snapshot.save(force_insert=True)
    if moved:
        workspace.forget_older(snapshot.holder, now=later())
    return bool(moved)


def mark_lost(sandbox: Sandbox, why: str, *, now: datetime) -> bool:
    """Say that the provider has lost this incarnation. Its holder's lease is ended by whoever told us, or by a sweep.
    False if it was known, or is not this incarnation's any more."""
    same = Sandbox.objects.filter(pk=sandbox.pk, incarnation=sandbox.incarnation, lost_at__isnull=True)
    with transaction.atomic():
        lost = same.exclude(state__in=(COLD, *GONE_STATES)).update(lost_at=now, last_error=f"Lost: {why}"[:2000])
        if lost:
            processes.close_all_processes(sandbox.pk, now=now, note=f"Its sandbox was lost: {why}")
    if lost:
        log.error("sandbox lost", sandbox=str(sandbox.pk), error=why)
    return bool(lost)


# --- making room ------------------------------------------------------------------------------------------------------


def free_place(pool: Pool, *, agent_did: str, now: datetime, actor: str = "") -> bool:
    """Free a place for this agent: cold goes before warm, warm before waiting, the least recently used of each first.

    False if nothing can be taken: what is running never is, nor what a guarantee protects. True means that something
    moved, not that the place is still free: a rival may have been quicker."""
    later = clock_from(now)
    victim = find_victim(pool, agent_did=agent_did, now=now)
    if victim is None:
        return False
    why = f"its place was needed by {agent_did}"
    if victim.holder is None:
        unused = Q(state=WARM, holder__isnull=True)
        with transaction.atomic():
            taken = schedule_destroy(victim.pk, now=later(), reason=why, actor=actor, guard=unused)
            if taken:
                Pool.objects.filter(pk=pool.pk).update(evicted_warm=F("evicted_warm") + 1)
        if taken:
            log.info("evict", sandbox=str(victim.pk), tier="warm", agent="")
            destroy(victim.pk, now=later(), actor=actor)
        return True
    if victim.state != COLD and not evict(victim.pk, now=later(), reason=why, actor=actor, guard=Q(state=victim.state)):
        return True  # it runs again, or could not be stored and is no candidate for a while: look for another
    release_cold(victim.pk, now=later(), reason=why, actor=actor, for_agent=agent_did, tier=victim.state)
    return True


def find_victim(pool: Pool, *, agent_did: str, now: datetime) -> Sandbox | None:
    """Whose place goes next when this agent needs one; one index-served query, however many rows there are.

    What could not be stored lately is left out until its next try: it must not stand in the way of the others. Once it was
    used again there is no other next try than this one."""
    guaranteed = Quota.objects.filter(
        pool=OuterRef("pool"), agent_did=OuterRef("agent_did"), guaranteed__gt=0, used__lte=F("guaranteed")
    ).exclude(agent_did=agent_did)
    postponed = Q(tries__gt=0, idle_at__gt=now, last_used_at__lt=F("state_since"))
    candidates = Sandbox.objects.filter(~Exists(guaranteed), ~postponed, pool=pool, tier__isnull=False, lost_at__isnull=True)
    return candidates.order_by("tier", "last_used_at").first()


def release_cold(
    pk: uuid.UUID, *, now: datetime, reason: str, actor: str = "", for_agent: str = "", tier: str = "", guard: Q | None = None
) -> bool:
    """Give up the place of a sandbox that sleeps: its row ends, its stored copy stays for the next use by its holder.

    `tier` is what it was when its place was wanted, which is how the pool counts the eviction. False if it woke
    meanwhile, or if that would take a guaranteed place for somebody else's sake."""
    sandbox = Sandbox.objects.get(pk=pk)
    with transaction.atomic():
        gone = advance(
            pk, COLD, DESTROYING, now=now, reason=reason, actor=actor, guard=guard, deadline_at=now, claim=None
        ) and advance(
            pk, DESTROYING, DESTROYED, now=now, reason="it had no process", actor=actor, destroyed_at=now, deadline_at=None
        )
        if gone and not _release_place(
            sandbox, protect_guaranteed=bool(for_agent) and for_agent != sandbox.agent_did, tier=tier
        ):
            transaction.set_rollback(True)
            return False
    if gone:
        log.info("evict", sandbox=str(pk), tier=tier or "cold", agent=sandbox.agent_did)
    return gone


def _release_place(sandbox: Sandbox, *, protect_guaranteed: bool = False, tier: str = "") -> bool:
    """Count a sandbox out of its agent's quota and its pool, with what it had counted. In the transaction that ends it."""
    if sandbox.agent_did:
        quota = Quota.objects.filter(pool=sandbox.pool_id, agent_did=sandbox.agent_did, used__gt=0)
        if protect_guaranteed:
            quota = quota.filter(used__gt=F("guaranteed"))
        if not quota.update(used=F("used") - 1) and protect_guaranteed:
            return False
    final = Sandbox.objects.values(*SANDBOX_COUNTER_FIELDS).get(pk=sandbox.pk)
    counted = {name: F(name) + final[name] for name in SANDBOX_COUNTER_FIELDS if final[name]}
    if tier:
        counted[f"evicted_{tier}"] = F(f"evicted_{tier}") + 1
    # A counter that has drifted to 0 stays there until it is counted anew; what the sandbox had counted is kept.
    Pool.objects.filter(pk=sandbox.pool_id).update(used=Greatest(F("used"), 1) - 1, **counted)
    return True


# --- giving one back --------------------------------------------------------------------------------------------------


def schedule_destroy(
    pk: uuid.UUID, *, now: datetime, reason: str, actor: str = "", guard: Q | None = None, note: str = ""
) -> bool:
    """From any state to `destroying`, with its open Runs closed as lost. False if it was given up before, or the guard
    does not hold. The provider is not called: `destroy` or the next sweep does that."""
    while (state := Sandbox.objects.values_list("state", flat=True).get(pk=pk)) not in GONE_STATES:
        if guard is not None and not Sandbox.objects.filter(guard, pk=pk).exists():
            return False
        with transaction.atomic():
            if advance(
                pk, SandboxState(state), DESTROYING, now=now, reason=reason, actor=actor, guard=guard,
                claim=None, deadline_at=now, tries=0, idle_at=None,
            ):  # fmt: skip
                Run.objects.filter(sandbox=pk, ended_at__isnull=True).update(
                    ended_at=now, outcome=RunOutcome.LOST, note=(note or f"Its sandbox was given up: {reason}")[:500]
                )
                return True
    return False


def schedule_destroy_by_holder(holder: uuid.UUID, *, now: datetime, reason: str, actor: str = "") -> bool:
    """Give up whatever this holder has. Called in the transaction that ends the lease: both happen, or neither."""
    pks = Sandbox.objects.filter(holder=holder).exclude(state__in=GONE_STATES).values_list("pk", flat=True)
    return sum(schedule_destroy(pk, now=now, reason=reason, actor=actor) for pk in list(pks)) > 0


def destroy(pk: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """Ask the provider to destroy one sandbox in `destroying`, and free its place when it says that it is gone.

    True if it is destroyed now. A failed or unknown answer keeps the place, and the row's next try waits longer each
    time; after LEASEHOLD_DESTROY_TRIES the row goes to quarantine for an operator to look at. Safe to repeat."""
    due, later = Q(deadline_at__lte=now, quarantined_at__isnull=True), clock_from(now)
    claimed = Sandbox.objects.filter(due, pk=pk, state=DESTROYING).update(
        deadline_at=now + DESTROY_CLAIM_TIMEOUT, claimed_by=settings.INSTANCE
    )
    if not claimed:
        return False
    sandbox = Sandbox.objects.get(pk=pk)
    checkpoint("destroy claimed", sandbox)
    provider = providers.get_provider(sandbox.provider)
    try:
        with suppress(Missing):  # its process is gone; volumes of it may still be there
            data_sync.persist_final(sandbox, provider, now=now)
        readings.record_final_reading(sandbox, provider, now=later())
        provider.destroy(sandbox.ref)
    except Missing:
        pass  # gone already
    except (ProviderError, StoreError) as failed:
        _postpone_destroy(sandbox, failed, now=now)
        return False
    mounts.detach(pk)
    checkpoint("destroy answered", sandbox)
    moment = later()
    with transaction.atomic():
        gone = advance(
            pk, DESTROYING, DESTROYED, now=moment, reason="confirmed gone", actor=actor,
            destroyed_at=moment, deadline_at=None, last_error="",
        )  # fmt: skip
        if gone:
            _release_place(sandbox)
    return gone


def retry_destroy(pk: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """Out of quarantine: try again at the next sweep, with fresh tries. False if it is not in quarantine."""
    out = Sandbox.objects.filter(pk=pk, state=DESTROYING, quarantined_at__isnull=False).update(
        quarantined_at=None, tries=0, deadline_at=now
    )
    if out:
        log.info("destroy retried", sandbox=str(pk), actor=actor)
    return bool(out)


def _postpone_destroy(sandbox: Sandbox, failed: Exception, *, now: datetime) -> None:
    tries = sandbox.tries + 1
    given_up = tries >= settings.DESTROY_TRIES
    with transaction.atomic():
        noted = Sandbox.objects.filter(pk=sandbox.pk, state=DESTROYING, quarantined_at__isnull=True).update(
            tries=tries,
            deadline_at=now + compute_backoff(tries),
            last_error=str(failed)[:2000],
            quarantined_at=now if given_up else None,
        )
        if noted and given_up:
            _enqueue_quarantine_event(sandbox, tries, now)
    log.error("destroy failed", sandbox=str(sandbox.pk), tries=tries, quarantined=given_up, error=str(failed))


def _enqueue_quarantine_event(sandbox: Sandbox, tries: int, now: datetime) -> None:
    said = {
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
    outbox.enqueue_event(EventType.SANDBOX_QUARANTINED, key=f"{sandbox.pk} {said['quarantined_at']}", payload=said, now=now)
