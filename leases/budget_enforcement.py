"""Enforcement of exhausted hard budgets: store the sandboxes in their scope, then end the leases."""

from datetime import datetime
from uuid import UUID

import structlog
from django.db import transaction

from billing import budgets
from billing.models import Budget
from leases import leasing
from leases.models import Lease, LeaseStatus
from sandboxes import eviction
from sandboxes.db.clock import clock_from
from sandboxes.hosts import registry
from sandboxes.lifecycle import COLD, EVICTING, RUNNING, WARMING, checkpoint
from sandboxes.models import GONE_STATES, Run, Sandbox, StopReason, TransitionReason
from sandboxes.pool import allocation
from sandboxes.providers.errors import ProviderError
from sandboxes.runs import abandoned
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
END_REASON = "budget"


def enforce_budgets(*, now: datetime) -> SweepResult:
    """Total the spending of each active budget and end the leases in scope of exhausted hard budgets.

    1. A waiting sandbox is evicted at once, so that its state is stored.
    2. A running sandbox is left until the end of the budget's grace period, then its runs are killed and it is evicted.
    3. The lease ends once its sandbox is cold or does not exist.

    From the end of the grace period on the egress proxy refuses model calls, also of programs that cannot be stopped yet.
    A sandbox whose state cannot be stored is kept and retried with backoff. Every step is idempotent: the next pass continues
    where this one stopped."""
    result, clock = SweepResult(), clock_from(now)
    for budget_id in Budget.objects.filter(active=True).order_by("pk").values_list("pk", flat=True):
        try:
            for change in budgets.update_spending(budget_id, now=now):
                result.note(f"budgets {change}")
        except Exception as failed:  # one budget must not keep the others from being enforced
            log.exception("budget not settled", budget=budget_id)
            result.failures.append(f"budget {budget_id}: {failed}")
    try:
        budgets.update_call_blocks(now=clock())
    except Exception as failed:  # the leases over budget are ended all the same
        log.exception("model calls not blocked")
        result.failures.append(f"model calls: {failed}")
    deadline = clock() + PASS_TIME_LIMIT  # counted from here: totalling many budgets must not use up the time for ending leases
    for pk, budget in find_leases_over_budget(now=now).items():
        if clock() > deadline:
            break
        try:
            result.note(_enforce_on_lease(pk, now=clock()))
        except Exception as failed:
            log.exception("budget not enforced", lease=str(pk), budget=budget.pk)
            result.failures.append(f"lease {pk}: {failed}")
    return result


def find_leases_over_budget(*, now: datetime) -> dict[UUID, Budget]:
    """Active leases in scope of an exhausted hard budget, each with the budget whose grace period ends first."""
    leases: dict[UUID, Budget] = {}
    for budget in sorted(budgets.find_exhausted(now=now), key=budgets.get_grace_deadline):
        for pk in budgets.find_open_tabs(budget, now=now).order_by("opened_at", "pk").values_list("pk", flat=True):
            leases.setdefault(pk, budget)
    return leases


def _enforce_on_lease(pk: UUID, *, now: datetime) -> str:
    """Advance the end of one lease as far as possible now. Return the outcome for the sweep's counts."""
    # Read again: since the first query the budget may have been raised or its period may have restarted.
    exhausted = budgets.find_exhausted_for_lease(pk, now=now)
    if not exhausted:
        return "lost race"
    budget = min(exhausted, key=budgets.get_grace_deadline)
    clock, sandbox = clock_from(now), allocation.find_by_holder(pk)
    if sandbox and sandbox.state != COLD:
        if not registry.is_local(sandbox):
            return "sandboxes left to their hosts"  # each host runs this sweep
        if sandbox.lost_at:
            return "sandboxes lost"  # the `reconcile` sweep ends its lease
        if sandbox.state in (WARMING, EVICTING):
            return "sandboxes in transition"  # its worker finishes the transition, or the `stalled` sweep does
        # After a failed attempt idle_at is the time of the next one. A run resets the count of failures.
        if sandbox.persist_failures and sandbox.idle_at and sandbox.idle_at > now:
            return "sandboxes not stored yet"
        if sandbox.state == RUNNING:
            if now < budgets.get_grace_deadline(budget):
                return "sandboxes in grace period"
            _kill_runs(sandbox, now=now)
            checkpoint("budget stopped", sandbox)
        if not eviction.evict(sandbox.pk, now=clock(), code=TransitionReason.BUDGET, actor="sweep"):
            return "sandboxes not stored yet"
        checkpoint("budget stored", sandbox)
    return "leases ended" if _end_lease(pk, _describe_exhaustion(budget, now=now), now=clock()) else "lost race"


def _describe_exhaustion(budget: Budget, *, now: datetime) -> str:
    """Describe the budget, and the time within which it would be exceeded if its amount is not spent yet."""
    if budgets.get_spent(budget, now) >= budgets.get_limit(budget, now):
        return str(budget)
    minutes = budgets.get_stop_delay(budget).total_seconds() / 60
    within = "the next minute" if minutes == 1 else f"the next {minutes:g} minutes"
    return f"{budget}: would be exceeded within {within}"


def _kill_runs(sandbox: Sandbox, *, now: datetime) -> None:
    """Kill the open runs of a sandbox and close their rows. A waiting caller receives the error of an ended lease."""
    for run in Run.objects.filter(sandbox=sandbox, ended_at__isnull=True).select_related("sandbox"):
        try:
            abandoned.interrupt_run(
                run,
                note="Killed: a budget of the lease is exhausted and its grace period is over.",
                stop_reason=StopReason.BUDGET,
                now=now,
                actor="sweep",
            )
        except ProviderError as failed:  # the sandbox stays running and the next pass retries
            log.warning("run not killed", run=str(run.pk), error=str(failed))


def _end_lease(pk: UUID, detail: str, *, now: datetime) -> bool:
    """End a lease whose sandbox is cold or gone. Return False if the sandbox woke or no budget in scope is exhausted."""
    with transaction.atomic(durable=True):
        # A claim of a sandbox locks the lease's row, too. The sandbox's own row is locked against a wake.
        lease = Lease.objects.select_for_update(no_key=True, of=("self",)).filter(pk=pk, status=LeaseStatus.ACTIVE).first()
        if lease is None:
            return False
        sandboxes = (
            Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(holder=pk).exclude(state__in=GONE_STATES)
        )
        if any(sandbox.state != COLD for sandbox in sandboxes) or not budgets.find_exhausted_for_lease(pk, now=now):
            return False
        elapsed = leasing.find_elapsed_clock(lease, now)  # an elapsed clock is the earlier reason
        ended = leasing.end(pk, reason=elapsed or END_REASON, now=now, actor="sweep", detail="" if elapsed else detail)
        checkpoint("budget ended", pk)
    return ended
