"""Charges of a month: the lines of its statement, or the cost records that add up to a line."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from itertools import chain, groupby
from operator import attrgetter
from typing import Any
from uuid import UUID

from django.db.models import F, OuterRef, QuerySet, Subquery, Sum, Window

from billing.dates import start_of_next_month
from billing.model_sums import TokenCounts
from billing.models import Account, BillableItem, CostRecord, ModelTotal, Rate, StatementLine, Tab
from billing.money_sums import count_parts, nanos_to_decimal
from billing.statement_lines import LineAmount, round_line_usd, round_to_cents

RECORD_BATCH_SIZE = 2000  # rows fetched at a time
RATED_COLUMNS = ("agent_did", "provider", "item", "rate_id")  # identify a line of usage within a month
CALL_COLUMNS = ("agent_did", "provider", "model")  # identify a line of model calls
SUMMED_AMOUNTS = ("quantity", "free", "usd", "estimated_usd")
SUMMED_CALLS = (
    "calls", "usd", "unpriced", "estimated_usd", "input_tokens", "cached_tokens", "cache_written_tokens", "output_tokens",
)  # fmt: skip
NO_TOKENS = TokenCounts()
LineKey = tuple[Any, ...]  # (agent, provider, item, rate id, model)


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
    tokens: TokenCounts = NO_TOKENS


@dataclass(frozen=True)
class Rounding:
    """Difference between a line in cents and the sum of its cost records."""

    line: Charge
    usd: Decimal


def charge_line(line: StatementLine) -> Charge:
    return Charge(
        begin=line.for_month, end=start_of_next_month(line.for_month), agent_did=line.agent_did, provider=line.provider,
        item=line.item, rate=line.rate, quantity=line.quantity, free=line.free, usd=line.usd, unpriced=line.unpriced,
        estimated_usd=line.estimated_usd, is_correction=line.kind == StatementLine.Kind.CORRECTION, model=line.model,
        tokens=TokenCounts.of(line),
    )  # fmt: skip


def _charge_record(record: Any) -> Charge:
    return Charge(
        begin=record.day, end=record.day + timedelta(days=1), agent_did=record.agent_did, provider=record.provider,
        item=record.item, rate=record.rate, quantity=record.quantity, free=record.free, usd=record.usd,
        unpriced=record.unpriced, estimated_usd=record.estimated_usd, lease=record.holder,
        environment=record.environment_id, environment_type=record.environment_type or "", project=record.project or "",
    )  # fmt: skip


def _charge_calls(total: Any) -> Charge:
    return Charge(
        begin=total.day, end=total.day + timedelta(days=1), agent_did=total.agent_did, provider=total.provider,
        item=BillableItem.LLM, rate=None, quantity=Decimal(total.calls), free=Decimal(0), usd=nanos_to_decimal(total.usd),
        unpriced=total.unpriced, estimated_usd=nanos_to_decimal(total.estimated_usd), lease=total.holder,
        environment=total.environment_id, environment_type=total.environment_type or "", project=total.project or "",
        model=total.model, tokens=TokenCounts.of(total),
    )  # fmt: skip


def iter_charges_by_day(account: Account, month: date, lines: Iterable[StatementLine]) -> Iterator[Charge | Rounding]:
    """Yield the parts of each line with its rounding, then the lines that their parts do not add up to.

    The parts of a line are compared and read in one query, because a pass of pricing may replace them at any time. They do not
    add up to a line of a closed month if its costs have changed since, and to no correction."""
    pending = {(line.for_month, *_get_key(line)): line for line in lines}
    for key, amount, parts in chain(_iter_rated_parts(account, month), _iter_call_parts(account, month)):
        line = pending.get((month, *key))
        if line is None or line.kind == StatementLine.Kind.CORRECTION or _get_amount(line) != amount:
            continue
        del pending[month, *key]
        recorded = Decimal(0)
        for part in parts:
            recorded += part.usd
            yield part
        if recorded != line.usd:
            yield Rounding(charge_line(line), line.usd - recorded)
    yield from map(charge_line, pending.values())


def _get_key(line: StatementLine) -> LineKey:
    return (line.agent_did, line.provider, line.item, line.rate_id, line.model)


def _get_amount(line: StatementLine) -> LineAmount:
    return LineAmount(line.quantity, line.free, line.usd, line.unpriced, line.estimated_usd, TokenCounts.of(line))


def _iter_rated_parts(account: Account, month: date) -> Iterator[tuple[LineKey, LineAmount, Iterator[Charge]]]:
    """Yield the cost records other than of model calls by line, with the amount of the line that they add up to."""
    found = CostRecord.objects.filter(account=account).exclude(item=BillableItem.LLM).select_related("rate")
    sums = {f"line_{name}": Sum(count_parts(name)) for name in SUMMED_AMOUNTS} | {"line_unpriced": Sum("unpriced")}
    for key, records in _group(found, month, RATED_COLUMNS, sums):
        first = next(records)
        quantity, free, usd, estimated = (int(getattr(first, f"line_{name}")) for name in SUMMED_AMOUNTS)
        amount = LineAmount(
            nanos_to_decimal(quantity), nanos_to_decimal(free),
            round_line_usd(usd, quantity - free, first.rate.usd if first.rate else None), int(first.line_unpriced),
            round_to_cents(estimated),
        )  # fmt: skip
        yield (*key, ""), amount, map(_charge_record, chain([first], records))


def _iter_call_parts(account: Account, month: date) -> Iterator[tuple[LineKey, LineAmount, Iterator[Charge]]]:
    """Yield the totals of model calls of a lease and day, like `_iter_rated_parts`."""
    found = ModelTotal.objects.filter(account=account, period=ModelTotal.Period.LEASE_DAY)
    sums = {f"line_{name}": Sum(name) for name in SUMMED_CALLS}
    for (agent, provider, model), totals in _group(found, month, CALL_COLUMNS, sums):
        first = next(totals)
        calls, usd, unpriced, estimated, *tokens = (int(getattr(first, f"line_{name}")) for name in SUMMED_CALLS)
        amount = LineAmount(
            Decimal(calls), Decimal(0), round_to_cents(usd), unpriced, round_to_cents(estimated), TokenCounts(*tokens)
        )
        yield (agent, provider, BillableItem.LLM, None, model), amount, map(_charge_calls, chain([first], totals))


def _group(
    rows: "QuerySet[CostRecord] | QuerySet[ModelTotal]", month: date, columns: tuple[str, ...], sums: dict[str, Sum]
) -> Iterator[tuple[LineKey, Iterator[Any]]]:
    """Group the rows of a month by line. Each row has the sums of the rows of its line, and the attributes of its tab."""
    tabs, partition = Tab.objects.filter(holder=OuterRef("holder")), [F(column) for column in columns]
    found = (
        rows.filter(day__gte=month, day__lt=start_of_next_month(month))
        .annotate(**{name: Window(each, partition_by=partition) for name, each in sums.items()})
        .annotate(project=Subquery(tabs.values("project")[:1]), environment_type=Subquery(tabs.values("environment_type")[:1]))
        .order_by(*columns, "day", "environment_id", "holder")
    )
    return groupby(found.iterator(chunk_size=RECORD_BATCH_SIZE), attrgetter(*columns))
