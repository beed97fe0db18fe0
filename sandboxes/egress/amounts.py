"""Parsing of amounts received from upstreams: USD and token counts.

A value outside its range is refused, so that a faulty upstream can neither overflow a sum nor stop metering."""

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

NANO_USD = Decimal("1e-9")  # precision of the cost columns
MAX_USD = Decimal(10_000)  # of one call
MAX_TOKENS = 10**9  # of one kind in one call
# Error codes of answered calls: out of range is the cost or a token count that the upstream stated, or the price by rate.
REFUSED_AMOUNT_CODE, REFUSED_PRICE_CODE = REFUSED_CODES = ("amount_refused", "price_refused")


def parse_usd(value: object) -> Decimal | None:
    """Parse an amount in USD, rounded to nine decimal places. Return None unless it is a number in [0, MAX_USD)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        usd = Decimal(str(value)).quantize(NANO_USD, ROUND_HALF_UP)
    except InvalidOperation:
        return None
    return abs(usd) if usd.is_finite() and 0 <= usd < MAX_USD else None  # abs() removes the sign of a negative zero


def parse_tokens(value: object) -> int | None:
    """Parse a token count. Return None unless it is a whole number, also one such as 10.0, in [0, MAX_TOKENS]."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None
