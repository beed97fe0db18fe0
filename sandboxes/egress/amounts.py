"""Amounts of money as others state them."""

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

NANO_USD, MAX_USD = Decimal("1e-9"), Decimal(10**9)  # USD: what a column of ours holds


def parse_usd(said: object) -> Decimal | None:
    """USD to nine places; None for what is no amount: not a number, not finite, below 0, or more than a column holds."""
    if isinstance(said, bool) or not isinstance(said, int | float | str | Decimal):
        return None
    try:
        usd = Decimal(str(said)).quantize(NANO_USD, ROUND_HALF_UP)
    except InvalidOperation:
        return None
    return abs(usd) if usd.is_finite() and 0 <= usd < MAX_USD else None  # abs: a zero may be negative
