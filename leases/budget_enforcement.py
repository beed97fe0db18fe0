"""Budgets that are spent: the leases in their scope are ended, once what is in their sandboxes is stored."""

from datetime import datetime
from uuid import UUID

import structlog
from django.db import transaction

from billing import budgets
from billing.models import Budget
from leases import leasing
from leases.models import Lease, Status
from sandboxes import eviction, pool, runs
from sandboxes.db.clock import ticking
from sandboxes.lifecycle import COLD, EVICTING, RUNNING, WARMING, step
from sandboxes.models import GONE, Run, Sandbox
from sandboxes.providers.base import ProviderError
from sandboxes.sweeps import BUDGET as LONGEST
from sandboxes.sweeps import Swept

log = structlog.get_logger(__name__)
REASON = "budget"


def enforce(*, now: datetime) -> Swept:
    """Work out what each budget has spent, and end the leases of the hard ones that are.

    A lease ends when its sandbox sleeps, so that nothing in it is lost. One that waits is put to sleep at once; what runs
    has until the end of the grace, then it is killed, and the sandbox put to sleep. What cannot be stored stays and is
    tried again, later each time. Each step is safe to repeat: the next pass goes on where this one stopped."""
    swept, later = Swept(), ticking(now)
    for number in Budget.objects.filter(active=True).order_by("pk").values_list("pk", flat=True):
        try:
            for said in budgets.settle(number, now=now):
                swept.note(f"budgets {said}")
        except Exception as failed:  # one budget must not keep the others from being enforced
            log.exception("budget not settled", budget=number)
            swept.failures.append(f"budget {number}: {failed}")
    until = later() + LONGEST  # from here on: many budgets take long, and must not keep leases from being ended
    for pk, budget in due(now=now).items():
        if later() > until:
            break
        try:
            swept.note(_enforce(pk, now=later()))
        except Exception as failed:
            log.exception("budget not enforced", lease=str(pk), budget=budget.pk)
            swept.failures.append(f"lease {pk}: {failed}")
    return swept


def due(*, now: datetime) -> dict[UUID, Budget]:
    """The active leases in scope of a hard budget that is spent, each with that whose grace ends first."""
    found: dict[UUID, Budget] = {}
    for budget in sorted(budgets.exhausted(now=now), key=budgets.grace_ends):
        for pk in budgets.open_tabs(budget, now=now).order_by("opened_at", "pk").values_list("pk", flat=True):
            found.setdefault(pk, budget)
    return found


def _enforce(pk: UUID, *, now: datetime) -> str:
    """Take one lease as far as it goes now; what came of it."""
    over = budgets.exhausted_for(pk, now=now)  # storing others took its time: it may have been raised, or have begun anew
    if not over:
        return "lost race"
    budget = min(over, key=budgets.grace_ends)
    later, sandbox = ticking(now), pool.of(pk)
    if sandbox and sandbox.state != COLD:
        if sandbox.lost_at:
            return "sandboxes lost"  # its lease ends by that: `reconcile`
        if sandbox.state in (WARMING, EVICTING):
            return "sandboxes on their way"  # somebody is at it, or `stalled` will be
        unused = sandbox.last_used_at < sandbox.state_since  # since then; else its next try is when it is idle
        if sandbox.tries and unused and sandbox.idle_at and sandbox.idle_at > now:
            return "sandboxes not stored yet"
        if sandbox.state == RUNNING:
            if now < budgets.grace_ends(budget):
                return "sandboxes running on"
            _stop(sandbox, now=now)
            step("budget stopped", sandbox)
        if not eviction.sleep(sandbox.pk, now=later(), reason="its budget is spent", actor="sweep"):
            return "sandboxes not stored yet"
        step("budget stored", sandbox)
    return "leases ended" if _end(pk, budget, now=later()) else "lost race"


def _stop(sandbox: Sandbox, *, now: datetime) -> None:
    """Kill what runs in it, and close its Runs: whoever waits for one learns that its lease has ended."""
    for run in Run.objects.filter(sandbox=sandbox, ended_at__isnull=True).select_related("sandbox"):
        try:
            runs.interrupt(run, why="Killed: a budget of its lease is spent, and so is the grace.", now=now, actor="sweep")
        except ProviderError as failed:  # it runs still, so the sandbox does not sleep, and the next pass tries again
            log.warning("run not killed", run=str(run.pk), error=str(failed))


def _end(pk: UUID, budget: Budget, *, now: datetime) -> bool:
    """End a lease whose sandbox sleeps. False if that woke, or if no budget is spent that is for it any more."""
    with transaction.atomic(durable=True):
        # Whoever gives it a sandbox locks this row, too; one that is there is locked against being woken.
        lease = Lease.objects.select_for_update(no_key=True, of=("self",)).filter(pk=pk, status=Status.ACTIVE).first()
        if lease is None:
            return False
        held = Sandbox.objects.select_for_update(no_key=True, of=("self",)).filter(holder=pk).exclude(state__in=GONE)
        if any(sandbox.state != COLD for sandbox in held) or not budgets.exhausted_for(pk, now=now):
            return False
        over = leasing.why_elapsed(lease, now)  # then it ended by that, whatever came after
        ended = leasing.end(pk, reason=over or REASON, now=now, actor="sweep", why="" if over else str(budget))
        step("budget ended", pk)
    return ended
