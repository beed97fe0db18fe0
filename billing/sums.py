"""Exact sums of money in the database: SQLite adds decimals as floating point numbers."""

from decimal import Decimal

from django.db.models import BigIntegerField, DecimalField, ExpressionWrapper, F, Q, Sum
from django.db.models.functions import Cast, Round

NANO = 10**9


def exactly(field: str, of: Q | None = None) -> Sum:
    """The sum of a column with nine decimal places, in billionths; of some rows, if they are named."""
    billionths = ExpressionWrapper(F(field) * NANO, DecimalField(max_digits=30, decimal_places=9))
    return Sum(Cast(Round(billionths), BigIntegerField()), filter=of, default=0)


def nano_usd(billionths: int) -> Decimal:
    return Decimal(billionths).scaleb(-9)
