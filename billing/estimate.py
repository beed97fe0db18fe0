"""Price of a month for a given scenario, by the current rates."""

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
    """So many agents, each with a sandbox for some hours on some days of one month. cpu_utilisation: the part of its CPU
    that each uses while it is there, which counts where CPU is priced by use."""

    provider: str
    instance: str
    agents: int
    hours_per_day: Decimal
    days: int
    cpu_utilisation: Decimal


@dataclass(frozen=True)
class EstimateLine:
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
    """There is no such instance type, or no rate of that provider. `field` says which of them."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field


def estimate(asked: Scenario, rates: Iterable[pricing.RateLike], *, now: datetime) -> Estimate:
    """Each line is rounded to cents, a half up, and the total is the sum of that. Unpriceable.

    8 agents for 4 hours a day on 30 days on Cloudflare's `basic` are 8 x 1 GiB x 120 h = 960 GiB-hours, of which 25 are
    free: 935 x 0.009 = 8.415, which is 8.42 USD."""
    size = find_instance_size(asked.provider, asked.instance)
    if size is None:
        raise EstimateError("instance", "There is no such instance type.")
    known: list[pricing.RateLike] = [*rates]
    lines: list[EstimateLine] = []
    for item, quantity in _compute_quantities(asked, size).items():
        rate = pricing.find_rate(known, asked.provider, asked.instance, item, now)
        if rate:
            quantity *= Fraction(asked.cpu_utilisation) if item == BillableItem.CPU and rate.by_use else 1
            free = min(quantity, Fraction(rate.allowance))
            usd = pricing.round_half_up((quantity - free) * Fraction(rate.usd), pricing.CENT_PLACES)
            lines.append(EstimateLine(str(item), pricing.round_half_up(quantity), pricing.round_half_up(free), rate.usd, usd))
    if not lines:
        raise EstimateError("provider", "This provider has no rates.")
    total = sum((line.usd for line in lines), Decimal("0.00"))
    return Estimate(lines, total, pricing.round_half_up(Fraction(total) / asked.agents, pricing.CENT_PLACES))


def _compute_quantities(asked: Scenario, size: InstanceSize) -> dict[str, Fraction]:
    """In the units of the items."""
    hours = asked.agents * Fraction(asked.hours_per_day) * asked.days
    return {
        BillableItem.TIME: hours,
        BillableItem.MEMORY: hours * Fraction(size.memory_mib, 1024),
        BillableItem.CPU: hours * size.vcpus * 60,
        BillableItem.DISK: hours * Fraction(size.disk_mb, 1000),
        BillableItem.PLAN: Fraction(1),
    }
