"""Cost overview: the last 30 days by provider, the most expensive agents and the forecast of the month."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from billing.dates import to_utc_date
from billing.forecast import Forecast, forecast
from billing.grouping import Selection
from billing.model_sums import TokenCounts, sum_model_calls
from billing.models import BillableItem
from billing.money_sums import nanos_to_decimal
from billing.totals import sum_amounts, sum_usd
from billing.uncertainty import Uncertainty

WINDOW_DAYS, MAX_SPENDERS, MAX_MODELS = 30, 10, 20
MODEL_CALLS_SERIES, PLANS_SERIES = "model calls", "plans"  # costs of these items are not split by provider
SERIES_BY_ITEM = {str(BillableItem.LLM): MODEL_CALLS_SERIES, str(BillableItem.PLAN): PLANS_SERIES}


@dataclass(frozen=True)
class DailyCost:
    """Costs of one day in USD. `parts` has the series with costs on that day, in the order of Overview.series."""

    day: date
    parts: dict[str, Decimal]
    usd: Decimal

    @property
    def bar(self) -> Decimal:
        """Height of the day's bar: costs without plans. A plan's monthly charge on one day would dwarf the other days."""
        return self.usd - self.parts.get(PLANS_SERIES, Decimal(0))


@dataclass(frozen=True)
class AgentCost:
    agent_did: str
    usd: Decimal


@dataclass(frozen=True)
class ModelCost:
    """Calls to one model, their tokens and their cost in USD."""

    model: str
    calls: int
    tokens: TokenCounts
    usd: Decimal
    uncertainty: Uncertainty


@dataclass(frozen=True)
class Overview:
    """Costs in USD by day, series, agent, item and model.

    series: total of each series with any cost, most expensive first.
    models: the most expensive models. None while the totals by model are not derived.
    top: upper end of the chart's axis."""

    days: list[DailyCost]
    series: dict[str, Decimal]
    usd: Decimal
    top: Decimal
    spenders: list[AgentCost]
    items: dict[str, Decimal]
    models: list[ModelCost] | None
    forecast: Forecast
    uncertainty: Uncertainty


def build_overview(*, now: datetime, account: str = "", agent: str = "") -> Overview:
    """Build the overview of the last WINDOW_DAYS days including today, optionally of one account or agent."""
    today = now.astimezone(UTC).date()
    first = today - timedelta(days=WINDOW_DAYS - 1)
    filters: Any = {name: value for name, value in (("account", account), ("agent", agent)) if value}
    window: Any = {"since": first, "until": today + timedelta(days=1), **filters}
    parts: dict[date, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    series: dict[str, int] = defaultdict(int)
    items: dict[str, int] = defaultdict(int)
    uncertainties: list[Uncertainty] = []
    for day, provider, item, nano, unpriced, estimated in sum_amounts("day", "provider", "item", **window):
        name = SERIES_BY_ITEM.get(item) or provider or "no provider"
        parts[day][name] += nano
        series[name] += nano
        items[item] += nano
        uncertainties.append(Uncertainty(unpriced, nanos_to_decimal(estimated)))
    totals = {name: nanos_to_decimal(nano) for name, nano in _sort_by_cost(series.items()) if nano}
    days = [_build_daily_cost(first + timedelta(days=number), parts, totals) for number in range(WINDOW_DAYS)]
    agents = _sort_by_cost(sum_usd("agent", **window))[:MAX_SPENDERS]
    return Overview(
        days=days,
        series=totals,
        usd=sum(totals.values(), Decimal(0)),
        top=round_up_axis(max(day.bar for day in days)),
        spenders=[AgentCost(did, nanos_to_decimal(nano)) for did, nano in agents if nano],
        items={item: nanos_to_decimal(nano) for item, nano in _sort_by_cost(items.items()) if nano},
        models=_list_models(Selection(first, today + timedelta(days=1), filters=filters)),
        forecast=forecast(now=now, **filters),
        uncertainty=Uncertainty.sum(uncertainties),
    )


def _list_models(selection: Selection) -> list[ModelCost] | None:
    sums = sum_model_calls("model", selection)
    if sums is None:
        return None
    models = sorted(sums.items(), key=lambda each: (-each[1].usd, -each[1].calls, each[0]))[:MAX_MODELS]
    return [
        ModelCost(
            model, usage.calls, TokenCounts.of(usage), nanos_to_decimal(usage.usd),
            Uncertainty(usage.unpriced, nanos_to_decimal(usage.estimated_usd)),
        )
        for model, usage in models
    ]  # fmt: skip


@dataclass(frozen=True)
class CostToDate:
    """Cost of a period up to now, in USD."""

    usd: Decimal
    uncertainty: Uncertainty


def get_costs_to_date(now: datetime) -> tuple[CostToDate, CostToDate]:
    """Return the costs of today and of this month so far. One query over this month's days."""
    today = to_utc_date(now)
    days = sum_amounts("day", since=today.replace(day=1), until=today + timedelta(days=1))
    return _build_cost_to_date(each for each in days if each[0] == today), _build_cost_to_date(days)


def _build_cost_to_date(days: Iterable[tuple[Any, ...]]) -> CostToDate:
    nano, unpriced, estimated = (sum(amounts) for amounts in [*zip(*days, strict=True)][1:] or [(), (), ()])
    return CostToDate(nanos_to_decimal(nano), Uncertainty(unpriced, nanos_to_decimal(estimated)))


def _sort_by_cost(sums: Iterable[tuple[Any, ...]]) -> list[tuple[str, int]]:
    return sorted(sums, key=lambda each: (-each[1], each[0]))


def _build_daily_cost(day: date, parts: Any, series: Iterable[str]) -> DailyCost:
    costs = {name: nanos_to_decimal(parts[day][name]) for name in series if parts[day].get(name)} if day in parts else {}
    return DailyCost(day, costs, sum(costs.values(), Decimal(0)))


def round_up_axis(highest: Decimal) -> Decimal:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `highest`; 1 if `highest` is not positive."""
    if highest <= 0:
        return Decimal(1)
    power = Decimal(10) ** highest.adjusted()
    return next(step * power for step in (1, 2, 5, 10) if step * power >= highest)
