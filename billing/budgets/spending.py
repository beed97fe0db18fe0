"""Budget spending"""

from collections import defaultdict
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction

from django.db.models import Q, QuerySet

from billing.budgets.periods import get_period_bounds
from billing.budgets.scopes import build_cost_filter, build_usage_filters, find_open_tabs
from billing.intervals import MICROSECOND
from billing.models import BillableItem, Budget, CostRecord, Tab, UsageKind, UsageRecord
from billing.models.budgets import Unit
from billing.money_sums import nanos_to_decimal, sum_exact
from billing.totals import BILLABLE_STATES, TOTAL_DURATION

HOUR = timedelta(hours=1)
NINE_PLACES = Decimal("1e-9")


def sum_spending(budget: Budget, began: datetime, ends: datetime | None) -> Decimal:
    """What is derived so far of what was used in its scope in one period: usage up to the watermark, and its costs."""
    if budget.unit == Unit.USD:
        return nanos_to_decimal(_find_cost_records(budget, began, ends).aggregate(nano=sum_exact("usd"))["nano"])
    lasted = [part.aggregate(sum=TOTAL_DURATION)["sum"] for part in _find_time_records(budget, began, ends)]
    return to_hours(sum(filter(None, lasted), timedelta(0))).quantize(NINE_PLACES)


def sum_spending_by_day(budget: Budget, since: datetime, ends: datetime | None) -> dict[date, tuple[Fraction, Fraction]]:
    """The same of each day on which something was used, not rounded: all of it, and what is no plan. One query, or
    two."""
    if budget.unit == Unit.USD:
        costs = _find_cost_records(budget, since, ends).order_by().values_list("day")
        sums = costs.annotate(all=sum_exact("usd"), used=sum_exact("usd", ~Q(item=BillableItem.PLAN)))
        return {day: (Fraction(nanos_to_decimal(all_)), Fraction(nanos_to_decimal(used))) for day, all_, used in sums}
    lasted: dict[date, timedelta] = defaultdict(timedelta)
    for part in _find_time_records(budget, since, ends):
        for day, sum_ in part.order_by().values_list("day").annotate(sum=TOTAL_DURATION):
            lasted[day] += sum_
    return {day: (Fraction(sum_ // MICROSECOND, HOUR // MICROSECOND),) * 2 for day, sum_ in lasted.items()}


def find_top_spenders(budget: Budget, *, now: datetime, most: int) -> list[tuple[Tab, Decimal]]:
    """Its open tabs that have spent the most in its present period, and what each has; the newest of those with nothing."""
    began, ends = get_period_bounds(budget.period, now)
    open_ = find_open_tabs(budget, now=now)
    if budget.unit == Unit.USD:
        costs = _find_cost_records(budget, began, ends).filter(holder__in=open_.values("holder")).order_by()
        nano = costs.values_list("holder").annotate(sum=sum_exact("usd")).order_by("-sum", "holder")[:most]
        spent = {holder: nanos_to_decimal(sum_) for holder, sum_ in nano}
    else:
        used = [part.filter(holder__in=open_.values("holder")).order_by() for part in _find_time_records(budget, began, ends)]
        lasted = [each for part in used for each in part.values_list("holder").annotate(sum=TOTAL_DURATION)]
        spent = {holder: to_hours(sum_) for holder, sum_ in sorted(lasted, key=lambda each: (-each[1], each[0]))[:most]}
    tabs = {tab.holder: tab for tab in Tab.objects.filter(holder__in=spent)}
    found = [(tabs[holder], amount) for holder, amount in spent.items()]
    if len(found) < most:
        rest = open_.exclude(holder__in=spent).order_by("-opened_at", "holder")[: most - len(found)]
        found += [(tab, Decimal(0)) for tab in rest]
    return found


def _build_day_filter(began: datetime, ends: datetime | None) -> Q:
    return Q(day__gte=began.date()) & (Q(day__lt=ends.date()) if ends else Q())


def _find_cost_records(budget: Budget, began: datetime, ends: datetime | None) -> QuerySet[CostRecord]:
    return CostRecord.objects.filter(build_cost_filter(budget), _build_day_filter(began, ends))


def _find_time_records(budget: Budget, began: datetime, ends: datetime | None) -> list[QuerySet[UsageRecord]]:
    time_ = UsageRecord.objects.filter(_build_day_filter(began, ends), item=UsageKind.TIME, state__in=BILLABLE_STATES)
    return [time_.filter(part) for part in build_usage_filters(budget, began)]


def to_hours(lasted: timedelta) -> Decimal:
    return Decimal(lasted // MICROSECOND) / (HOUR // MICROSECOND)
