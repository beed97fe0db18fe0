"""Exact sums of decimal columns. SQLite adds decimals as floating-point numbers, so integers are summed instead."""

from decimal import Decimal

import structlog
from django.db.models import BigIntegerField, DecimalField, ExpressionWrapper, F, Q, Sum
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, Round

log = structlog.get_logger(__name__)
NANOS_PER_UNIT, CENTS_PER_UNIT = 10**9, 100
MAX_RECORD_USD = Decimal(10**6)  # of one lease, item and day. About 9,000 records of this size overflow an exact sum


def sum_exact(field: str | Combinable, condition: Q | None = None, *, parts: int = NANOS_PER_UNIT) -> Sum:
    """Build an exact SUM of a column or an expression as a whole number of 1/`parts`, over the rows that match `condition`.

    The default, billionths, fits columns with nine decimal places. For columns with fewer places and larger numbers pass
    fewer parts: the sum overflows a 64-bit integer at about 9.2e18 parts."""
    return Sum(count_parts(field, parts), filter=condition, default=0)


def count_parts(field: str | Combinable, parts: int = NANOS_PER_UNIT) -> Cast:
    """Build a decimal column as a whole number of 1/`parts`."""
    whole = ExpressionWrapper(
        (F(field) if isinstance(field, str) else field) * parts, DecimalField(max_digits=30, decimal_places=9)
    )
    return Cast(Round(whole), BigIntegerField())


def nanos_to_decimal(billionths: int) -> Decimal:
    return Decimal(billionths).scaleb(-9)


def limit_usd(usd: Decimal, **fields: str) -> Decimal:
    """Return `usd`, or MAX_RECORD_USD with an error in the log if it is more. `fields` identify the record in the log."""
    if usd <= MAX_RECORD_USD:
        return usd
    log.error("cost limited to the largest amount of a record", usd=str(usd), limit=str(MAX_RECORD_USD), **fields)
    return MAX_RECORD_USD
