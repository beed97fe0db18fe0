"""Where the money goes: the last days by provider, who spends most, and what the month will come to."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import Q

from billing.dates import to_utc_date
from billing.forecast import Forecast, forecast
from billing.models import BillableItem, CostRecord
from billing.money_sums import nanos_to_decimal, sum_exact

WINDOW_DAYS, MAX_SPENDERS = 30, 10
MODEL_CALLS_SERIES, PLANS_SERIES = "model calls", "plans"  # series of their own, whatever the provider
SERIES_BY_ITEM = {str(BillableItem.LLM): MODEL_CALLS_SERIES, str(BillableItem.PLAN): PLANS_SERIES}


@dataclass(frozen=True)
class DailyCost:
    """What one day cost, by the series that have something on it, in the series' order. bar: without plans, of which each is
    charged on one day of its month and would dwarf the others."""

    day: date
    parts: dict[str, Decimal]
    usd: Decimal

    @property
    def bar(self) -> Decimal:
        return self.usd - self.parts.get(PLANS_SERIES, Decimal(0))


@dataclass(frozen=True)
class AgentCost:
    agent_did: str
    usd: Decimal


@dataclass(frozen=True)
class Overview:
    """series: those with any cost, the dearest first, and what each cost. top: the end of the chart's axis."""

    days: list[DailyCost]
    series: dict[str, Decimal]
    usd: Decimal
    top: Decimal
    spenders: list[AgentCost]
    items: dict[str, Decimal]
    forecast: Forecast


def build_overview(*, now: datetime, account: str = "", agent: str = "") -> Overview:
    """The last DAYS days with today, of one account or agent alone if they are named."""
    today = now.astimezone(UTC).date()
    first = today - timedelta(days=WINDOW_DAYS - 1)
    only: Any = {name: value for name, value in (("account", account), ("agent", agent)) if value}
    mine = CostRecord.objects.filter(
        Q(account__name=account) if account else Q(), Q(agent_did=agent) if agent else Q(), day__range=(first, today)
    ).order_by()
    parts: dict[date, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    series: dict[str, int] = defaultdict(int)
    items: dict[str, int] = defaultdict(int)
    for day, provider, item, nano in mine.values_list("day", "provider", "item").annotate(nano=sum_exact("usd")):
        name = SERIES_BY_ITEM.get(item) or provider or "no provider"
        parts[day][name] += nano
        series[name] += nano
        items[item] += nano
    named = {name: nanos_to_decimal(nano) for name, nano in _sort_by_cost(series.items()) if nano}
    days = [_build_daily_cost(first + timedelta(days=number), parts, named) for number in range(WINDOW_DAYS)]
    spenders = mine.values_list("agent_did").annotate(nano=sum_exact("usd")).order_by("-nano", "agent_did")[:MAX_SPENDERS]
    return Overview(
        days=days,
        series=named,
        usd=sum(named.values(), Decimal(0)),
        top=round_up_axis(max(day.bar for day in days)),
        spenders=[AgentCost(did, nanos_to_decimal(nano)) for did, nano in spenders if nano],
        items={item: nanos_to_decimal(nano) for item, nano in _sort_by_cost(items.items()) if nano},
        forecast=forecast(now=now, **only),
    )


def get_costs_to_date(now: datetime) -> tuple[Decimal, Decimal]:
    """What today has cost so far, and this month. One query, of this month's days alone."""
    today = to_utc_date(now)
    month = CostRecord.objects.filter(day__range=(today.replace(day=1), today))
    found = month.aggregate(today=sum_exact("usd", Q(day=today)), month=sum_exact("usd"))
    return nanos_to_decimal(found["today"]), nanos_to_decimal(found["month"])


def _sort_by_cost(sums: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(sums, key=lambda each: (-each[1], each[0]))


def _build_daily_cost(day: date, parts: Any, series: Iterable[str]) -> DailyCost:
    its = {name: nanos_to_decimal(parts[day][name]) for name in series if parts[day].get(name)} if day in parts else {}
    return DailyCost(day, its, sum(its.values(), Decimal(0)))


def round_up_axis(most: Decimal) -> Decimal:
    """The end of an axis that has room for this: the next of 1, 2 and 5 times a power of ten; 1 for nothing at all."""
    if most <= 0:
        return Decimal(1)
    power = Decimal(10) ** most.adjusted()
    return next(step * power for step in (1, 2, 5, 10) if step * power >= most)
