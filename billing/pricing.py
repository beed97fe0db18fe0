"""Quantity x rate - allowance, exactly: quantities are whole numbers of the smallest units there are, sums are fractions,
and each amount is rounded once, at its end. No database here."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Protocol, TypeVar

MICROSECONDS_PER_MINUTE, MICROSECONDS_PER_HOUR = 60 * 10**6, 3600 * 10**6  # microseconds
HOURS_PER_MONTH = 720  # hours, for storage: 30 days
DECIMAL_PLACES, CENT_PLACES = 9, 2
# How many of the smallest units one unit of an item has.
BASE_UNITS_PER_UNIT = {
    "time": MICROSECONDS_PER_HOUR,  # microseconds in a sandbox-hour
    "memory": 1024 * MICROSECONDS_PER_HOUR,  # microseconds x MiB in a GiB-hour
    "cpu": 1000 * MICROSECONDS_PER_MINUTE,  # microseconds x thousandths of a CPU in a vCPU-minute
    "disk": 1000 * MICROSECONDS_PER_HOUR,  # microseconds x MB in a GB-hour
    "storage": 10**9 * HOURS_PER_MONTH * MICROSECONDS_PER_HOUR,  # microseconds x bytes in a GB-month
    "request": 1,
    "plan": 1,
    "llm": 1,
}


class RateLike(Protocol):
    """What one unit of an item costs at a provider from a moment on. instance_type is empty if it is for any; by_use: one of
    what was used, not of what was given."""

    provider: str
    instance_type: str
    item: str
    usd: Decimal
    allowance: Decimal
    valid_from: datetime
    by_use: bool


RateT = TypeVar("RateT", bound=RateLike)


def find_rate(rates: Iterable[RateT], provider: str, instance_type: str, item: str, at: datetime) -> RateT | None:
    """The rate that counts at a moment, None if there was none: one for this instance type before one for any, then the
    newest that has begun."""
    valid = [
        rate for rate in rates
        if (rate.provider, rate.item) == (provider, item)
        and rate.instance_type in ("", instance_type) and rate.valid_from <= at
    ]  # fmt: skip
    return max(valid, key=lambda rate: (rate.instance_type, rate.valid_from), default=None)


def compute_allocated_quantities(micros: int, *, memory_mib: int, millicpus: int, disk_mb: int) -> dict[str, int]:
    """What a sandbox of this size has in so many microseconds, whether it uses it or not, in the smallest units."""
    return {"time": micros, "memory": micros * memory_mib, "cpu": micros * millicpus, "disk": micros * disk_mb}


def compute_used_quantities(*, cpu_micros: int, mib_micros: int) -> dict[str, int]:
    """What was measured of a sandbox, in the smallest units."""
    return {"memory": mib_micros, "cpu": 1000 * cpu_micros}


def to_units(item: str, whole: int) -> Fraction:
    return Fraction(whole, BASE_UNITS_PER_UNIT[item])


def to_base_units(item: str, amount: Decimal) -> int:
    """An allowance in the smallest units; it has six decimal places at most, or is a whole number."""
    return int(Fraction(amount) * BASE_UNITS_PER_UNIT[item])


def apply_allowances(lines: Iterable[tuple[int, int]]) -> Iterator[int]:
    """How much of each line is free. Lines are (whole, allowance), in the order of time: whoever comes first uses it up.

    The allowance is that of the line's own rate: one that is raised in the middle of a month adds to what is left."""
    taken = 0
    for whole, allowance in lines:
        free = min(whole, max(allowance - taken, 0))
        taken += free
        yield free


def compute_cost(item: str, whole: int, usd: Decimal) -> Fraction:
    """Money, not rounded, for what is not free of it.

    935 GiB-hours of memory at 0.009 USD are 8.415 USD."""
    return to_units(item, whole) * Fraction(usd)


def round_half_up(amount: Fraction, places: int = DECIMAL_PLACES) -> Decimal:
    """An amount that is not below 0 to so many decimal places, a half up."""
    scaled = (2 * amount.numerator * 10**places + amount.denominator) // (2 * amount.denominator)
    return Decimal((0, tuple(map(int, str(scaled))), -places))


def format_decimal(amount: Decimal) -> str:
    """A decimal number without exponent and without the zeros that a column fills up with."""
    return f"{amount.normalize():f}" if amount else "0"
