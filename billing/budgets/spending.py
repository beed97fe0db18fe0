"""Spending of a budget: totals by period, day and lease of the usage and costs derived so far."""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import Q, QuerySet, Sum

from billing.budgets.periods import get_period_bounds, split_period
from billing.budgets.scopes import build_call_filters, build_cost_filter, build_usage_filters, find_open_tabs
from billing.dates import start_of_day, to_utc_date
from billing.hourly import (
    sum_hourly_call_usd,
    sum_hourly_sandbox_usd,
    sum_hourly_time,
    sum_hourly_uncertainty,
    sum_hourly_usd,
)
from billing.intervals import MICROSECOND
from billing.models import BillableItem, Budget, CostRecord, Tab, UsageKind, UsageRecord
from billing.models.budgets import Unit
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.pricing import round_half_up
from billing.totals import BILLABLE_STATES, TOTAL_DURATION
from billing.uncertainty import Uncertainty

HOUR = timedelta(hours=1)


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
    """Sum the spending in a budget's scope between the bounds of a period: the stored sums of days, and the edges by hour."""
    parts = split_period(began, ends)
    if budget.unit == Unit.HOURS:
        records = _find_time_records(budget, began, parts.day_filter) if parts.has_days else []
        durations = [part.aggregate(sum=TOTAL_DURATION)["sum"] for part in records]
        owners = build_usage_filters(budget, began)
        durations += [time for edge in parts.edges for time in sum_hourly_time(*edge, owners).values()]
        return Spending(round_half_up(_to_fraction(sum(filter(None, durations), timedelta(0)))), Decimal(0))
    edges = [_sum_edge(budget, began, edge) for edge in parts.edges]
    return _add([*edges, _sum_days(budget, began, parts.day_filter)] if parts.has_days else edges)


def _sum_days(budget: Budget, began: datetime, days: Q) -> Spending:
    """Sum the USD of full days from the stored costs. Those of a budget for a model from the usage, which names the model."""
    is_call = None if budget.model else Q(item=BillableItem.LLM)
    sums = [_sum_records(records, is_call) for records in _find_usd_records(budget, began, days)]
    return _add(sums)


def _add(sums: Sequence[Spending]) -> Spending:
    return Spending(
        sum((each.total for each in sums), Decimal(0)),
        sum((each.calls for each in sums), Decimal(0)),
        Uncertainty.sum(each.uncertainty for each in sums),
    )


def _sum_records(records: "QuerySet[CostRecord] | QuerySet[UsageRecord]", is_call: Q | None) -> Spending:
    sums = records.aggregate(
        total=sum_exact("usd"), calls=sum_exact("usd", is_call), unpriced=Sum("unpriced", default=0),
        estimated=sum_exact("estimated_usd"),
    )  # fmt: skip
    uncertainty = Uncertainty(int(sums["unpriced"]), nanos_to_decimal(sums["estimated"]))
    return Spending(nanos_to_decimal(sums["total"]), nanos_to_decimal(sums["calls"]), uncertainty)


def _sum_edge(budget: Budget, began: datetime, edge: tuple[datetime, datetime]) -> Spending:
    """Sum the USD of a part of a day, at full rates."""
    owners = build_call_filters(budget, began)
    calls = sum(sum_hourly_call_usd(*edge, owners).values(), Fraction(0))
    sandboxes = Fraction(0) if budget.model else sum(sum_hourly_sandbox_usd(*edge, owners).values(), Fraction(0))
    return Spending(round_half_up(calls + sandboxes), round_half_up(calls), sum_hourly_uncertainty(*edge, owners))


def _sum_edge_by_lease(budget: Budget, began: datetime, edge: tuple[datetime, datetime]) -> dict[UUID | None, Fraction]:
    """Sum the spending of each lease in a part of a day, in the budget's unit."""
    owners = build_call_filters(budget, began)
    if budget.model:
        return sum_hourly_call_usd(*edge, owners)
    if budget.unit == Unit.USD:
        return sum_hourly_usd(*edge, owners)
    return {holder: _to_fraction(time) for holder, time in sum_hourly_time(*edge, owners).items()}


