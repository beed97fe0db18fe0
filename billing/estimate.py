"""Price of one month of a usage scenario, by the current rates."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

from billing import pricing
from billing.instance_types import InstanceSize, find_instance_size
from billing.models import BillableItem


@dataclass(frozen=True)
class Scenario:
    """Agents with one sandbox each, for some hours a day on some days of one month.

    `cpu_utilisation` is the fraction of its CPU (0 to 1) that a sandbox uses. It affects the price only where CPU is
    charged by use."""

    provider: str
    instance: str
    agents: int
    hours_per_day: Decimal
    days: int
    cpu_utilisation: Decimal


@dataclass(frozen=True)
class EstimateLine:
    """One item: `quantity` and `free` in units of the item, `rate` in USD per unit, `usd` in cents."""

    item: str
    quantity: Decimal
    free: Decimal
    rate: Decimal
    usd: Decimal


@dataclass(frozen=True)
class Estimate:
    lines: list[EstimateLine]
    total: Decimal
    per_agent: Decimal


class EstimateError(ValueError):
    """Unknown instance type, or a provider without rates. `field` is the name of the invalid field of the scenario."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field


def estimate(scenario: Scenario, rates: Iterable[pricing.RateLike], *, now: datetime) -> Estimate:
    """Price a scenario by the rates valid at `now`. Raise EstimateError if it cannot be priced.

    Each line is rounded half up to cents, and the total is the sum of the rounded lines.

    Example: 8 agents for 4 hours a day on 30 days on Cloudflare's `basic` use 8 x 1 GiB x 120 h = 960 GiB-hours of
    memory, of which 25 are free: 935 x 0.009 = 8.415, rounded to 8.42 USD."""
    size = find_instance_size(scenario.provider, scenario.instance)
    if size is None:
        raise EstimateError("instance", "Unknown instance type.")
    rates = [*rates]
    lines: list[EstimateLine] = []
    for item, quantity in _compute_quantities(scenario, size).items():
        rate = pricing.find_rate(rates, scenario.provider, scenario.instance, item, now)
        if rate:
            quantity *= Fraction(scenario.cpu_utilisation) if item == BillableItem.CPU and rate.by_use else 1
            free = min(quantity, Fraction(rate.allowance))
            usd = pricing.round_half_up((quantity - free) * Fraction(rate.usd), pricing.CENT_PLACES)
            lines.append(EstimateLine(str(item), pricing.round_half_up(quantity), pricing.round_half_up(free), rate.usd, usd))
    if not lines:
        raise EstimateError("provider", "This provider has no rates.")
    total = sum((line.usd for line in lines), Decimal("0.00"))
    return Estimate(lines, total, pricing.round_half_up(Fraction(total) / scenario.agents, pricing.CENT_PLACES))


def _compute_quantities(scenario: Scenario, size: InstanceSize) -> dict[str, Fraction]:
    """Return the quantity of each item, in the item's unit."""
    hours = scenario.agents * Fraction(scenario.hours_per_day) * scenario.days
    return {
        BillableItem.TIME: hours,
        BillableItem.MEMORY: hours * Fraction(size.memory_mib, 1024),
        BillableItem.CPU: hours * size.vcpus * 60,
        BillableItem.DISK: hours * Fraction(size.disk_mb, 1000),
        BillableItem.PLAN: Fraction(1),
    }
