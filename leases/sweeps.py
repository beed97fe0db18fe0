"""Many leases at once: end what is over, and see to it that nothing is left of what has ended."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import BigIntegerField, Exists, OuterRef, QuerySet
from django.db.models.functions import Cast

from leases import leasing, turns
from leases.models import IdempotentRequest, Lease, LeaseEvent, LeaseStatus
from sandboxes import processes
from sandboxes import sweeps as below
from sandboxes.egress import authorization
from sandboxes.identity import signing
from sandboxes.models import GONE_STATES, Sandbox, SandboxState, Snapshot
from sandboxes.state import pruning, workspace
from sandboxes.stores import lease_stores
from sandboxes.sweeps import SweepResult
from sandboxes.webhooks import outbox

WORKSPACE_OVER_LIMIT_EVENT = "workspace_over_limit"  # the kind of an event
WORKSPACE_WARNING_INTERVAL = timedelta(days=1)


def expire_due_leases(*, now: datetime, limit: int = 500) -> SweepResult:
    """End active leases whose clock has run out."""
    swept = SweepResult()
    for lease in find_elapsed_leases(now=now)[:limit]:
        reason = leasing.find_elapsed_clock(lease, now)
        swept.note("expired" if _end_if_elapsed(lease, reason, now) else "lost race")
    return swept


def find_elapsed_leases(*, now: datetime) -> QuerySet[Lease]:
    """Active leases whose clock has run out."""
    due = Lease.objects.filter(status=LeaseStatus.ACTIVE, expires_minute__lte=leasing.to_epoch_minute(now), expires_at__lte=now)
    return due.order_by("expires_minute")


def _end_if_elapsed(lease: Lease, reason: str, now: datetime) -> bool:
    with transaction.atomic():
        # Renewed since we looked? The guard repeats why it was due, under the row's lock.
        due = Lease.objects.select_for_update(no_key=True).filter(pk=lease.pk, status=LeaseStatus.ACTIVE, expires_at__lte=now)
        return due.exists() and leasing.end(lease.pk, reason=reason, now=now, actor="sweep")


def end_leases_by_condition(
    environment_id: str, condition: str, *, now: datetime, agents: list[str] | None, actor: str = ""
) -> list[Lease]:
    """End every active lease in an environment that waits for this condition, in one transaction; of these agents only,
    or of all (None). What was ended; a repeat ends nothing."""
    with transaction.atomic(durable=True):
        active = (
            Lease.objects.select_for_update(no_key=True)
            .filter(environment_id=environment_id, status=LeaseStatus.ACTIVE, expires_at__gt=now)  # else its clock ended it
            .order_by("pk")
        )
        if agents is not None:
            active = active.filter(agent_did__in=agents)
        return [
            lease
            for lease in active
            if condition in lease.expiry_conditions
            and leasing.end(lease.pk, reason=f"condition:{condition}", now=now, actor=actor)
        ]


def reconcile(*, now: datetime, grace: timedelta) -> SweepResult:
    """Compare the rows with what providers list, and end the leases whose sandbox was lost."""
    swept = below.reconcile(now=now, grace=grace)
    swept.note("leases ended as lost", end_lost_leases(now=now))
    return swept


def end_lost_leases(*, now: datetime) -> int:
    """End every active lease whose sandbox the provider has lost: a new one must not pass for it; how many."""
    return sum(leasing.end(lease.pk, reason="lost", now=now, actor="sweep") for lease in find_lost_leases())


def find_lost_leases() -> QuerySet[Lease]:
    """Active leases whose sandbox the provider has lost."""
    gone = Sandbox.objects.filter(lost_at__isnull=False).exclude(state__in=GONE_STATES)
    return Lease.objects.filter(status=LeaseStatus.ACTIVE, pk__in=gone.values("holder"))


def reclaim(*, now: datetime, limit: int = 200) -> SweepResult:
    """Destroy what was given up, then mark ended leases destroyed: those of which no sandbox is left."""
    swept = below.destroy_due(now=now, limit=limit)
    for pk in find_leases_to_close().values_list("pk", flat=True)[: limit * 5]:
        swept.note("leases closed", mark_destroyed(pk, now=now, actor="sweep"))
    return swept


def mark_destroyed(pk: UUID, *, now: datetime, actor: str = "") -> bool:
    """Mark an ended lease destroyed, of which no sandbox is left. False if one is, or if it was done before."""
    with transaction.atomic():
        closed = find_leases_to_close().filter(pk=pk).order_by().update(status=LeaseStatus.DESTROYED, destroyed_at=now)
        if closed:
            LeaseEvent.objects.create(lease_id=pk, at=now, kind="destroyed", actor=actor)
    return bool(closed)


def find_leases_to_close() -> QuerySet[Lease]:
    """Ended leases of which no sandbox is left."""
    left = Sandbox.objects.filter(holder=OuterRef("pk")).exclude(state=SandboxState.DESTROYED)
    return Lease.objects.filter(~Exists(left), status=LeaseStatus.EXPIRED).order_by("ended_at")


def destroy_cold(*, now: datetime, limit: int = 500) -> SweepResult:
    """What sleeps for too long gives up its place and local files; what was stored for leases that ended long ago goes."""
    swept = below.expire_cold(now=now, limit=limit)
    for snapshot in find_expired_snapshots(now=now)[:limit]:
        workspace.forget(snapshot, now=now)
        swept.note("stored copies removed")
    return swept


def find_expired_snapshots(*, now: datetime) -> QuerySet[Snapshot]:
    """Stored copies whose lease ended long enough ago."""
    long_over = Lease.objects.filter(pk=OuterRef("holder"), ended_at__lte=now - settings.KEEP_STATE)
    return Snapshot.objects.filter(Exists(long_over), forgotten_at__isnull=True).order_by("at")


def recover_stalled(*, now: datetime, limit: int = 200) -> SweepResult:
    """What was left half done: in-flight sandboxes, open Runs and turns past their deadline, rows of processes that
    have ended, old stored answers."""
    swept = below.recover_stalled(now=now, limit=limit)
    settled = processes.close_ended(now=now)
    for what, times in settled.counts.items():
        swept.note(what, times)
    swept.failures += settled.failures
    swept.note("turns skipped", turns.settle_overdue_turns(now=now, limit=limit))
    swept.note("model calls closed", authorization.close_abandoned(now=now, limit=limit))
    swept.note("answers forgotten", find_expired_idempotent_requests(now=now).delete()[0])
    return swept


def measure_workspaces(*, now: datetime) -> SweepResult:
    """Measure workspaces, and warn the leases whose sandbox is over its pool's limit: its next exec is refused.

    Measuring is also part of falling asleep, so a sandbox that sleeps is warned about, too; once a day while it is over."""
    swept = below.measure_workspaces(now=now)
    for sandbox in find_oversized_sandboxes():
        assert sandbox.holder
        with transaction.atomic():
            locked = Lease.objects.select_for_update(no_key=True, of=("self",))
            lease = locked.filter(pk=sandbox.holder, status=LeaseStatus.ACTIVE).first()
            if (
                lease
                and not lease.events.filter(kind=WORKSPACE_OVER_LIMIT_EVENT, at__gt=now - WORKSPACE_WARNING_INTERVAL).exists()
            ):
                LeaseEvent.objects.create(
                    lease=lease, at=now, kind=WORKSPACE_OVER_LIMIT_EVENT, actor="sweep", reason=_format_oversize_reason(sandbox)
                )
                swept.note("leases warned")
    return swept


def find_oversized_sandboxes() -> QuerySet[Sandbox]:
    """Sandboxes whose workspace was larger than their pool allows when it was last measured."""
    live = Sandbox.objects.exclude(state__in=GONE_STATES).filter(holder__isnull=False).select_related("pool")
    limit = Cast("pool__workspace_limit_mib", BigIntegerField()) * (1 << 20)
    return live.filter(workspace_bytes__gt=limit).order_by("pk")


def _format_oversize_reason(sandbox: Sandbox) -> str:
    return f"/workspace has {(sandbox.workspace_bytes or 0) >> 20} MiB and may have {sandbox.pool.workspace_limit_mib}."


def find_expired_idempotent_requests(*, now: datetime) -> QuerySet[IdempotentRequest]:
    """Stored answers that were kept for long enough."""
    return IdempotentRequest.objects.filter(expires_at__lt=now)


def end_all_leases(*, now: datetime, why: str, actor: str = "") -> int:
    """End every active lease, for an operator; how many."""
    active = Lease.objects.filter(status=LeaseStatus.ACTIVE).values_list("pk", flat=True)
    return sum(leasing.end(pk, reason="operator", now=now, actor=actor, why=why) for pk in list(active))


def prune(*, now: datetime) -> SweepResult:
    """Remove from the store what nothing points to, and what is kept no longer."""
    swept, kept = pruning.remove_orphans(now=now), prune_stores(now=now)
    for what, times in kept.counts.items():
        swept.note(what, times)
    swept.failures += kept.failures
    swept.note("rows of old service tokens removed", signing.purge_old_tokens(now=now))
    swept.note("old events removed", outbox.purge_old_events(now=now))
    return swept


def prune_stores(*, now: datetime) -> SweepResult:
    """Chat histories, artifacts, audit logs and sessions go with the leases that ended long enough ago; of the others the
    oldest goes where there is more than is kept."""

    def over(some: Sequence[UUID]) -> set[UUID]:
        return set(Lease.objects.filter(pk__in=some, ended_at__lte=now - settings.KEEP_STATE).values_list("pk", flat=True))

    pruned = lease_stores.prune_stores(now=now, find_ended=over)
    swept = SweepResult(failures=pruned.failures)
    swept.note("stored entries removed", pruned.count)
    swept.note("bytes with them", pruned.size)
    return swept
