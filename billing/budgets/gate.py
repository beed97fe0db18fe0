"""Budget gate"""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.conf import settings
from django.db.models import Q

from billing.budgets.periods import get_grace_deadline, get_period_bounds, get_spent, is_exhausted
from billing.budgets.scopes import build_lease_filter, find_open_tabs
from billing.budgets.spending import to_hours
from billing.dates import EPOCH
from billing.errors import BudgetExhausted
from billing.models import Budget, Tab
from billing.models.budgets import Unit
from billing.pricing import format_decimal
from sandboxes.db import sql

EXHAUSTED_SQL = "exhausted_at IS NOT NULL AND active AND hard"  # as the condition of its index
EXHAUSTED_FOR_LEASE_SQL = (
    f"{EXHAUSTED_SQL} AND (scope IN ('all', 'account') OR subject IN (%s, %s, %s))"  # for a lease, by whatever scope
)


def open_tab(holder: UUID, *, agent_did: str, environment_type: str, key_id: str, now: datetime) -> None:
    """Count a new lease against its budgets, or BudgetExhausted. Call it in the transaction that grants the lease.

    Its hard budgets stay locked until that ends, so whoever is granted another one counts this one. Without any there is
    no lock."""
    for_it = build_lease_filter(agent_did=agent_did, environment_type=environment_type, key_id=key_id, now=now)
    hard = Budget.objects.select_for_update(no_key=True, of=("self",)).filter(for_it, active=True, hard=True).order_by("pk")
    others = {budget: find_open_tabs(budget, now=now).count() for budget in hard}
    full = {budget: number for budget, number in others.items() if not _has_room(budget, number, now=now)}
    if full:
        raise _build_refusal(full, now=now)
    sql.insert(
        Tab(holder=holder, agent_did=agent_did, environment_type=environment_type, key_id=key_id, opened_at=now)
    )  # fmt: skip


def _has_room(budget: Budget, others: int, *, now: datetime) -> bool:
    """For one lease more than those."""
    spent = get_spent(budget, now)
    return spent < budget.amount and spent + (others + 1) * get_minimum_reservation(budget.unit) <= budget.amount


def close_tab(holder: UUID, *, now: datetime) -> None:
    """A lease's reservation ends. Call it in the transaction that ends the lease."""
    sql.update(Tab, "closed_at = %s WHERE holder = %s AND closed_at IS NULL", now, holder)


def require_budget(holder: UUID, *, now: datetime, after_grace: bool = False) -> None:
    """BudgetExhausted while a hard budget is spent that is for this lease; `graceful`: only once the grace of one is over.
    One look at an index where there is none."""
    over = find_exhausted_for_lease(holder, now=now)
    if after_grace:
        over = [each for each in over if now >= get_grace_deadline(each)]
    if over:
        raise _build_refusal(dict.fromkeys(over, 0), now=now)


def find_exhausted_for_lease(holder: UUID, *, now: datetime) -> list[Budget]:
    """The hard budgets that are spent and for this lease."""
    if sql.find_first(Budget, EXHAUSTED_SQL) is None:
        return []
    tab = sql.find_first(Tab, "holder = %s", holder)
    if tab is None or sql.find_first(Budget, EXHAUSTED_FOR_LEASE_SQL, tab.agent_did, tab.environment_type, tab.key_id) is None:
        return []
    for_it = build_lease_filter(agent_did=tab.agent_did, environment_type=tab.environment_type, key_id=tab.key_id, now=now)
    return find_exhausted(now=now, of=for_it)


def find_exhausted(*, now: datetime, of: Q | None = None) -> list[Budget]:
    """The hard budgets that are spent. One whose period is over, or whose amount was raised since, is not: that counts from
    the moment it happens, not from when a sweep has written so."""
    marked = Budget.objects.filter(of or Q(), exhausted_at__isnull=False, active=True, hard=True).order_by("pk")
    return [each for each in marked if is_exhausted(each, now)]


def get_minimum_reservation(unit: str) -> Decimal:
    """What each active lease has reserved: the least that one costs."""
    return to_hours(settings.MINIMUM_TIME) if unit == Unit.HOURS else settings.MINIMUM_USD


def _build_refusal(full: dict[Budget, int], *, now: datetime) -> BudgetExhausted:
    """The error for these budgets, each with how many active leases have something reserved in it. It names the strictest:
    that which refuses for the longest time, and of those the one that is spent the furthest."""

    def strictness(budget: Budget) -> tuple[bool, datetime, Decimal]:
        ends = get_period_bounds(budget.period, now)[1]
        return ends is None, ends or EPOCH, get_spent(budget, now) / budget.amount

    budget = max(full, key=strictness)
    spent, kept, ends = (
        get_spent(budget, now),
        full[budget] * get_minimum_reservation(budget.unit),
        get_period_bounds(budget.period, now)[1],
    )
    said = [f"There is a budget of {budget}: {format_decimal(spent)} are spent"]
    said.append(f", and active leases keep {format_decimal(round(kept, 6))} more." if spent < budget.amount and kept else ".")
    said.append(f" It begins anew at {ends:%Y-%m-%d %H:%M} UTC." if ends else " It does not begin anew by itself.")
    return BudgetExhausted(
        "".join(said), spent=format_decimal(spent), limit=format_decimal(budget.amount), unit=budget.unit, resets_at=ends
    )  # fmt: skip
