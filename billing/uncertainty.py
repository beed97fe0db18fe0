"""Uncertainty of a sum of costs: its estimated part, and the model calls without a price, which it does not include."""

from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

from sandboxes.formatting import pluralize

CENT = Decimal("0.01")


class Uncertainty(NamedTuple):
    """Number of model calls without a price, and estimated USD. The text is empty if both are zero."""

    unpriced: int = 0
    estimated_usd: Decimal = Decimal(0)

    @classmethod
    def sum(cls, rows: Iterable[Any]) -> "Uncertainty":
        """Sum the columns `unpriced` and `estimated_usd` of rows."""
        parts = [(row.unpriced, row.estimated_usd) for row in rows]
        return cls(sum(unpriced for unpriced, _ in parts), sum((usd for _, usd in parts), Decimal(0)))

    def __str__(self) -> str:
        parts = []
        if self.estimated_usd:
            cents = self.estimated_usd.quantize(CENT, ROUND_HALF_UP)
            parts.append(f"{cents or self.estimated_usd.normalize():,f} USD estimated")
        if self.unpriced:
            parts.append(f"{pluralize(self.unpriced, 'call', 'calls')} without a price")
        return ", ".join(parts)
