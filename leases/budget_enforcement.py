"""Budgets that are spent: the leases in their scope are ended, once what is in their sandboxes is stored."""

from datetime import datetime
from uuid import UUID

import structlog
from django.db import transaction

from billing import budgets
from billing.models import Budget
from leases import leasing
from leases.models import Lease, LeaseStatus
from sandboxes import eviction, pool, runs
from sandboxes.db.clock import clock_from
from sandboxes.lifecycle import COLD, EVICTING, RUNNING, WARMING, checkpoint
from sandboxes.models import GONE_STATES, Run, Sandbox, TransitionReason
from sandboxes.providers.base import ProviderError
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult

log = structlog.get_logger(__name__)
END_REASON = "budget"


def enforce_budgets(*, now: datetime) -> SweepResult:
    """Work out what each budget has spent, and end the leases of the hard ones that are.

    A lease ends when its sandbox sleeps, so that nothing in it is lost. One that waits is put to sleep at once; what runs
    has until the end of the grace, then it is killed, and the sandbox put to sleep. What cannot be stored stays and is
    tried again, later each time. Each step is safe to repeat: the next pass goes on where this one stopped."""
    swept, later = SweepResult(), clock_from(now)
    for number in Budget.objects.filter(active=True).order_by("pk").values_list("pk", flat=True):
        try:
            for said in budgets.update_spending(number, now=now):
                swept.note(f"budgets {said}")
        except Exception as failed:  # one budget must not keep the others from being enforced
            log.exception("budget not settled", budget=number)
            swept.failures.append(f"budget {number}: {failed}")
    until = later() + PASS_TIME_LIMIT  # from here on: many budgets take long, and must not keep leases from being ended
    for pk, budget in find_leases_over_budget(now=now).items():
        if later() > until:
            break
        try:
            swept.note(_enforce_on_lease(pk, now=later()))
        except Exception as failed:
            log.exception("budget not enforced", lease=str(pk), budget=budget.pk)
            swept.failures.append(f"lease {pk}: {failed}")
    return swept


def find_leases_over_budget(*, now: datetime) -> dict[UUID, Budget]:
    """The active leases in scope of a hard budget that is spent, each with that whose grace ends first."""
    found: dict[UUID, Budget] = {}
    for budget in sorted(budgets.find_exhausted(now=now), key=budgets.get_grace_deadline):
        for pk in budgets.find_open_tabs(budget, now=now).order_by("opened_at", "pk").values_list("pk", flat=True):
            found.setdefault(pk, budget)
    return found


def _enforce_on_lease(pk: UUID, *, now: datetime) -> str:
    """Take one lease as far as it goes now; what came of it."""
    over = budgets.find_exhausted_for_lease(
        pk, now=now
    )  # storing others took its time: it may have been raised, or have begun anew
    if not over:
        return "lost race"
    budget = min(over, key=budgets.get_grace_deadline)
    later, sandbox = clock_from(now), pool.find_by_holder(pk)
    if sandbox and sandbox.state != COLD:
        if sandbox.lost_at:
            return "sandboxes lost"  # its lease ends by that: `reconcile`
        if sandbox.state in (WARMING, EVICTING):
            return "sandboxes on their way"  # somebody is at it, or `stalled` will be
        unused = sandbox.last_used_at < sandbox.state_since  # since then; else its next try is when it is idle
        if sandbox.tries and unused and sandbox.idle_at and sandbox.idle_at > now:
            return "sandboxes not stored yet"
        if sandbox.state == RUNNING:
            if now < budgets.get_grace_deadline(budget):
                return "sandboxes running on"
            _kill_runs(sandbox, now=now)
            checkpoint("budget stopped", sandbox)
        if not eviction.evict(sandbox.pk, now=later(), code=TransitionReason.BUDGET, actor="sweep"):
            return "sandboxes not stored yet"
        checkpoint("budget stored", sandbox)
    return "leases ended" if _end_lease(pk, budget, now=later()) else "lost race"


def _kill_runs(sandbox: Sandbox, *, now: datetime) -> None:
    """Kill what runs in it, and close its Runs: whoever waits for one learns that its lease has ended."""
    for run in Run.objects.filter(sandbox=sandbox, ended_at__isnull=True).select_related("sandbox"):
        try:
            runs.interrupt_run(run, why="Killed: a budget of its lease is spent, and so is the grace.", now=now, actor="sweep")
        except ProviderError as failed:  # it runs still, so the sandbox does not sleep, and the next pass tries again
            log.warning("run not killed", run=str(run.pk), error=str(failed))


def _end_lease(pk: UUID, budget: Budget, *, now: datetime) -> bool:
    """End a lease whose sandbox sleeps. False if that woke, or if no budget is spent that is for it any more."""
    with transaction.atomic(durable=True):
        # Whoever gives it a sandbox locks this row, too; one that is there is locked against being woken.
        lease = Lease.objects.select_for_update(no_key=True, of=("self",)).filter(pk=pk, status=LeaseStatus.ACTIVE).first()
        if lease is None:
            return False
        held = Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(holder=pk).exclude(state__in=GONE_STATES)
        if any(sandbox.state != COLD for sandbox in held) or not budgets.find_exhausted_for_lease(pk, now=now):
            return False
        over = leasing.find_elapsed_clock(lease, now)  # then it ended by that, whatever came after
        ended = leasing.end(pk, reason=over or END_REASON, now=now, actor="sweep", why="" if over else str(budget))
        checkpoint("budget ended", pk)
    return ended
