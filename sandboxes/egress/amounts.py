"""Parsing of USD amounts received from upstreams."""

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

NANO_USD, MAX_USD = Decimal("1e-9"), Decimal(10**9)  # precision and range of the cost columns


def parse_usd(value: object) -> Decimal | None:
    """Parse an amount in USD, rounded to nine decimal places. Return None unless it is a number in [0, MAX_USD)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        usd = Decimal(str(value)).quantize(NANO_USD, ROUND_HALF_UP)
    except InvalidOperation:
        return None
    return abs(usd) if usd.is_finite() and 0 <= usd < MAX_USD else None  # abs: removes the sign of a negative zero
