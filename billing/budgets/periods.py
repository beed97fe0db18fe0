"""Budget periods: their bounds, and a budget's state in the current one."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from django.db.models import Q

from billing.dates import EPOCH, start_of_day, start_of_next_month, to_utc_date
from billing.models import Budget
from billing.models.budgets import Period
from billing.uncertainty import Uncertainty


def get_period_bounds(period: str, now: datetime) -> tuple[datetime, datetime | None]:
    """Return the start of the current period and of the next one. A lifetime budget starts at EPOCH and has no next period."""
    day = to_utc_date(now)
    if period == Period.HOUR:
        began = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        return began, began + timedelta(hours=1)
    if period == Period.DAY:
        return start_of_day(day), start_of_day(day + timedelta(days=1))
    if period == Period.MONTH:
        return start_of_day(day.replace(day=1)), start_of_day(start_of_next_month(day))
    return EPOCH, None


def get_spent(budget: Budget, now: datetime) -> Decimal:
    """Return the recorded spending in the current period; 0 until a new period's first update."""
    return budget.spent if budget.period_began == get_period_bounds(budget.period, now)[0] else Decimal(0)


def get_uncertainty(budget: Budget, now: datetime) -> Uncertainty:
    """Return the uncertainty of `get_spent`."""
    is_current = budget.period_began == get_period_bounds(budget.period, now)[0]
    return Uncertainty(budget.unpriced, budget.estimated_usd) if is_current else Uncertainty()


def build_marked_filter(mark: str, now: datetime) -> Q:
    """Match active budgets marked in their current period. `mark` is `warned_for` or `exhausted_for`."""
    in_current_period = Q()
    for period in Period:
        in_current_period |= Q(period=period, **{mark: get_period_bounds(period, now)[0]})
    return in_current_period & Q(active=True)


def get_grace_deadline(budget: Budget) -> datetime:
    """Return the end of an exhausted budget's grace period, until which running work may continue."""
    assert budget.exhausted_at
    return budget.exhausted_at + budget.grace
