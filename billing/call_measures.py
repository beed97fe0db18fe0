"""Measures of model calls: the columns whose sum is the quantity of a call in USD or in tokens.

Budgets count a call by one measure. The sums in SQL and those of the ORM derive from the same columns."""

from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from operator import add

from django.db.models import BigIntegerField, Case, F, Q, Sum, Value, When
from django.db.models.functions import Coalesce

from billing.models.budgets import Unit
from billing.money_sums import NANOS_PER_UNIT, sum_exact
from billing.uncertainty import Uncertainty
from sandboxes.egress.amounts import MAX_TOKENS, MAX_USD

Columns = tuple[str, ...]  # whose sum is the quantity


@dataclass(frozen=True)
class CallMeasure:
    """Quantity of model calls. A usage record has it in `usage`, and a call in the first of `owed` that is not NULL.

    `metered` is the part of a call that a usage record includes. `estimated` is the estimated part of a usage record. Amounts
    are summed as whole numbers of 1/`parts`. An amount of one call of `limit` or more is out of range, and not counted."""

    usage: Columns
    estimated: str
    owed: tuple[Columns, ...]
    metered: str
    parts: int
    limit: int

    @property
    def usage_sql(self) -> str:
        return " + ".join(self.usage)

    @property
    def owed_sql(self) -> str:
        sums = (columns[0] if len(columns) == 1 else " + ".join(map(self._cap_sql, columns)) for columns in self.owed)
        return f"COALESCE({', '.join(sums)})"

    def build_owed(self) -> Coalesce:
        """Build the quantity of a call: that of its end, and the reservation until then."""
        sums = (
            F(columns[0]) if len(columns) == 1 else reduce(add, (_cap(column, self.limit) for column in columns))
            for columns in self.owed
        )  # fmt: skip
        return Coalesce(*sums)

    def _cap_sql(self, column: str) -> str:
        """Build a column whose amounts out of range are `limit`. The sum of two columns would overflow, and end the pass."""
        return f"CASE WHEN {column} > {self.limit} THEN {self.limit} ELSE {column} END"

    def build_sum_sql(self, amount: str) -> str:
        """Build the sum of an amount as a whole number of parts, in SQL (billing.money_sums.sum_exact)."""
        return f"COALESCE(SUM(CAST(ROUND(({amount}) * {self.parts}) AS BIGINT)), 0)"

    def sum_usage(self, condition: Q | None = None) -> Sum:
        """Build the sum of usage records as a whole number of parts."""
        return sum_exact(reduce(add, map(F, self.usage)), condition, parts=self.parts)

    def to_amount(self, parts: int) -> Decimal:
        return Decimal(int(parts)) / self.parts


USD = CallMeasure(
    usage=("usd",), estimated="estimated_usd", owed=(("cost",), ("reserved",)), metered="metered_cost", parts=NANOS_PER_UNIT,
    limit=int(MAX_USD),
)  # fmt: skip
# The last columns of `owed` are those of calls that ended before the column `tokens` existed.
TOKENS = CallMeasure(
    usage=("input_tokens", "output_tokens", "estimated_tokens"), estimated="estimated_tokens",
    owed=(("tokens",), ("reserved_tokens",), ("input_tokens", "output_tokens")), metered="metered_tokens", parts=1,
    limit=3 * MAX_TOKENS,
)  # fmt: skip
MEASURES = {Unit.USD.value: USD, Unit.TOKENS.value: TOKENS}


def sum_estimated_tokens(owed: str, condition: Q | None = None) -> Sum:
    """Build the sum of the tokens of calls that the upstream did not report. `owed` names their tokens."""
    reported = Coalesce(_cap("input_tokens", TOKENS.limit), 0) + Coalesce(_cap("output_tokens", TOKENS.limit), 0)
    return Sum(F(owed) - reported, filter=condition, default=0)


def build_uncertainty(measure: CallMeasure, unpriced: int, estimated: int) -> Uncertainty:
    """Build the uncertainty of a sum. Calls without a price have tokens, so that a sum of tokens includes them."""
    if measure is TOKENS:
        return Uncertainty(estimated_tokens=int(estimated))
    return Uncertainty(int(unpriced), measure.to_amount(estimated))


def _cap(column: str, limit: int) -> Case:
    return Case(When(**{f"{column}__gt": limit}, then=Value(limit)), default=F(column), output_field=BigIntegerField())
