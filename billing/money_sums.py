"""Exact sums of money in the database: SQLite adds decimals as floating point numbers."""

from decimal import Decimal

from django.db.models import BigIntegerField, DecimalField, ExpressionWrapper, F, Q, Sum
from django.db.models.functions import Cast, Round

NANOS_PER_UNIT, CENTS_PER_UNIT = 10**9, 100


def sum_exact(field: str, of: Q | None = None, *, parts: int = NANOS_PER_UNIT) -> Sum:
    """The sum of a column with nine decimal places, in billionths; of some rows, if they are named. Of one with fewer places,
    and perhaps larger numbers (some 9e18 parts fit), in that many parts of one."""
    whole = ExpressionWrapper(F(field) * parts, DecimalField(max_digits=30, decimal_places=9))
    return Sum(Cast(Round(whole), BigIntegerField()), filter=of, default=0)


def nanos_to_decimal(billionths: int) -> Decimal:
    return Decimal(billionths).scaleb(-9)
