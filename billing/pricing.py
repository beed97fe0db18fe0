"""Exact arithmetic of prices: (quantity - allowance) x rate. No database access.

Quantities are whole numbers of base units, sums are fractions, and each amount is rounded once, at the end."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Protocol, TypeVar

MICROSECONDS_PER_MINUTE, MICROSECONDS_PER_HOUR = 60 * 10**6, 3600 * 10**6
HOURS_PER_MONTH = 720  # of storage: a month counts as 30 days
DECIMAL_PLACES, CENT_PLACES = 9, 2
BASE_UNITS_PER_UNIT = {
    "time": MICROSECONDS_PER_HOUR,  # microseconds in a sandbox-hour
    "memory": 1024 * MICROSECONDS_PER_HOUR,  # microseconds x MiB in a GiB-hour
    "suspend": 1024 * MICROSECONDS_PER_HOUR,  # microseconds x MiB in a GiB-hour
    "cpu": 1000 * MICROSECONDS_PER_MINUTE,  # microseconds x millicpus in a vCPU-minute
    "disk": 1000 * MICROSECONDS_PER_HOUR,  # microseconds x MB in a GB-hour
    "gpu": MICROSECONDS_PER_HOUR,  # microseconds x GPUs in a GPU-hour
    "storage": 10**9 * HOURS_PER_MONTH * MICROSECONDS_PER_HOUR,  # microseconds x bytes in a GB-month
    "request": 1,
    "plan": 1,
    "llm": 1,
}


class RateLike(Protocol):
    """Price of one item at a provider from `valid_from` on: `usd` per unit, after `allowance` free units a month.

    instance_type: empty if the rate is for every type; of the item "gpu" the type of the GPU.
    by_use: the rate is for measured use, not for allocated resources.
    own: placeholder of 0 for a price that is not entered yet."""

    provider: str
    instance_type: str
    item: str
    usd: Decimal
    allowance: Decimal
    valid_from: datetime
    by_use: bool
    own: bool


RateT = TypeVar("RateT", bound=RateLike)


def find_rate(rates: Iterable[RateT], provider: str, instance_type: str, item: str, at: datetime) -> RateT | None:
    """Return the rate valid at `at`, or None. A rate for the instance type precedes a general one; then the newest wins."""
    valid = [
        rate for rate in rates
        if (rate.provider, rate.item) == (provider, item)
        and rate.instance_type in ("", instance_type) and rate.valid_from <= at
    ]  # fmt: skip
    return max(valid, key=lambda rate: (rate.instance_type, rate.valid_from), default=None)


def compute_allocated_quantities(
    micros: int, *, memory_mib: int, millicpus: int, disk_mb: int, gpus: int = 0
) -> dict[str, int]:
    """Return the resources allocated to a sandbox of this size for `micros` microseconds, in base units by item.

    Without a GPU there is no item for it."""
    quantities = {"time": micros, "memory": micros * memory_mib, "cpu": micros * millicpus, "disk": micros * disk_mb}
    return quantities | ({"gpu": micros * gpus} if gpus else {})


def compute_suspended_quantities(micros: int, *, memory_mib: int, disk_mb: int) -> dict[str, int]:
    """Return what a sandbox suspended for `micros` microseconds keeps allocated, in base units by item.

    The memory has a price of its own, and a suspended sandbox counts neither as sandbox time nor as CPU."""
    return {"suspend": micros * memory_mib, "disk": micros * disk_mb}


def compute_used_quantities(*, cpu_micros: int, mib_micros: int) -> dict[str, int]:
    """Return the measured use of a sandbox, in base units by item."""
    return {"memory": mib_micros, "cpu": 1000 * cpu_micros}


def to_units(item: str, base_units: int) -> Fraction:
    return Fraction(base_units, BASE_UNITS_PER_UNIT[item])


def to_base_units(item: str, amount: Decimal) -> int:
    """Convert an allowance to base units. Exact for six decimal places of divisible items and for whole numbers of others."""
    return int(Fraction(amount) * BASE_UNITS_PER_UNIT[item])


def apply_allowances(lines: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the free part of each line. Lines are (quantity, allowance) in base units, ordered by time.

    Earlier lines use up the allowance first. Each line brings the allowance of its own rate, so a rate with a higher
    allowance in the middle of a month adds the difference to the remainder."""
    taken = 0
    for quantity, allowance in lines:
        free = min(quantity, max(allowance - taken, 0))
        taken += free
        yield free


def compute_cost(item: str, base_units: int, usd: Decimal) -> Fraction:
    """Return the price of a billable quantity in USD, unrounded. `usd` is the rate per unit of the item.

    Example: 935 GiB-hours of memory at 0.009 USD cost 8.415 USD."""
    return to_units(item, base_units) * Fraction(usd)


def round_half_up(amount: Fraction, places: int = DECIMAL_PLACES) -> Decimal:
    """Round a non-negative amount half up to `places` decimal places."""
    scaled = (2 * amount.numerator * 10**places + amount.denominator) // (2 * amount.denominator)
    return Decimal((0, tuple(map(int, str(scaled))), -places))


def format_decimal(amount: Decimal) -> str:
    """Format a decimal without an exponent and without trailing zeros."""
    return f"{amount.normalize():f}" if amount else "0"
