"""Limits of one lease on the cost and the tokens of its model calls."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Protocol

CallUnit = Literal["usd", "tokens"]
COLUMNS = {"usd": "llm_limit", "tokens": "llm_token_limit"}  # of the tables with limits
MAX_TOKENS = 2**62  # with the tokens of a call, within the range of the column


class CallLimitColumns(Protocol):
    """Row with the limits: of an environment type for its new leases, of a lease, or of the sandbox that a lease holds."""

    llm_limit: Decimal | None
    llm_token_limit: int | None


@dataclass(frozen=True)
class CallLimits:
    """Limits in USD and in tokens. None: unlimited."""

    usd: Decimal | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, row: CallLimitColumns) -> "CallLimits":
        return cls(row.llm_limit, row.llm_token_limit)

    @property
    def columns(self) -> dict[str, Decimal | int | None]:
        """The limits by column."""
        return {column: getattr(self, unit) for unit, column in COLUMNS.items()}


UNLIMITED = CallLimits()
