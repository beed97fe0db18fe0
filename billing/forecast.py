"""Forecasts of this month's costs and of the day on which a budget is exhausted.

Both assume that every remaining day costs the average of the last full days (the pace)."""

import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from billing import budgets, pricing
from billing.dates import start_of_day, start_of_next_month, to_utc_date
from billing.models import BillableItem, Budget
from billing.models.budgets import Period, Unit
from billing.money_sums import nanos_to_decimal
from billing.totals import find_first_day_of_time, sum_amounts
from billing.uncertainty import Uncertainty

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
NOTHING = budgets.DailySpending(Fraction(0), Fraction(0))
FORECAST_WINDOW_DAYS = 7  # full days before today from which the pace is computed


@dataclass(frozen=True)
class Forecast:
    """Costs of this month in USD.

    spent: from the 1st up to now.
    a_day: average cost of one day without plans, over the last `days` full days. None before the first full day.
    month: expected cost of the whole month.
    runs_out: day on which costs since the 1st reach `budget`. None if there is no budget or it is never reached.
    uncertainty: of `spent`."""

    spent: Decimal
    a_day: Decimal | None
    days: int
    month: Decimal
    budget: Decimal | None
    runs_out: date | None
    uncertainty: Uncertainty


def forecast(*, now: datetime, last: int = FORECAST_WINDOW_DAYS, budget: Decimal | None = None, **filters: Any) -> Forecast:
    """Forecast this month's costs from the average of the last `last` full days.

    The average starts at the first of those days with any cost. Plans are charged once a month and are not part of the
    average. `filters` are those of `totals.sum_costs`: `agents` and the names in `GROUP_BY_COLUMNS`.

    Known limit: early in a month the forecast is too low, because the average includes days within an allowance."""
    today = now.astimezone(UTC).date()
    begin, first = today.replace(day=1), today - timedelta(days=last)
    until = start_of_next_month(begin)
    costs, uncertainty = _sum_days(begin, since=min(begin, first), until=until, **filters)
    totals = {day: sum(items.values(), Decimal(0)) for day, items in costs.items()}
    plans = {str(day): items.get(BillableItem.PLAN, Decimal(0)) for day, items in costs.items()}
    spent = {str(day): usd for day, usd in totals.items() if day >= begin}
    first_used = find_first_day_of_time(since=first, until=today, **filters)
    in_use = [day for day in (*totals, first_used) if day and first <= day < today]
    days = (today - min(in_use)).days if in_use else 0
    recent_usd = sum((usd - plans[str(day)] for day, usd in totals.items() if first <= day < today), Decimal(0))
    pace = Fraction(recent_usd) / days if days else Fraction(0)
    before_today = sum((usd for key, usd in spent.items() if key < str(today)), Decimal(0))
    plan_today = Fraction(plans.get(str(today), 0))
    expected_today = plan_today + max(Fraction(spent.get(str(today), 0)) - plan_today, pace)
    remaining_days = (start_of_next_month(begin) - today).days - 1
    return Forecast(
        spent=sum(spent.values(), Decimal(0)),
        a_day=pricing.round_half_up(pace) if days else None,
        days=days,
        month=pricing.round_half_up(Fraction(before_today) + expected_today + pace * remaining_days),
        budget=budget,
        runs_out=None if budget is None else _find_exhaustion_date(Fraction(budget), spent, today, expected_today, pace),
        uncertainty=uncertainty,
    )


def _sum_days(begin: date, **selection: Any) -> tuple[dict[date, dict[str, Decimal]], Uncertainty]:
    """Return costs in USD by day and item, and the uncertainty of those from `begin` on. One query."""
    costs: dict[date, dict[str, Decimal]] = defaultdict(dict)
    parts = []
    for day, item, nano, unpriced, estimated in sum_amounts("day", "item", **selection):
        costs[day][item] = nanos_to_decimal(nano)
        if day >= begin:
            parts.append(Uncertainty(unpriced, nanos_to_decimal(estimated)))
    return costs, Uncertainty.sum(parts)


