"""Admission control: reservations of hard budgets at a lease's grant, and refusal of work while a budget is exhausted."""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

from django.conf import settings
from django.db.models import Q

from billing.budgets.periods import get_grace_deadline, get_limit, get_spent
from billing.budgets.refusal import Shortage, build_refusal
from billing.budgets.reservation import Applicant, compute_reservation, get_stop_delay, is_exhausted, is_over
from billing.budgets.scopes import build_tab_filter, find_open_tabs
from billing.budgets.spending import to_hours
from billing.errors import BudgetExhausted
from billing.instance_types import SandboxSize
from billing.models import Budget, Tab
from billing.models.budgets import Unit
from billing.pricing import format_decimal
from sandboxes.db import sql

# Budgets for a model and in tokens refuse model calls alone.
LIMITS_LEASES_SQL = "active AND hard AND model = '' AND unit <> 'tokens'"
LIMITS_LEASES = Q(active=True, hard=True, model="", unit__in=[Unit.USD, Unit.HOURS])
EXHAUSTED_SQL = f"exhausted_at IS NOT NULL AND {LIMITS_LEASES_SQL}"  # implies the condition of the index budget_exhausted
ANY_EXHAUSTED_SQL = f"SELECT EXISTS (SELECT 1 FROM billing_budget WHERE {EXHAUSTED_SQL})"  # noqa: S608 - no user input
ANY_HARD_SQL = f"SELECT EXISTS (SELECT 1 FROM billing_budget WHERE {LIMITS_LEASES_SQL})"  # noqa: S608 - no user input
EXHAUSTED_FOR_LEASE_SQL = f"{EXHAUSTED_SQL} AND (scope IN ('all', 'account') OR subject IN (%s, %s, %s, %s))"


def lock_for_grant(tab: Tab, *, now: datetime) -> None:
    """Lock the hard budgets of a new lease, and check their room for its minimum. The caller inserts `tab` in the same
    transaction, which reserves the minimum.

    Raise BudgetExhausted if a hard budget has no room. The budgets stay locked until the transaction ends, so that concurrent
    grants count this lease. Needs no call while no hard budget exists (ANY_HARD_SQL)."""
    lease_filter = build_tab_filter(tab, now=now)
    hard = Budget.objects.select_for_update(no_key=True, of=("self",)).filter(lease_filter, LIMITS_LEASES).order_by("pk")
    active_leases = {budget: find_open_tabs(budget, now=now).count() for budget in hard}
    full_budgets = {
        budget: Shortage(get_spent(budget, now), _explain_reservation(number * get_minimum_reservation(budget.unit)))
        for budget, number in active_leases.items()
        if not _has_room(budget, number, now=now)
    }
    if full_budgets:
        raise build_refusal(full_budgets, now=now)


def _has_room(budget: Budget, active_leases: int, *, now: datetime) -> bool:
    """Return whether one more lease fits into the budget."""
    spent, limit = get_spent(budget, now), get_limit(budget, now)
    return spent < limit and spent + (active_leases + 1) * get_minimum_reservation(budget.unit) <= limit


def get_minimum_reservation(unit: str) -> Decimal:
    """Return the amount reserved for each active lease, in the budget's unit."""
    return to_hours(settings.MINIMUM_TIME) if unit == Unit.HOURS else settings.MINIMUM_USD


def close_tab(holder: UUID, *, now: datetime) -> None:
    """Release a lease's reservations. Idempotent. Call it in the transaction that ends the lease."""
    sql.update(Tab, "closed_at = %s WHERE holder = %s AND closed_at IS NULL", now, holder)


def require_budget(holder: UUID, *, now: datetime, after_grace: bool = False) -> None:
    """Raise BudgetExhausted if an exhausted hard budget applies to this lease.

    With `after_grace` only a budget whose grace period has ended counts. Without an exhausted budget the check is one lookup
    in an index."""
    exhausted = find_exhausted_for_lease(holder, now=now)
    if after_grace:
        exhausted = [budget for budget in exhausted if now >= get_grace_deadline(budget)]
    if exhausted:
        applicant = Applicant(holder)
        amounts = {budget: compute_reservation(budget, now=now, applicant=applicant) for budget in exhausted}
        raise _build_start_refusal(amounts, now=now)


def require_room(holder: UUID, *, size: SandboxSize | None = None, now: datetime) -> None:
    """Raise BudgetExhausted if a hard budget cannot pay a start of this lease's sandbox until it could be stopped again.

    `size` is that of a new sandbox, if the lease has none. Without a hard budget this is one query. Two concurrent starts may
    both find room: the check after the start, and the next pass, count both."""
    tab = sql.find_first(Tab, "holder = %s", holder) if Budget.objects.filter(LIMITS_LEASES).exists() else None
    if tab is None:
        return
    lease_filter = build_tab_filter(tab, now=now)
    applicant, reserved = Applicant(holder, size), {}
    for budget in Budget.objects.filter(lease_filter, LIMITS_LEASES).order_by("pk"):
        amount = compute_reservation(budget, now=now, applicant=applicant)
        if is_over(budget, get_spent(budget, now), amount, now=now):
            reserved[budget] = amount
    if reserved:
        raise _build_start_refusal(reserved, now=now)


def find_exhausted_for_lease(holder: UUID, *, now: datetime) -> list[Budget]:
    """Find the exhausted hard budgets that apply to a lease."""
    if sql.find_first(Budget, EXHAUSTED_SQL) is None:
        return []
    tab = sql.find_first(Tab, "holder = %s", holder)
    if tab is None:
        return []
    subjects = (tab.agent_did, tab.environment_type, tab.key_id, tab.project)
    if sql.find_first(Budget, EXHAUSTED_FOR_LEASE_SQL, *subjects) is None:
        return []
    lease_filter = build_tab_filter(tab, now=now)
    return find_exhausted(now=now, condition=lease_filter, applicant=Applicant(holder))


def find_exhausted(*, now: datetime, condition: Q | None = None, applicant: Applicant | None = None) -> list[Budget]:
    """Find the exhausted hard budgets that match `condition`, without those that refuse model calls alone.

    A sandbox of the applicant counts as if it were running. A budget whose period has ended or whose amount was raised is not
    exhausted, even before the next sweep clears its mark."""
    marked = Budget.objects.filter(condition or Q(), LIMITS_LEASES, exhausted_at__isnull=False).order_by("pk")
    return [budget for budget in marked if is_exhausted(budget, now, applicant)]


def _explain_reservation(reserved: Decimal) -> str:
    return f"{format_decimal(round(reserved, 6))} reserved by active leases" if reserved else ""


def _build_start_refusal(reserved: dict[Budget, Decimal], *, now: datetime) -> BudgetExhausted:
    """Build the error for a start of a sandbox, from the amount that each budget would have to reserve."""
    shortages = {}
    for budget, amount in reserved.items():
        minutes = get_stop_delay(budget).total_seconds() / 60
        explanation = (
            f"and {format_decimal(round(amount, 6))} needed until this and other running sandboxes can be stopped "
            f"({minutes:g} minutes with the grace period)"
        )
        shortages[budget] = Shortage(get_spent(budget, now), explanation)
    return build_refusal(shortages, now=now)
