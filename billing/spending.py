"""Where the money goes: the last days by provider, who spends most, and what the month will come to."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import Q

from billing.dates import day_of
from billing.estimate import Forecast, forecast
from billing.models import CostRecord, Priced
from billing.money_sums import exactly, nano_usd

DAYS, MOST = 30, 10
MODELS, PLANS = "model calls", "plans"  # series of their own, whatever the provider
APART = {str(Priced.LLM): MODELS, str(Priced.PLAN): PLANS}


@dataclass(frozen=True)
class Day:
    """What one day cost, by the series that have something on it, in the series' order. bar: without plans, of which each is
    charged on one day of its month and would dwarf the others."""

    day: date
    parts: dict[str, Decimal]
    usd: Decimal

    @property
    def bar(self) -> Decimal:
        return self.usd - self.parts.get(PLANS, Decimal(0))


@dataclass(frozen=True)
class Spender:
    agent_did: str
    usd: Decimal


@dataclass(frozen=True)
class Overview:
    """series: those with any cost, the dearest first, and what each cost. top: the end of the chart's axis."""

    days: list[Day]
    series: dict[str, Decimal]
    usd: Decimal
    top: Decimal
    spenders: list[Spender]
    items: dict[str, Decimal]
    forecast: Forecast


def look(*, now: datetime, account: str = "", agent: str = "") -> Overview:
    """The last DAYS days with today, of one account or agent alone if they are named."""
    today = now.astimezone(UTC).date()
    first = today - timedelta(days=DAYS - 1)
    only: Any = {name: value for name, value in (("account", account), ("agent", agent)) if value}
    mine = CostRecord.objects.filter(
        Q(account__name=account) if account else Q(), Q(agent_did=agent) if agent else Q(), day__range=(first, today)
    ).order_by()
    parts: dict[date, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    series: dict[str, int] = defaultdict(int)
    items: dict[str, int] = defaultdict(int)
    for day, provider, item, nano in mine.values_list("day", "provider", "item").annotate(nano=exactly("usd")):
        name = APART.get(item) or provider or "no provider"
        parts[day][name] += nano
        series[name] += nano
        items[item] += nano
    named = {name: nano_usd(nano) for name, nano in _dearest(series.items()) if nano}
    days = [_day(first + timedelta(days=number), parts, named) for number in range(DAYS)]
    spenders = mine.values_list("agent_did").annotate(nano=exactly("usd")).order_by("-nano", "agent_did")[:MOST]
    return Overview(
        days=days,
        series=named,
        usd=sum(named.values(), Decimal(0)),
        top=nice(max(day.bar for day in days)),
        spenders=[Spender(did, nano_usd(nano)) for did, nano in spenders if nano],
        items={item: nano_usd(nano) for item, nano in _dearest(items.items()) if nano},
        forecast=forecast(now=now, **only),
    )


def so_far(now: datetime) -> tuple[Decimal, Decimal]:
    """What today has cost so far, and this month. One query, of this month's days alone."""
    today = day_of(now)
    month = CostRecord.objects.filter(day__range=(today.replace(day=1), today))
    found = month.aggregate(today=exactly("usd", Q(day=today)), month=exactly("usd"))
    return nano_usd(found["today"]), nano_usd(found["month"])


def _dearest(sums: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(sums, key=lambda each: (-each[1], each[0]))


def _day(day: date, parts: Any, series: Iterable[str]) -> Day:
    its = {name: nano_usd(parts[day][name]) for name in series if parts[day].get(name)} if day in parts else {}
    return Day(day, its, sum(its.values(), Decimal(0)))


def nice(most: Decimal) -> Decimal:
    """The end of an axis that has room for this: the next of 1, 2 and 5 times a power of ten; 1 for nothing at all."""
    if most <= 0:
        return Decimal(1)
    power = Decimal(10) ** most.adjusted()
    return next(step * power for step in (1, 2, 5, 10) if step * power >= most)
