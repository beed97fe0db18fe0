"""Forecasts of this month's costs and of the day on which a budget runs out."""

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from billing import budgets, pricing
from billing.dates import start_of_day, start_of_next_month, to_utc_date
from billing.models import BillableItem, Budget
from billing.totals import sum_costs

FORECAST_WINDOW_DAYS = 7  # days, from which a forecast is made


@dataclass(frozen=True)
class Forecast:
    """spent: this month up to now. a_day: what one of the last days has cost on average, plans apart, over so many of them;
    None if none is over yet. month: what all of this month will cost. runs_out: the day on which the budget is spent, counted
    from the 1st; None: never, or no budget."""

    spent: Decimal
    a_day: Decimal | None
    days: int
    month: Decimal
    budget: Decimal | None
    runs_out: date | None


def forecast(*, now: datetime, last: int = FORECAST_WINDOW_DAYS, budget: Decimal | None = None, **only: Any) -> Forecast:
    """If each day to come costs what the last ones have cost on average, which are over and of which something was used.
    `only` is what else costs.costs takes: the names of BY, and `agents`.

    Allowances make it too low early in a month: what was free in those days will not be free once they are used up."""
    today = now.astimezone(UTC).date()
    begin, first = today.replace(day=1), today - timedelta(days=last)
    spent = {total.key: total.usd for total in sum_costs("day", since=begin, until=start_of_next_month(begin), **only)}
    recent = sum_costs("day", since=first, until=today, **only)
    days = (today - date.fromisoformat(recent[0].key)).days if recent else 0
    paid = sum((total.usd for total in recent), Decimal(0))
    charged = sum_costs("day", since=first, until=start_of_next_month(begin), item=BillableItem.PLAN, **only)
    plans = {total.key: total.usd for total in charged}
    paid -= sum((usd for key, usd in plans.items() if key < str(today)), Decimal(0))
    a_day = Fraction(paid) / days if days else Fraction(0)
    before = sum((usd for key, usd in spent.items() if key < str(today)), Decimal(0))
    plan = Fraction(plans.get(str(today), 0))
    here = plan + max(Fraction(spent.get(str(today), 0)) - plan, a_day)
    left = (start_of_next_month(begin) - today).days - 1
    return Forecast(
        spent=sum(spent.values(), Decimal(0)),
        a_day=pricing.round_half_up(a_day) if days else None,
        days=days,
        month=pricing.round_half_up(Fraction(before) + here + a_day * left),
        budget=budget,
        runs_out=None if budget is None else _find_exhaustion_date(Fraction(budget), spent, today, here, a_day),
    )


def _find_exhaustion_date(
    budget: Fraction, spent: dict[str, Decimal], today: date, here: Fraction, a_day: Fraction
) -> date | None:
    """The first day at whose end as much as the budget is spent."""
    sum_ = Fraction(0)
    for key in sorted(key for key in spent if key <= str(today)):
        sum_ += Fraction(spent[key])
        if sum_ >= budget:
            return date.fromisoformat(key)
    sum_ += here - Fraction(spent.get(str(today), Decimal(0)))
    if sum_ >= budget:
        return today
    if not a_day:
        return None
    days = math.ceil((budget - sum_) / a_day)
    return today + timedelta(days=days) if days <= (date.max - today).days else None


class BudgetForecast(NamedTuple):
    """runs_out: the day, UTC, at whose end a budget is spent; None: not in its present period, never, or it is off. Of one that
    is spent already, the day on which that was seen. a_day: what it took of late on average; None: nothing to tell it by."""

    runs_out: date | None
    a_day: Fraction | None


def forecast_budget(budget: Budget, now: datetime) -> BudgetForecast:
    """If each day to come takes what the last LAST ones have taken on average, which are over and from the first of which on
    something was used.

    A plan counts once it is paid and is no part of that average. One query, of what is derived so far as in budgets.settle."""
    if not budget.active:
        return BudgetForecast(None, None)
    if budgets.is_exhausted(budget, now) and budget.exhausted_at:
        return BudgetForecast(to_utc_date(budget.exhausted_at), None)
    today, (began, ends) = to_utc_date(now), budgets.get_period_bounds(budget.period, now)
    first, until = today - timedelta(days=FORECAST_WINDOW_DAYS), ends.date() if ends else date.max
    days = budgets.sum_spending_by_day(budget, min(began, start_of_day(first)), ends)
    spent = sum((paid for day, (paid, _) in days.items() if day >= began.date()), Fraction(0))
    recent = {day: used for day, (_, used) in days.items() if first <= day < today}
    a_day = sum(recent.values()) / Fraction((today - min(recent)).days) if recent else Fraction(0)
    to_come = max(a_day - (days[today][1] if today in days else 0), Fraction(0))  # today
    left = Fraction(budget.amount) - spent - to_come
    pace = a_day if recent else None
    if left <= 0:
        return BudgetForecast(today, pace)
    number = math.ceil(left / a_day) if a_day else math.inf
    return BudgetForecast(today + timedelta(days=number) if number < (until - today).days else None, pace)


def predict_exhaustion_date(budget: Budget, now: datetime) -> date | None:
    return forecast_budget(budget, now).runs_out
