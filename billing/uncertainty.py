"""Uncertainty of a sum of costs or tokens: its estimated part, and the calls without a price, which costs do not include."""

from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

from sandboxes.formatting import pluralize

CENT = Decimal("0.01")


class Uncertainty(NamedTuple):
    """Number of model calls without a price, estimated USD and estimated tokens. The text is empty if all are zero."""

    unpriced: int = 0
    estimated_usd: Decimal = Decimal(0)
    estimated_tokens: int = 0

    def plus(self, other: "Uncertainty") -> "Uncertainty":
        return Uncertainty(
            self.unpriced + other.unpriced,
            self.estimated_usd + other.estimated_usd,
            self.estimated_tokens + other.estimated_tokens,
        )

    @classmethod
    def sum(cls, rows: Iterable[Any]) -> "Uncertainty":
        """Sum the columns `unpriced` and `estimated_usd` of rows of costs."""
        parts = [(row.unpriced, row.estimated_usd) for row in rows]
        return cls(sum(unpriced for unpriced, _ in parts), sum((usd for _, usd in parts), Decimal(0)))

    def __str__(self) -> str:
        parts = []
        if self.estimated_usd:
            cents = self.estimated_usd.quantize(CENT, ROUND_HALF_UP)
            parts.append(f"{cents or self.estimated_usd.normalize():,f} USD estimated")
        if self.estimated_tokens:
            parts.append(f"{self.estimated_tokens:,} tokens estimated")
        if self.unpriced:
            parts.append(f"{pluralize(self.unpriced, 'call', 'calls')} without a price")
        return ", ".join(parts)
