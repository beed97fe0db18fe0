"""Sweeps over leases: expire, reclaim, reconcile, recover, measure and prune. Each can run in several processes at once."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import BigIntegerField, Exists, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Cast

from leases import leasing, turns
from leases.agent_runs import lifecycle
from leases.environments import lifecycle as environments
from leases.models import IdempotentRequest, Lease, LeaseEvent, LeaseStatus
from leases.queue.models import QueuedRun, QueuedRunState
from sandboxes import audit, process_ends, process_restarts
from sandboxes.claims import note_progress
from sandboxes.egress import settlement
from sandboxes.egress.allow_list import connections
from sandboxes.hosts import queues, registry
from sandboxes.models import ALIVE_STATES, GONE_STATES, Host, Process, Sandbox, SandboxState, Snapshot
from sandboxes.pool import intervals
from sandboxes.state import pruning, uploads, workspace
from sandboxes.stores import lease_stores
from sandboxes.sweep_log import SweepResult
from sandboxes.sweeps import lost_hosts, measurements, passes, reconciliation
from sandboxes.templates import builds

WORKSPACE_OVER_LIMIT_EVENT = "workspace_over_limit"  # LeaseEvent.kind
WORKSPACE_WARNING_INTERVAL = timedelta(days=1)


def expire_due_leases(*, now: datetime, limit: int = 500) -> SweepResult:
    """End active leases whose TTL or max TTL has elapsed."""
    result = SweepResult()
    for lease in find_elapsed_leases(now=now)[:limit]:
        with result.catching(f"lease {lease.pk}"):
            reason = leasing.find_elapsed_clock(lease, now)
            result.note("expired" if _end_if_elapsed(lease, reason, now) else "lost race")
    with result.catching("unused environments"):
        result.note("unused environments ended", environments.end_unused(now=now))
    return result


def find_elapsed_leases(*, now: datetime) -> QuerySet[Lease]:
    """Active leases whose TTL or max TTL has elapsed, the longest overdue first."""
    due = Lease.objects.filter(status=LeaseStatus.ACTIVE, expires_minute__lte=leasing.to_epoch_minute(now), expires_at__lte=now)
    return due.order_by("expires_minute")


def _end_if_elapsed(lease: Lease, reason: str, now: datetime) -> bool:
    with transaction.atomic():
        # The lease may have been renewed since the SELECT: the guard repeats the reason under the row's lock.
        due = Lease.objects.select_for_update(no_key=True).filter(pk=lease.pk, status=LeaseStatus.ACTIVE, expires_at__lte=now)
        return due.exists() and leasing.end(lease.pk, reason=reason, now=now, actor="sweep")


def reconcile(*, now: datetime, grace: timedelta) -> SweepResult:
    """Compare the rows with the sandboxes that providers list, and end the leases whose sandbox was lost."""
    result = reconciliation.reconcile(now=now, grace=grace)
    result.note("leases ended as lost", end_lost_leases(now=now))
    return result


def end_lost_leases(*, now: datetime) -> int:
    """End every active lease whose sandbox the provider has lost, and return how many.

    The lease does not continue in a new sandbox: an agent could not tell that its unsaved state is gone."""
    return sum(leasing.end(lease.pk, reason="lost", now=now, actor="sweep") for lease in find_lost_leases())


def declare_host_lost(host: Host, *, now: datetime, actor: audit.Actor) -> bool:
    """Declare a host lost: end the leases of its sandboxes as lost, and release their places.

    Return False if the host was already lost. After a crash in between, the `stalled` sweep of any host continues."""
    declared = lost_hosts.declare_lost(host, now=now, actor=actor)
    if declared:
        release_lost_hosts(now=now, actor=actor)
    return declared


def release_lost_hosts(*, now: datetime, actor: str = "sweep") -> int:
    """End the leases of sandboxes on lost hosts, and release the sandboxes. Return the number of sandboxes. Idempotent."""
    if not Host.objects.filter(lost_at__isnull=False).exists():
        return 0
    lost_hosts.mark_sandboxes_lost(now=now)
    end_lost_leases(now=now)
    return lost_hosts.release_sandboxes(now=now, actor=actor)


def find_lost_leases() -> QuerySet[Lease]:
    """Active leases whose sandbox the provider has lost."""
    gone = Sandbox.objects.filter(lost_at__isnull=False).exclude(state__in=GONE_STATES)
    return Lease.objects.filter(status=LeaseStatus.ACTIVE, pk__in=gone.values("holder"))


def reclaim(*, now: datetime, limit: int = 200) -> SweepResult:
    """Destroy sandboxes that are due, then mark ended leases without a sandbox as destroyed."""
    result = passes.destroy_due(now=now, limit=limit)
    for pk in find_leases_to_close().values_list("pk", flat=True)[: limit * 5]:
        with result.catching(f"lease {pk}"):
            result.note("leases closed", mark_destroyed(pk, now=now, actor="sweep"))
    return result


def mark_destroyed(pk: UUID, *, now: datetime, actor: str = "") -> bool:
    """Mark an ended lease destroyed. Return False if one of its sandboxes remains, or if it was already marked."""
    with transaction.atomic():
        closed = find_leases_to_close().filter(pk=pk).order_by().update(status=LeaseStatus.DESTROYED, destroyed_at=now)
        if closed:
            LeaseEvent.objects.create(lease_id=pk, at=now, kind="destroyed", actor=actor)
    return bool(closed)


def find_leases_to_close() -> QuerySet[Lease]:
    """Ended leases without a remaining sandbox, the earliest ended first."""
    remaining = Sandbox.objects.filter(holder=OuterRef("pk")).exclude(state=SandboxState.DESTROYED)
    return Lease.objects.filter(~Exists(remaining), status=LeaseStatus.EXPIRED).order_by("ended_at")


def destroy_cold(*, now: datetime, limit: int = 500) -> SweepResult:
    """Destroy cold sandboxes past their TTL, and delete snapshots of leases that ended before the retention period."""
    result = passes.expire_cold(now=now, limit=limit)
    for snapshot in find_expired_snapshots(now=now)[:limit]:
        with result.catching(f"snapshot {snapshot.pk}"):
            workspace.forget(snapshot, now=now)
            result.note("stored copies removed")
    return result


def find_expired_snapshots(*, now: datetime) -> QuerySet[Snapshot]:
    """Snapshots whose lease ended at least LEASEHOLD_KEEP_STATE ago."""
    ended_long_ago = Lease.objects.filter(pk=OuterRef("holder"), ended_at__lte=now - settings.KEEP_STATE)
    return Snapshot.objects.filter(Exists(ended_long_ago), forgotten_at__isnull=True).order_by("at")


def raise_intervals(*, now: datetime) -> SweepResult:
    """Copy the latest ends of leases to their sandboxes, and raise the vendors' intervals that are too short for them."""
    copied = copy_lease_ends()
    result = intervals.raise_all_short(now=now)
    result.note("ends of leases copied", copied)
    return result


