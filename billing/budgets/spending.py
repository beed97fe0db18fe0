"""Spending of a budget: totals by period, day and lease of the usage and costs derived so far."""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import Q, QuerySet, Sum

from billing.budgets.periods import get_period_bounds, split_period
from billing.budgets.scopes import build_call_filters, build_cost_filter, build_usage_filters, find_open_tabs
from billing.call_measures import MEASURES, CallMeasure, build_uncertainty
from billing.dates import start_of_day, to_utc_date
from billing.hourly import (
    sum_hourly_calls,
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
    """Sum full days from the stored costs. Those of a budget that counts model calls alone from the usage of these calls."""
    if budget.counts_calls_alone:
        return _add([_sum_call_usage(records, MEASURES[budget.unit]) for records in _find_call_usage(budget, began, days)])
    return _sum_costs(_find_costs(budget, days))


def _add(sums: Sequence[Spending]) -> Spending:
    return Spending(
        sum((each.total for each in sums), Decimal(0)),
        sum((each.calls for each in sums), Decimal(0)),
        reduce(Uncertainty.plus, (each.uncertainty for each in sums), Uncertainty()),
    )


def _sum_costs(records: QuerySet[CostRecord]) -> Spending:
    sums = records.aggregate(
        total=sum_exact("usd"), calls=sum_exact("usd", Q(item=BillableItem.LLM)), unpriced=Sum("unpriced", default=0),
        estimated=sum_exact("estimated_usd"),
    )  # fmt: skip
    uncertainty = Uncertainty(int(sums["unpriced"]), nanos_to_decimal(sums["estimated"]))
    return Spending(nanos_to_decimal(sums["total"]), nanos_to_decimal(sums["calls"]), uncertainty)


def _sum_call_usage(records: QuerySet[UsageRecord], measure: CallMeasure) -> Spending:
    sums = records.aggregate(
        total=measure.sum_usage(), unpriced=Sum("unpriced", default=0),
        estimated=sum_exact(measure.estimated, parts=measure.parts),
    )  # fmt: skip
    total = measure.to_amount(sums["total"])
    return Spending(total, total, build_uncertainty(measure, sums["unpriced"], sums["estimated"]))


def _sum_edge(budget: Budget, began: datetime, edge: tuple[datetime, datetime]) -> Spending:
    """Sum a part of a day, at full rates."""
    owners, measure = build_call_filters(budget, began), MEASURES[budget.unit]
    calls = sum(sum_hourly_calls(*edge, owners, measure).values(), Fraction(0))
    sandboxes = Fraction(0) if budget.counts_calls_alone else sum(sum_hourly_sandbox_usd(*edge, owners).values(), Fraction(0))
    return Spending(round_half_up(calls + sandboxes), round_half_up(calls), sum_hourly_uncertainty(*edge, owners, measure))


def _sum_edge_by_lease(budget: Budget, began: datetime, edge: tuple[datetime, datetime]) -> dict[UUID | None, Fraction]:
    """Sum the spending of each lease in a part of a day, in the budget's unit."""
    owners = build_call_filters(budget, began)
    if budget.counts_calls_alone:
        return sum_hourly_calls(*edge, owners, MEASURES[budget.unit])
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
    measure = MEASURES[budget.unit]
    if budget.counts_calls_alone:
        parts: list[tuple[QuerySet[Any], Sum]] = [
            (records, measure.sum_usage()) for records in _find_call_usage(budget, began, days)
        ]
    else:
        parts = [(_find_costs(budget, days), sum_exact("usd"))]
    for records, total in parts:
        sums = records.filter(holder__in=holders).order_by().values_list("holder").annotate(sum=total)
        yield from ((holder, Fraction(measure.to_amount(amount))) for holder, amount in sums)


def sum_spending_by_day(budget: Budget, since: datetime, ends: datetime | None) -> dict[date, DailySpending]:
    """Sum the spending of each UTC day with usage, from that of `since` on. One query, or one for each part of an account."""
    days = Q(day__gte=to_utc_date(since)) & (Q(day__lt=_find_next_day(ends)) if ends else Q())
    amounts: dict[date, DailySpending] = defaultdict(lambda: DailySpending(Fraction(0), Fraction(0)))
    for day, *sums in _iter_days(budget, since, days):
        amounts[day] = DailySpending(*map(operator.add, amounts[day], sums))
    return dict(amounts)


def _iter_days(budget: Budget, since: datetime, days: Q) -> Iterator[tuple[date, Fraction, Fraction]]:
    """Yield days with their spending, and with the part of it without plans. A day may occur several times."""
    if budget.unit == Unit.HOURS:
        for part in _find_time_records(budget, since, days):
            for day, duration in part.order_by().values_list("day").annotate(sum=TOTAL_DURATION):
                yield day, _to_fraction(duration), _to_fraction(duration)
    elif budget.counts_calls_alone:
        measure = MEASURES[budget.unit]
        for records in _find_call_usage(budget, since, days):
            for day, amount in records.order_by().values_list("day").annotate(sum=measure.sum_usage()):
                total = Fraction(measure.to_amount(amount))
                yield day, total, total
    else:
        without_plans = sum_exact("usd", ~Q(item=BillableItem.PLAN))
        costs = _find_costs(budget, days).order_by().values_list("day")
        for day, *nanos in costs.annotate(total=sum_exact("usd"), without_plans=without_plans):
            total, rest = (Fraction(nanos_to_decimal(nano)) for nano in nanos)
            yield day, total, rest


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


def _find_costs(budget: Budget, days: Q) -> QuerySet[CostRecord]:
    return CostRecord.objects.filter(build_cost_filter(budget), days)


def _find_call_usage(budget: Budget, began: datetime, days: Q) -> list[QuerySet[UsageRecord]]:
    """Find the usage records of model calls on full days, in disjoint parts."""
    return [UsageRecord.objects.filter(part, days, item=UsageKind.TOKENS) for part in build_call_filters(budget, began)]


def _find_time_records(budget: Budget, began: datetime, days: Q) -> list[QuerySet[UsageRecord]]:
    records = UsageRecord.objects.filter(days, item=UsageKind.TIME, state__in=BILLABLE_STATES)
    return [records.filter(part) for part in build_usage_filters(budget, began)]


def _to_fraction(duration: timedelta) -> Fraction:
    """Return a duration in hours."""
    return Fraction(duration // MICROSECOND, HOUR // MICROSECOND)


def to_hours(duration: timedelta) -> Decimal:
    return Decimal(duration // MICROSECOND) / (HOUR // MICROSECOND)