def _sum_days_by_lease(budget: Budget, began: datetime, days: Q, holders: Any) -> Iterator[tuple[UUID, Fraction]]:
    """Yield the spending of each of the leases on full days, in the budget's unit.

    A lease occurs several times if its agent has changed accounts."""
    if budget.unit == Unit.HOURS:
        for part in _find_time_records(budget, began, days):
            for holder, time in part.filter(holder__in=holders).order_by().values_list("holder").annotate(sum=TOTAL_DURATION):
                yield holder, _to_fraction(time)
        return
    for records in _find_usd_records(budget, began, days):
        sums = records.filter(holder__in=holders).order_by().values_list("holder").annotate(sum=sum_exact("usd"))
        yield from ((holder, Fraction(nanos_to_decimal(nano))) for holder, nano in sums)


def sum_spending_by_day(budget: Budget, since: datetime, ends: datetime | None) -> dict[date, DailySpending]:
    """Sum the spending of each UTC day with usage, from that of `since` on. One query, or one for each part of an account."""
    days = Q(day__gte=to_utc_date(since)) & (Q(day__lt=_find_next_day(ends)) if ends else Q())
    amounts: dict[date, DailySpending] = defaultdict(lambda: DailySpending(Fraction(0), Fraction(0)))
    if budget.unit == Unit.USD:
        for records in _find_usd_records(budget, since, days):
            without_plans = sum_exact("usd") if budget.model else sum_exact("usd", ~Q(item=BillableItem.PLAN))
            sums = records.order_by().values_list("day").annotate(total=sum_exact("usd"), without_plans=without_plans)
            for day, *nanos in sums:
                added = (Fraction(nanos_to_decimal(nano)) for nano in nanos)
                amounts[day] = DailySpending(*map(operator.add, amounts[day], added))
        return dict(amounts)
    for part in _find_time_records(budget, since, days):
        for day, duration in part.order_by().values_list("day").annotate(sum=TOTAL_DURATION):
            hours = _to_fraction(duration)
            amounts[day] = DailySpending(amounts[day].total + hours, amounts[day].without_plans + hours)
    return dict(amounts)


def find_top_spenders(budget: Budget, *, now: datetime, limit: int) -> list[tuple[Tab, Decimal]]:
    """Find the open tabs in scope with the most spending in the current period, each with that spending.

    Tabs without any spending fill the list up to `limit`, newest first."""
    began, ends = get_period_bounds(budget, now)
    parts, open_tabs = split_period(began, ends), find_open_tabs(budget, now=now)
    amounts: dict[UUID, Fraction] = defaultdict(Fraction)
    if parts.has_days:
        for holder, amount in _sum_days_by_lease(budget, began, parts.day_filter, open_tabs.values("holder")):
            amounts[holder] += amount
    open_holders = {*open_tabs.values_list("holder", flat=True)} if parts.edges else {*amounts}
    for edge in parts.edges:
        for each, amount in _sum_edge_by_lease(budget, began, edge).items():
            if each in open_holders:
                amounts[each] += amount
    largest = sorted(amounts.items(), key=lambda row: (-row[1], str(row[0])))[:limit]
    spent = {holder: round_half_up(amount) for holder, amount in largest}
    tabs = {tab.holder: tab for tab in Tab.objects.filter(holder__in=spent)}
    spenders = [(tabs[holder], amount) for holder, amount in spent.items()]
    if len(spenders) < limit:
        rest = open_tabs.exclude(holder__in=spent).order_by("-opened_at", "holder")[: limit - len(spenders)]
        spenders += [(tab, Decimal(0)) for tab in rest]
    return spenders


def _find_next_day(at: datetime) -> date:
    """Return the first UTC day that begins at this time or later."""
    day = to_utc_date(at)
    return day if start_of_day(day) == at else day + timedelta(days=1)


def _find_usd_records(budget: Budget, began: datetime, days: Q) -> "list[QuerySet[CostRecord] | QuerySet[UsageRecord]]":
    """Find the stored USD of full days. The records of a list are disjoint."""
    if budget.model:
        parts = build_call_filters(budget, began)
        return [UsageRecord.objects.filter(part, days, item=UsageKind.TOKENS) for part in parts]
    return [CostRecord.objects.filter(build_cost_filter(budget), days)]


def _find_time_records(budget: Budget, began: datetime, days: Q) -> list[QuerySet[UsageRecord]]:
    records = UsageRecord.objects.filter(days, item=UsageKind.TIME, state__in=BILLABLE_STATES)
    return [records.filter(part) for part in build_usage_filters(budget, began)]


def _to_fraction(duration: timedelta) -> Fraction:
    """Return a duration in hours."""
    return Fraction(duration // MICROSECOND, HOUR // MICROSECOND)


def to_hours(duration: timedelta) -> Decimal:
    return Decimal(duration // MICROSECOND) / (HOUR // MICROSECOND)
