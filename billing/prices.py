"""Hourly prices of sandboxes at their limits, to compare providers."""

from collections.abc import Sequence
from datetime import datetime
from fractions import Fraction

from billing.budgets.reservation import price_hour
from billing.instance_types import SandboxSize
from billing.models import BillableItem, Rate
from billing.pricing import find_rate

SANDBOX_ITEMS = (BillableItem.TIME, BillableItem.MEMORY, BillableItem.CPU)


def compute_hourly_prices(sizes: Sequence[SandboxSize], *, at: datetime) -> list[Fraction | None]:
    """Return the USD of one hour of a sandbox of each size, without monthly allowances. None: the provider has no rates.

    One query for any number of sizes."""
    rates = [*Rate.objects.all()]
    return [price_hour(size, rates, at) if _is_priced(size.provider, rates, at) else None for size in sizes]


def _is_priced(provider: str, rates: list[Rate], at: datetime) -> bool:
    """Return whether an operator or a price page has set a price. A placeholder of 0 is none."""
    named = {rate.instance_type for rate in rates if rate.provider == provider}
    found = [find_rate(rates, provider, name, item, at) for name in named for item in SANDBOX_ITEMS]
    return any(rate is not None and not rate.own for rate in found)
