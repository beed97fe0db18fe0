"""Price of one month of a usage scenario, by the current rates, at one provider or compared between providers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

from billing import pricing
from billing.instance_types import InstanceSize, find_instance_size
from billing.models import BillableItem

RESOURCE_ITEMS = frozenset({BillableItem.MEMORY, BillableItem.CPU, BillableItem.DISK})
# Costs that no usage record measures, so that no rate can price them. Sources: the vendors' pages on container pricing
# (Cloudflare) and on sandbox resources and pricing (Modal), read in November 2026.
EXCLUDED_COSTS = {
    "cloudflare": "network egress, requests of Workers and Durable Objects, logs",
    "modal": "CPU and memory used above the reservation",
}


@dataclass(frozen=True)
class Scenario:
    """Agents with one sandbox each, for some hours a day on some days of one month.

    `cpu_utilisation` is the fraction of its CPU (0 to 1) that a sandbox uses. It affects the price only where CPU is
    charged by use. `suspended_hours_per_day` are further hours in which the sandbox is suspended: it keeps its memory and
    its disk, and uses no CPU."""

    provider: str
    instance: str
    agents: int
    hours_per_day: Decimal
    days: int
    cpu_utilisation: Decimal
    suspended_hours_per_day: Decimal = Decimal(0)
    disk_mib: int | None = None  # None: the disk of the instance type
    gpus: int = 0
    gpu_type: str = ""


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
    """Price of a scenario. `unpriced` are the items that the scenario uses and for which the provider has no rate.

    A provider that charges by the sandbox-hour needs no rates of CPU, memory and disk, and the other way around."""

    lines: list[EstimateLine]
    total: Decimal
    per_agent: Decimal
    unpriced: list[str]


@dataclass(frozen=True)
class ProviderEstimate:
    """Estimate at one of the compared providers. `estimate` is None if the provider has no rate."""

    provider: str
    estimate: Estimate | None
    excluded: str


class EstimateError(ValueError):
    """Unknown instance type, or a provider without rates. `field` is the name of the invalid field of the scenario."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field


def estimate(scenario: Scenario, rates: Iterable[pricing.RateLike], *, now: datetime) -> Estimate:
    """Price a scenario by the rates valid at `now`. Raise EstimateError if it cannot be priced.

    A placeholder (`own`) is no price and does not count. Each line is rounded half up to cents, and the total is the sum of
    the rounded lines.

    Example: 8 agents for 4 hours a day on 30 days on Cloudflare's `basic` use 8 x 1 GiB x 120 h = 960 GiB-hours of
    memory, of which 25 are free: 935 x 0.009 = 8.415, rounded to 8.42 USD."""
    size = find_instance_size(scenario.provider, scenario.instance)
    if size is None:
        raise EstimateError("instance", "Unknown instance type.")
    rates = [rate for rate in rates if not rate.own]
    lines: list[EstimateLine] = []
    unpriced: list[str] = []
    for item, quantity in _compute_quantities(scenario, size).items():
        rate_type = scenario.gpu_type if item == BillableItem.GPU else scenario.instance
        rate = pricing.find_rate(rates, scenario.provider, rate_type, item, now)
        if rate and (quantity or item != BillableItem.SUSPENSION):
            quantity *= Fraction(scenario.cpu_utilisation) if item == BillableItem.CPU and rate.by_use else 1
            free = min(quantity, Fraction(rate.allowance))
            usd = pricing.round_half_up((quantity - free) * Fraction(rate.usd), pricing.CENT_PLACES)
            lines.append(EstimateLine(str(item), pricing.round_half_up(quantity), pricing.round_half_up(free), rate.usd, usd))
        elif quantity and item != BillableItem.PLAN:
            unpriced.append(str(item))
    if not lines:
        raise EstimateError("provider", "This provider has no rates.")
    total = sum((line.usd for line in lines), Decimal("0.00"))
    per_agent = pricing.round_half_up(Fraction(total) / scenario.agents, pricing.CENT_PLACES)
    return Estimate(lines, total, per_agent, _select_missing(unpriced, {line.item for line in lines}))


def compare(
    scenario: Scenario, providers: Sequence[str], rates: Iterable[pricing.RateLike], *, now: datetime
) -> list[ProviderEstimate]:
    """Price the same scenario at several providers, in the order given. Raise EstimateError for an unknown instance type.

    The size is that of the instance type, even if a provider does not sell it. A provider without rates has no estimate."""
    rates, result = [*rates], []
    for provider in providers:
        try:
            priced = estimate(replace(scenario, provider=provider), rates, now=now)
        except EstimateError as error:
            if error.field != "provider":
                raise
            priced = None
        result.append(ProviderEstimate(provider, priced, EXCLUDED_COSTS.get(provider, "")))
    return result


def list_priced_providers(rates: Iterable[pricing.RateLike]) -> list[str]:
    """Return the names of the providers that have a rate of sandboxes, placeholders included."""
    return sorted({rate.provider for rate in rates if rate.item != BillableItem.STORAGE})


def _select_missing(unpriced: list[str], priced: set[str]) -> list[str]:
    """Return the items whose lack of a rate leaves a gap: a price by the hour covers the resources, and theirs the hour."""
    covered = RESOURCE_ITEMS if BillableItem.TIME in priced else {BillableItem.TIME} if priced & RESOURCE_ITEMS else set()
    return [item for item in unpriced if item not in covered]


def _compute_quantities(scenario: Scenario, size: InstanceSize) -> dict[str, Fraction]:
    """Return the quantity of each item, in the item's unit."""
    hours = scenario.agents * Fraction(scenario.hours_per_day) * scenario.days
    suspended_hours = scenario.agents * Fraction(scenario.suspended_hours_per_day) * scenario.days
    disk_gb = Fraction(scenario.disk_mib << 20, 10**9) if scenario.disk_mib else Fraction(size.disk_mb, 1000)
    gpu: dict[str, Fraction] = {BillableItem.GPU: hours * scenario.gpus} if scenario.gpus else {}
    return {
        BillableItem.TIME: hours,
        BillableItem.MEMORY: hours * Fraction(size.memory_mib, 1024),
        BillableItem.CPU: hours * size.vcpus * 60,
        BillableItem.DISK: (hours + suspended_hours) * disk_gb,
        **gpu,
        BillableItem.SUSPENSION: suspended_hours * Fraction(size.memory_mib, 1024),
        BillableItem.PLAN: Fraction(1),
    }
