"""Spending of a budget: totals by period, day and lease of the usage and costs derived so far."""

from collections import defaultdict
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple
from uuid import UUID

from django.db.models import Q, QuerySet, Sum

from billing.budgets.periods import get_period_bounds
from billing.budgets.scopes import build_cost_filter, build_usage_filters, find_open_tabs
from billing.hourly import (
    sum_hourly_call_usd,
    sum_hourly_sandbox_usd,
    sum_hourly_time,
    sum_hourly_uncertainty,
    sum_hourly_usd,
)
from billing.intervals import MICROSECOND
from billing.models import BillableItem, Budget, CostRecord, Tab, UsageKind, UsageRecord
from billing.models.budgets import Period, Unit
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.pricing import round_half_up
from billing.totals import BILLABLE_STATES, TOTAL_DURATION
from billing.uncertainty import Uncertainty

HOUR = timedelta(hours=1)
NINE_PLACES = Decimal("1e-9")


class DailySpending(NamedTuple):
    """Spending of one day in the budget's unit, unrounded."""

    total: Fraction
    without_plans: Fraction


class Spending(NamedTuple):
    """Spending of a period in the budget's unit, the part of it that is model calls, and the uncertainty of that part."""

    total: Decimal
    calls: Decimal
    uncertainty: Uncertainty = Uncertainty()


def sum_spending(budget: Budget, began: datetime, ends: datetime | None) -> Spending:
    """Sum the spending in a budget's scope between two bounds of a period."""
    if budget.period == Period.HOUR and ends:
        if budget.unit == Unit.HOURS:
            return Spending(round_half_up(sum(_sum_hour(budget, began, ends).values(), Fraction(0))), Decimal(0))
        parts = build_usage_filters(budget, began)
        calls = sum(sum_hourly_call_usd(began, ends, parts).values(), Fraction(0))
        sandboxes = sum(sum_hourly_sandbox_usd(began, ends, parts).values(), Fraction(0))
        return Spending(round_half_up(calls + sandboxes), round_half_up(calls), sum_hourly_uncertainty(began, ends, parts))
    if budget.unit == Unit.USD:
        sums = _find_cost_records(budget, began, ends).aggregate(
            total=sum_exact("usd"), calls=sum_exact("usd", Q(item=BillableItem.LLM)),
            unpriced=Sum("unpriced", default=0), estimated=sum_exact("estimated_usd"),
        )  # fmt: skip
        uncertainty = Uncertainty(int(sums["unpriced"]), nanos_to_decimal(sums["estimated"]))
        return Spending(nanos_to_decimal(sums["total"]), nanos_to_decimal(sums["calls"]), uncertainty)
    durations = [part.aggregate(sum=TOTAL_DURATION)["sum"] for part in _find_time_records(budget, began, ends)]
    return Spending(to_hours(sum(filter(None, durations), timedelta(0))).quantize(NINE_PLACES), Decimal(0))


def _sum_hour(budget: Budget, began: datetime, ends: datetime) -> dict[UUID | None, Fraction]:
    """Sum the spending of each lease in one hour, in the budget's unit."""
    parts = build_usage_filters(budget, began)
    if budget.unit == Unit.USD:
        return sum_hourly_usd(began, ends, parts)
    return {
        holder: Fraction(time // MICROSECOND, HOUR // MICROSECOND)
        for holder, time in sum_hourly_time(began, ends, parts).items()
    }


def sum_spending_by_day(budget: Budget, since: datetime, ends: datetime | None) -> dict[date, DailySpending]:
    """Sum the spending of each day with usage. Takes one query, or two for the hours of an account."""
    if budget.unit == Unit.USD:
        costs = _find_cost_records(budget, since, ends).order_by().values_list("day")
        sums = costs.annotate(total=sum_exact("usd"), without_plans=sum_exact("usd", ~Q(item=BillableItem.PLAN)))
        return {
            day: DailySpending(Fraction(nanos_to_decimal(total)), Fraction(nanos_to_decimal(without_plans)))
            for day, total, without_plans in sums
        }
    durations: dict[date, timedelta] = defaultdict(timedelta)
    for part in _find_time_records(budget, since, ends):
        for day, duration in part.order_by().values_list("day").annotate(sum=TOTAL_DURATION):
            durations[day] += duration
    hours = {day: Fraction(duration // MICROSECOND, HOUR // MICROSECOND) for day, duration in durations.items()}
    return {day: DailySpending(amount, amount) for day, amount in hours.items()}


def find_top_spenders(budget: Budget, *, now: datetime, limit: int) -> list[tuple[Tab, Decimal]]:
    """Find the open tabs in scope with the most spending in the current period, each with that spending.

    Tabs without any spending fill the list up to `limit`, newest first."""
    began, ends = get_period_bounds(budget.period, now)
    open_tabs = find_open_tabs(budget, now=now)
    if budget.period == Period.HOUR and ends:
        open_holders = {*open_tabs.values_list("holder", flat=True)}
        amounts = [(holder, usd) for holder, usd in _sum_hour(budget, began, ends).items() if holder in open_holders]
        largest = sorted(amounts, key=lambda row: (-row[1], str(row[0])))[:limit]
        spent = {holder: round_half_up(amount) for holder, amount in largest if holder}
    elif budget.unit == Unit.USD:
        costs = _find_cost_records(budget, began, ends).filter(holder__in=open_tabs.values("holder")).order_by()
        sums = costs.values_list("holder").annotate(sum=sum_exact("usd")).order_by("-sum", "holder")[:limit]
        spent = {holder: nanos_to_decimal(nano) for holder, nano in sums}
    else:
        parts = [
            part.filter(holder__in=open_tabs.values("holder")).order_by() for part in _find_time_records(budget, began, ends)
        ]
        durations = [row for part in parts for row in part.values_list("holder").annotate(sum=TOTAL_DURATION)]
        longest = sorted(durations, key=lambda row: (-row[1], row[0]))[:limit]
        spent = {holder: to_hours(duration) for holder, duration in longest}
    tabs = {tab.holder: tab for tab in Tab.objects.filter(holder__in=spent)}
    spenders = [(tabs[holder], amount) for holder, amount in spent.items()]
    if len(spenders) < limit:
        rest = open_tabs.exclude(holder__in=spent).order_by("-opened_at", "holder")[: limit - len(spenders)]
        spenders += [(tab, Decimal(0)) for tab in rest]
    return spenders


def _build_day_filter(began: datetime, ends: datetime | None) -> Q:
    return Q(day__gte=began.date()) & (Q(day__lt=ends.date()) if ends else Q())


def _find_cost_records(budget: Budget, began: datetime, ends: datetime | None) -> QuerySet[CostRecord]:
    return CostRecord.objects.filter(build_cost_filter(budget), _build_day_filter(began, ends))


def _find_time_records(budget: Budget, began: datetime, ends: datetime | None) -> list[QuerySet[UsageRecord]]:
    records = UsageRecord.objects.filter(_build_day_filter(began, ends), item=UsageKind.TIME, state__in=BILLABLE_STATES)
    return [records.filter(part) for part in build_usage_filters(budget, began)]


def to_hours(duration: timedelta) -> Decimal:
    return Decimal(duration // MICROSECOND) / (HOUR // MICROSECOND)
