"""Units in which vendors state prices, and their conversion to the units of rates."""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from billing import pricing
from billing.models.rates import BillableItem

GB_PER_GIB = Fraction(1024**3, 10**9)
VCPUS_PER_CORE = 2  # of a physical core, which Modal prices: its guide on sandbox resources, November 2026
RATE_PLACES = 12  # decimal places of a rate


@dataclass(frozen=True)
class SourceUnit:
    """Unit of a stated price: the priced item, and how many of these units are one unit of the rate."""

    item: BillableItem
    per_rate_unit: Fraction


SOURCE_UNITS: dict[str, SourceUnit] = {
    "vcpu-second": SourceUnit(BillableItem.CPU, Fraction(60)),
    "vcpu-minute": SourceUnit(BillableItem.CPU, Fraction(1)),
    "vcpu-hour": SourceUnit(BillableItem.CPU, Fraction(1, 60)),
    "core-second": SourceUnit(BillableItem.CPU, Fraction(60, VCPUS_PER_CORE)),
    "core-hour": SourceUnit(BillableItem.CPU, Fraction(1, 60 * VCPUS_PER_CORE)),
    "memory-gib-second": SourceUnit(BillableItem.MEMORY, Fraction(3600)),
    "memory-gib-hour": SourceUnit(BillableItem.MEMORY, Fraction(1)),
    "disk-gb-second": SourceUnit(BillableItem.DISK, Fraction(3600)),
    "disk-gb-hour": SourceUnit(BillableItem.DISK, Fraction(1)),
    "disk-gib-second": SourceUnit(BillableItem.DISK, Fraction(3600) / GB_PER_GIB),
    "disk-gib-hour": SourceUnit(BillableItem.DISK, 1 / GB_PER_GIB),
    "gpu-second": SourceUnit(BillableItem.GPU, Fraction(3600)),
    "gpu-hour": SourceUnit(BillableItem.GPU, Fraction(1)),
    "suspended-gib-hour": SourceUnit(BillableItem.SUSPENSION, Fraction(1)),
    "storage-gb-month": SourceUnit(BillableItem.STORAGE, Fraction(1)),
    "storage-gib-month": SourceUnit(BillableItem.STORAGE, 1 / GB_PER_GIB),
    "sandbox-second": SourceUnit(BillableItem.TIME, Fraction(3600)),
    "sandbox-hour": SourceUnit(BillableItem.TIME, Fraction(1)),
    "run": SourceUnit(BillableItem.REQUEST, Fraction(1)),
    "plan-month": SourceUnit(BillableItem.PLAN, Fraction(1)),
}


def convert_price(usd: Decimal, unit: str) -> tuple[BillableItem, Decimal]:
    """Return the item and the rate, in USD per unit of the item, of a stated price. Rounded half up to 12 decimal places.

    Example: 0.000020 USD per vCPU-second are 0.0012 USD per vCPU-minute."""
    source = SOURCE_UNITS[unit]
    return source.item, pricing.round_half_up(Fraction(usd) * source.per_rate_unit, RATE_PLACES)