def _find_exhaustion_date(
    budget: Fraction, spent: dict[str, Decimal], today: date, expected_today: Fraction, pace: Fraction
) -> date | None:
    """Return the first day at whose end the costs since the 1st reach `budget`. None if they never do.

    `spent` maps ISO days to USD; `expected_today` is the expected cost of the whole of today."""
    total = Fraction(0)
    for key in sorted(key for key in spent if key <= str(today)):
        total += Fraction(spent[key])
        if total >= budget:
            return date.fromisoformat(key)
    total += expected_today - Fraction(spent.get(str(today), Decimal(0)))
    if total >= budget:
        return today
    if not pace:
        return None
    days = math.ceil((budget - total) / pace)
    return today + timedelta(days=days) if days <= (date.max - today).days else None


class BudgetForecast(NamedTuple):
    """Outlook of one budget, in the budget's unit.

    runs_out: UTC day at whose end the budget is exhausted; the day of exhaustion if it already is. None if it lasts for
    its current period, or is inactive.
    a_day: average spending of one day without plans. None without a full day of usage in the forecast window.
    at_end: expected spending at the end of the current period. None without an average, for a lifetime, and for a budget
        that is exhausted or inactive."""

    runs_out: date | None
    a_day: Fraction | None
    at_end: Decimal | None = None


def forecast_budget(budget: Budget, now: datetime) -> BudgetForecast:
    """Forecast the exhaustion and the spending at the end of the period from the last FORECAST_WINDOW_DAYS full UTC days.

    The average starts at the first of those days with any usage. A plan counts as spent from the day of its charge and is
    not part of the average. An hourly budget is extrapolated from its own hour instead. Takes one query, or two for the
    hours of an account, over the usage and costs derived so far."""
    if not budget.active:
        return BudgetForecast(None, None)
    if budgets.is_exhausted(budget, now) and budget.exhausted_at:
        return BudgetForecast(to_utc_date(budget.exhausted_at), None)
    today, (began, ends) = to_utc_date(now), budgets.get_period_bounds(budget, now)
    if budget.period == Period.HOUR and ends:
        return _extrapolate_hour(budget, began, ends, now)
    first = today - FORECAST_WINDOW_DAYS * DAY
    days = budgets.sum_spending_by_day(budget, min(began, start_of_day(first)), ends)
    if began == start_of_day(began.date()):
        spent = sum((sums.total for day, sums in days.items() if day >= began.date()), Fraction(0))
    else:
        spent = Fraction(budgets.get_spent(budget, now))  # only a part of the first UTC day belongs to the period
    recent = {day: sums.without_plans for day, sums in days.items() if first <= day < today}
    pace = sum(recent.values()) / Fraction((today - min(recent)).days) if recent else Fraction(0)
    until = min(start_of_day(today + DAY), ends) if ends else start_of_day(today + DAY)
    rest_of_today = max(pace * _count_days(until - start_of_day(today)) - days.get(today, NOTHING).without_plans, Fraction(0))
    expected = spent + rest_of_today
    at_end = _round(budget, expected + pace * _count_days(ends - until)) if ends and recent else None
    left, last_day = Fraction(budgets.get_limit(budget, now)) - expected, to_utc_date(ends - MINUTE) if ends else date.max
    number = max(math.ceil(left / pace), 0) if pace else 0 if left <= 0 else math.inf
    runs_out = today + timedelta(days=number) if number <= (last_day - today).days else None
    return BudgetForecast(runs_out, pace if recent else None, at_end)


def _extrapolate_hour(budget: Budget, began: datetime, ends: datetime, now: datetime) -> BudgetForecast:
    expected = Fraction(budgets.get_spent(budget, now)) * ((ends - began) // MINUTE) / max((now - began) // MINUTE, 1)
    is_over = expected >= Fraction(budgets.get_limit(budget, now))
    return BudgetForecast(to_utc_date(now) if is_over else None, None, _round(budget, expected))


def _round(budget: Budget, amount: Fraction) -> Decimal:
    return pricing.round_half_up(amount, places=0) if budget.unit == Unit.TOKENS else pricing.round_half_up(amount)


def _count_days(duration: timedelta) -> Fraction:
    return Fraction(duration // MINUTE, DAY // MINUTE)


def predict_exhaustion_date(budget: Budget, now: datetime) -> date | None:
    """Return the UTC day on which a budget is exhausted: the `runs_out` of its forecast."""
    return forecast_budget(budget, now).runs_out