def copy_lease_ends() -> int:
    """Copy the latest ends of active leases to their sandboxes, at vendors whose intervals depend on them.

    Return how many sandboxes had another one."""
    leases = Lease.objects.filter(pk=OuterRef("holder"), status=LeaseStatus.ACTIVE)
    outdated = Sandbox.objects.filter(
        ~Exists(leases.filter(max_expires_at=OuterRef("held_until"))), Exists(leases), state__in=ALIVE_STATES,
        provider__in=intervals.find_settable_providers(),
    )  # fmt: skip
    return outdated.update(held_until=Subquery(leases.values("max_expires_at")[:1]))


def recover_stalled(*, now: datetime, limit: int = 200) -> SweepResult:
    """Recover work whose process died: transitions, runs, turns, model calls and template builds past their deadline.

    Also closes the rows of ended processes. An error in one step does not prevent the others."""
    result = SweepResult()
    steps: dict[str, Callable[[], SweepResult | int]] = {
        "stalled work": lambda: passes.recover_stalled(now=now, limit=limit),
        "ended processes": lambda: process_ends.close_ended(now=now),
        "restarts": lambda: process_restarts.restart_due(now=now),
        "restarts of ended leases given up": forget_restarts_of_ended_leases,
        "sandboxes of lost hosts released": lambda: release_lost_hosts(now=now),
        "turns": lambda: turns.settle_overdue_turns(now=now, limit=limit),
        "agent runs": lambda: lifecycle.record_abandoned(now=now, limit=limit),
        "model calls closed": lambda: settlement.close_abandoned(now=now, limit=limit),
        "connections closed": lambda: connections.close_abandoned(now=now, limit=limit),
        "template builds": lambda: requeue_template_builds(now=now),
    }
    for name, act in steps.items():
        note_progress()
        with result.catching(name):
            outcome = act()
            if isinstance(outcome, SweepResult):
                result.add(outcome)
            else:
                result.note(name, outcome)
    return result


