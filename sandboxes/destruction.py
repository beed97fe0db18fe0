"""Destruction of sandboxes, confirmed by their provider.

A row becomes `destroyed`, and its place free, only after the provider has confirmed that the sandbox is gone. Failed and
unknown outcomes are retried with backoff, and end in quarantine."""

import uuid
from contextlib import suppress
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Greatest

from sandboxes import providers
from sandboxes.db.clock import clock_from, compute_backoff, format_timestamp
from sandboxes.lifecycle import DESTROYED, DESTROYING, EDGES, advance, checkpoint
from sandboxes.models import (
    GONE_STATES,
    Pool,
    Quota,
    Run,
    RunOutcome,
    Sandbox,
    SandboxState,
    TransitionReason,
)
from sandboxes.models.webhooks import EventType
from sandboxes.providers.base import Missing, ProviderError
from sandboxes.state import data_sync, mounts
from sandboxes.storage.base import StoreError
from sandboxes.usage import readings
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
DESTROY_CLAIM_TIMEOUT = timedelta(minutes=2)  # a slower destroy is tried a second time by the next sweep
# Counted in the row of a sandbox, and added to the row of its pool when the place is released.
SANDBOX_COUNTER_FIELDS = ("warm_hits", "woken_local", "woken_cloud", "woken_fresh", "slept")


def schedule_destroy(
    pk: uuid.UUID,
    *,
    now: datetime,
    code: TransitionReason,
    reason: str = "",
    actor: str = "",
    guard: Q | None = None,
    note: str = "",
) -> bool:
    """Move a sandbox to `destroying`, and close its open Runs as lost. `destroy` or a sweep calls the provider later.

    Returns False if the sandbox was in `destroying` or `destroyed` before, if the guard does not hold, or if EDGES
    does not allow `code` from its state (another process has moved the sandbox). `note` is written to the closed Runs."""
    while (state := Sandbox.objects.values_list("state", flat=True).get(pk=pk)) not in GONE_STATES:
        if code not in EDGES[SandboxState(state), DESTROYING]:
            return False
        if guard is not None and not Sandbox.objects.filter(guard, pk=pk).exists():
            return False
        with transaction.atomic():
            if advance(
                pk, SandboxState(state), DESTROYING, now=now, code=code, reason=reason, actor=actor, guard=guard,
                claim=None, deadline_at=now, tries=0, idle_at=None,
            ):  # fmt: skip
                Run.objects.filter(sandbox=pk, ended_at__isnull=True).update(
                    ended_at=now,
                    outcome=RunOutcome.LOST,
                    note=(note or f"Sandbox destroyed: {reason or code.label}")[:500],
                )
                return True
    return False


def schedule_destroy_by_holder(holder: uuid.UUID, *, now: datetime, reason: str, actor: str = "") -> bool:
    """Move the holder's sandbox to `destroying`. Returns whether it had one.

    Call this function in the transaction that ends the lease, so that both happen or neither."""
    pks = Sandbox.objects.filter(holder=holder).exclude(state__in=GONE_STATES).values_list("pk", flat=True)
    code = TransitionReason.LEASE_ENDED
    # At most one, by the constraint sandbox_one_live_per_holder.
    return any(schedule_destroy(pk, now=now, code=code, reason=reason, actor=actor) for pk in list(pks))


def destroy(pk: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """Destroy one sandbox in `destroying` at its provider, and release its place. Returns whether it is destroyed now.

    1. Claim the row, if it is due and not in quarantine.
    2. Persist /data and take the last reading, if the process still exists.
    3. Destroy at the provider. "Missing" counts as destroyed.
    4. Move the row to `destroyed`, and release its place.

    If step 2 or 3 fails or its outcome is unknown, the sandbox keeps its place and the next try waits longer each time. After
    LEASEHOLD_DESTROY_TRIES tries the row goes to quarantine for an operator. Idempotent."""
    if settings.OBSERVE:
        return False
    is_due, clock = Q(deadline_at__lte=now, quarantined_at__isnull=True), clock_from(now)
    claimed = Sandbox.objects.filter(is_due, pk=pk, state=DESTROYING).update(
        deadline_at=now + DESTROY_CLAIM_TIMEOUT, claimed_by=settings.INSTANCE
    )
    if not claimed:
        return False
    sandbox = Sandbox.objects.get(pk=pk)
    checkpoint("destroy claimed", sandbox)
    provider = providers.get_provider(sandbox.provider)
    try:
        with suppress(Missing):  # the process is gone; its volumes may still exist
            data_sync.persist_final(sandbox, provider, now=now)
        readings.record_final_reading(sandbox, provider, now=clock())
        provider.destroy(sandbox.ref)
    except Missing:
        pass  # already gone
    except (ProviderError, StoreError) as failed:
        _postpone_destroy(sandbox, failed, now=now)
        return False
    mounts.detach(pk)
    checkpoint("destroy answered", sandbox)
    confirmed_at = clock()
    with transaction.atomic():
        destroyed = advance(
            pk, DESTROYING, DESTROYED, now=confirmed_at, code=TransitionReason.CONFIRMED_GONE, actor=actor,
            destroyed_at=confirmed_at, deadline_at=None, last_error="",
        )  # fmt: skip
        if destroyed:
            release_place(sandbox)
    return destroyed


def retry_destroy(pk: uuid.UUID, *, now: datetime, actor: str = "") -> bool:
    """Take a sandbox out of quarantine and reset its tries. The next sweep tries to destroy the sandbox.

    Returns False if the sandbox is not in quarantine."""
    resumed = Sandbox.objects.filter(pk=pk, state=DESTROYING, quarantined_at__isnull=False).update(
        quarantined_at=None, tries=0, deadline_at=now
    )
    if resumed:
        log.info("destroy retried", sandbox=str(pk), actor=actor)
    return bool(resumed)


def _postpone_destroy(sandbox: Sandbox, failed: Exception, *, now: datetime) -> None:
    tries = sandbox.tries + 1
    quarantined = tries >= settings.DESTROY_TRIES
    with transaction.atomic():
        recorded = Sandbox.objects.filter(pk=sandbox.pk, state=DESTROYING, quarantined_at__isnull=True).update(
            tries=tries,
            deadline_at=now + compute_backoff(tries),
            last_error=str(failed)[:2000],
            quarantined_at=now if quarantined else None,
        )
        if recorded and quarantined:
            _enqueue_quarantine_event(sandbox, tries, now)
    log.error("destroy failed", sandbox=str(sandbox.pk), tries=tries, quarantined=quarantined, error=str(failed))


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
