"""Budget periods: bounds, and the amount spent in the present one."""

from datetime import datetime, timedelta
from decimal import Decimal

from django.db.models import Q

from billing.dates import EPOCH, start_of_day, start_of_next_month, to_utc_date
from billing.models import Budget
from billing.models.budgets import Period


def get_period_bounds(period: str, now: datetime) -> tuple[datetime, datetime | None]:
    """When the present one began, and when the next one will: None for ever."""
    day = to_utc_date(now)
    if period == Period.DAY:
        return start_of_day(day), start_of_day(day + timedelta(days=1))
    if period == Period.MONTH:
        return start_of_day(day.replace(day=1)), start_of_day(start_of_next_month(day))
    return EPOCH, None


def get_spent(budget: Budget, now: datetime) -> Decimal:
    """What is known to be spent in the present period: nothing yet in one that has just begun."""
    return budget.spent if budget.period_began == get_period_bounds(budget.period, now)[0] else Decimal(0)


def build_marked_filter(mark: str, now: datetime) -> Q:
    """The active budgets whose mark, `warned_for` or `exhausted_for`, is of their present period."""
    present = Q()
    for period in Period:
        present |= Q(period=period, **{mark: get_period_bounds(period, now)[0]})
    return present & Q(active=True)


def is_exhausted(budget: Budget, now: datetime) -> bool:
    """Whether it was seen to be spent, in its present period and with the amount that it has now."""
    return budget.exhausted_for == get_period_bounds(budget.period, now)[0] and budget.spent >= budget.amount


def get_grace_deadline(budget: Budget) -> datetime:
    """Of one that is spent: until when what runs may go on."""
    assert budget.exhausted_at
    return budget.exhausted_at + budget.grace