def requeue_template_builds(*, now: datetime) -> SweepResult:
    """Queue overdue builds of image templates again. A build takes longer than a sweep may."""
    result, released = builds.release_due(now=now)
    for template in released:
        queues.enqueue("leases.tasks.build_template", str(template.pk), group="build_template", host=template.host)
    return result


def forget_restarts_of_ended_leases() -> int:
    """Delete the encrypted variables of processes whose lease has ended. Return the number of changed processes."""
    ended = Lease.objects.filter(pk=OuterRef("holder")).exclude(status=LeaseStatus.ACTIVE)
    return process_restarts.forget_restarts(Process.objects.filter(Exists(ended)))


def measure_workspaces(*, now: datetime) -> SweepResult:
    """Measure workspaces and record a warning on each lease whose workspace exceeds its pool's limit.

    The next exec in such a sandbox is refused. The warning is repeated once a day. Cold sandboxes are included,
    since eviction also measures the workspace."""
    result = measurements.measure_workspaces(now=now)
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
                result.note("leases warned")
    return result


def find_oversized_sandboxes() -> QuerySet[Sandbox]:
    """Held sandboxes whose workspace exceeded their pool's limit when last measured."""
    live = Sandbox.objects.exclude(state__in=GONE_STATES).filter(holder__isnull=False).select_related("pool")
    limit = Cast("pool__workspace_limit_mib", BigIntegerField()) * (1 << 20)
    return live.filter(workspace_bytes__gt=limit).order_by("pk")


def _format_oversize_reason(sandbox: Sandbox) -> str:
    return f"/workspace uses {(sandbox.workspace_bytes or 0) >> 20} MiB of {sandbox.pool.workspace_limit_mib} MiB."


def release_instance(instance: str, *, now: datetime) -> int:
    """Make the work of a dead instance due now, unfinished requests with an Idempotency-Key included.

    Return the number of rows. The conditions and errors of `sandboxes.sweeps.passes.release_instance` apply."""
    released = passes.release_instance(instance, now=now)
    runners = Q(runner__startswith=f"{instance}:") | Q(runner__startswith=f"{instance}.")
    released += QueuedRun.objects.filter(runners, state=QueuedRunState.STARTED).update(runner_deadline=now)
    claimed = Q(claimed_by=instance) | Q(claimed_by__startswith=f"{instance}.")
    return released + IdempotentRequest.objects.filter(claimed, status_code=None, deadline_at__gt=now).update(deadline_at=now)


def end_all_leases(*, now: datetime, detail: str, actor: str = "") -> int:
    """End every active lease with the reason "operator", except those of sandboxes on other hosts. Return how many."""
    elsewhere = Sandbox.objects.filter(~registry.filter_local(), holder=OuterRef("pk"), host__isnull=False)
    elsewhere = elsewhere.exclude(state__in=(SandboxState.COLD, *GONE_STATES))
    active = Lease.objects.filter(~Exists(elsewhere), status=LeaseStatus.ACTIVE).values_list("pk", flat=True)
    return sum(leasing.end(pk, reason="operator", now=now, actor=actor, detail=detail) for pk in list(active))


def prune(*, now: datetime) -> SweepResult:
    """Delete unreferenced objects and entries past their retention from the store."""
    result = pruning.remove_orphans(now=now)
    result.add(prune_stores(now=now))
    return result


def prune_stores(*, now: datetime) -> SweepResult:
    """Delete chat histories, artifacts, audit logs and sessions of leases that ended before the retention period.

    A lease without a row has ended longer ago. Of other leases, the oldest entries above the limits are deleted."""

    def find_long_ended(holders: Sequence[UUID]) -> set[UUID]:
        kept = Lease.objects.filter(Q(ended_at__isnull=True) | Q(ended_at__gt=now - settings.KEEP_STATE), pk__in=holders)
        return {*holders} - {*kept.values_list("pk", flat=True)}

    pruned = lease_stores.prune_stores(now=now, find_ended=find_long_ended, claims=uploads.ContentUploads(lambda: now))
    result = SweepResult(failures=pruned.failures)
    result.note("stored entries removed", pruned.count)
    result.note("bytes with them", pruned.size)
    return result
