"""Quantities of Kubernetes, such as 512Mi or 250m."""

from decimal import Decimal, InvalidOperation

MEBI, MILLI = Decimal(1 << 20), Decimal("0.001")
SUFFIX_POWERS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_quantity(quantity: str, unit: Decimal) -> int | None:
    """Return a quantity in whole units. None if it is not a quantity."""
    number, factor = quantity, Decimal(1)
    if quantity.endswith("m"):
        number, factor = quantity[:-1], MILLI
    for suffix, power in SUFFIX_POWERS.items():
        if quantity.endswith(suffix):
            number, factor = quantity.removesuffix(suffix), Decimal(power)
            break
    try:
        return int(Decimal(number) * factor / unit)
    except InvalidOperation:
        return None
