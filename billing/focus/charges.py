"""Charges of a month: the lines of its statement, or the parts of a line by day and lease."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from uuid import UUID

from billing.dates import start_of_next_month
from billing.model_sums import TokenCounts
from billing.models import Rate, StatementCharge, StatementLine
from billing.statement_charges import LineCharges

NO_TOKENS = TokenCounts()


@dataclass(frozen=True)
class Charge:
    """Quantity and amount of a statement line or of a part of one, and the days `begin` to `end`, exclusive, of the use."""

    begin: date
    end: date
    agent_did: str
    provider: str
    item: str
    rate: Rate | None
    quantity: Decimal
    free: Decimal
    usd: Decimal
    unpriced: int
    estimated_usd: Decimal
    is_correction: bool = False
    lease: UUID | None = None
    environment: str = ""
    environment_type: str = ""
    project: str = ""
    model: str = ""
    tokens: TokenCounts = NO_TOKENS
    has_estimated_tokens: bool = True  # False: of a month that was closed before lines had estimated tokens


@dataclass(frozen=True)
class Rounding:
    """Difference between a line in cents and the sum of its parts."""

    line: Charge
    usd: Decimal


def charge_line(line: StatementLine) -> Charge:
    return Charge(
        begin=line.for_month, end=start_of_next_month(line.for_month), agent_did=line.agent_did, provider=line.provider,
        item=line.item, rate=line.rate, quantity=line.quantity, free=line.free, usd=line.usd, unpriced=line.unpriced,
        estimated_usd=line.estimated_usd, is_correction=line.kind == StatementLine.Kind.CORRECTION, model=line.model,
        tokens=TokenCounts.of(line), has_estimated_tokens=line.estimated_tokens is not None,
    )  # fmt: skip


def _charge_part(line: StatementLine, part: StatementCharge) -> Charge:
    return Charge(
        begin=part.day, end=part.day + timedelta(days=1), agent_did=line.agent_did, provider=line.provider, item=line.item,
        rate=line.rate, quantity=part.quantity, free=part.free, usd=part.usd, unpriced=part.unpriced,
        estimated_usd=part.estimated_usd, lease=part.holder, environment=part.environment_id,
        environment_type=part.environment_type, project=part.project, model=line.model, tokens=TokenCounts.of(part),
        has_estimated_tokens=line.estimated_tokens is not None,
    )  # fmt: skip


def iter_charges_by_day(lines: Iterable[StatementLine], divided: Iterable[LineCharges]) -> Iterator[Charge | Rounding]:
    """Yield the parts of each divided line with its rounding, then the other lines."""
    pending = {(line.for_month, line.agent_did, line.provider, line.item, line.model, line.rate_id): line for line in lines}
    for line, parts in divided:
        del pending[line.for_month, line.agent_did, line.provider, line.item, line.model, line.rate_id]
        recorded = Decimal(0)
        for part in parts:
            recorded += part.usd
            yield _charge_part(line, part)
        if recorded != line.usd:
            yield Rounding(charge_line(line), line.usd - recorded)
    yield from map(charge_line, pending.values())
