"""Charges of a month: the lines of its statement, or the cost records that add up to a line."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import chain, groupby
from typing import Any
from uuid import UUID

from django.db.models import F, OuterRef, QuerySet, Subquery, Sum, Window

from billing.dates import start_of_next_month
from billing.models import Account, CostRecord, Rate, StatementLine, Tab
from billing.money_sums import NANOS_PER_UNIT, count_parts, nanos_to_decimal
from billing.pricing import CENT_PLACES, round_half_up
from billing.statements import round_line_usd

RECORD_BATCH_SIZE = 2000  # rows fetched at a time
LINE_COLUMNS = ("agent_did", "provider", "item", "rate_id")  # identify a line of usage within a month
SUMMED_COLUMNS = ("quantity", "free", "usd", "estimated_usd")
LineKey = tuple[Any, ...]


@dataclass(frozen=True)
class Charge:
    """Quantity and amount of a statement line or of a cost record, and the days `begin` to `end`, exclusive, of the use."""

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


@dataclass(frozen=True)
class Rounding:
    """Difference between a line in cents and the sum of its cost records."""

    line: Charge
    usd: Decimal


def get_model(record: CostRecord) -> str:
    """Return the model of a record of model calls. Empty: cost records do not distinguish models."""
    return ""


def charge_line(line: StatementLine) -> Charge:
    return Charge(
        begin=line.for_month, end=start_of_next_month(line.for_month), agent_did=line.agent_did, provider=line.provider,
        item=line.item, rate=line.rate, quantity=line.quantity, free=line.free, usd=line.usd, unpriced=line.unpriced,
        estimated_usd=line.estimated_usd, is_correction=line.kind == StatementLine.Kind.CORRECTION,
    )  # fmt: skip


def _charge_record(record: Any) -> Charge:
    return Charge(
        begin=record.day, end=record.day + timedelta(days=1), agent_did=record.agent_did, provider=record.provider,
        item=record.item, rate=record.rate, quantity=record.quantity, free=record.free, usd=record.usd,
        unpriced=record.unpriced, estimated_usd=record.estimated_usd, lease=record.holder,
        environment=record.environment_id, environment_type=record.environment_type or "", project=record.project or "",
        model=get_model(record),
    )  # fmt: skip


def iter_charges_by_day(account: Account, month: date, lines: Iterable[StatementLine]) -> Iterator[Charge | Rounding]:
    """Yield the cost records of each line with its rounding, then the lines that their records do not add up to.

    Records of a line are compared and read in one query, because a pass of pricing may replace them at any time. They do not
    add up to a line of a closed month if its costs have changed since, and to no correction."""
    pending = {(line.for_month, *_get_key(line)): line for line in lines}
    for key, records in groupby(_find_records(account, month).iterator(chunk_size=RECORD_BATCH_SIZE), _get_key):
        first = next(records)
        line = pending.get((month, *key))
        if line is None or not _is_sum(line, first):
            continue
        del pending[month, *key]
        recorded = Decimal(0)
        for record in chain([first], records):
            recorded += record.usd
            yield _charge_record(record)
        if recorded != line.usd:
            yield Rounding(charge_line(line), line.usd - recorded)
    yield from map(charge_line, pending.values())


def _get_key(row: StatementLine | CostRecord) -> LineKey:
    return tuple(getattr(row, column) for column in LINE_COLUMNS)


def _find_records(account: Account, month: date) -> QuerySet[CostRecord]:
    """Return the cost records of a month in the order of their lines, each with the sums of the records of its line."""
    tabs = Tab.objects.filter(holder=OuterRef("holder"))
    partition = [F(column) for column in LINE_COLUMNS]
    sums = {f"line_{column}": Window(Sum(count_parts(column)), partition_by=partition) for column in SUMMED_COLUMNS}
    records = CostRecord.objects.filter(account=account, day__gte=month, day__lt=start_of_next_month(month))
    return (
        records.select_related("rate")
        .annotate(**sums, line_unpriced=Window(Sum("unpriced"), partition_by=partition))
        .annotate(project=Subquery(tabs.values("project")[:1]), environment_type=Subquery(tabs.values("environment_type")[:1]))
        .order_by(*LINE_COLUMNS, "day", "environment_id", "holder")
    )


def _is_sum(line: StatementLine, record: Any) -> bool:
    """Return whether the cost records of a line add up to the line. `record` is one of them, with their sums."""
    if line.kind == StatementLine.Kind.CORRECTION:
        return False
    quantity, free, recorded, estimated = (int(getattr(record, f"line_{column}")) for column in SUMMED_COLUMNS)
    return (line.quantity, line.free, line.usd, line.unpriced, line.estimated_usd) == (
        nanos_to_decimal(quantity),
        nanos_to_decimal(free),
        round_line_usd(recorded, quantity - free, record.rate.usd if record.rate else None),
        int(record.line_unpriced),
        round_half_up(Fraction(estimated, NANOS_PER_UNIT), CENT_PLACES),
    )
