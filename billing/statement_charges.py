"""Charges of statement lines: the parts of a line by day and lease, which are stored when its month is closed.

They are copies of the cost records and of the totals of model calls. Both are derived again whenever a price or the usage
changes, also in closed months."""

from collections.abc import Collection, Iterable, Iterator
from datetime import date
from decimal import Decimal
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any

from django.db.models import F, OuterRef, QuerySet, Subquery, Sum, Window

from billing.dates import start_of_next_month
from billing.model_sums import TokenCounts
from billing.models import Account, BillableItem, CostRecord, ModelTotal, StatementCharge, StatementLine, Tab
from billing.money_sums import count_parts, nanos_to_decimal
from billing.statement_lines import LineAmount, round_line_usd, round_to_cents

RECORD_BATCH_SIZE = 2000  # rows fetched at a time
SQL_BATCH_SIZE = 500  # rows per SQL statement; SQLite limits the number of values
RATED_COLUMNS = ("agent_did", "provider", "item", "rate_id")  # identify a line of usage within a month
CALL_COLUMNS = ("agent_did", "provider", "model")  # identify a line of model calls
SUMMED_AMOUNTS = ("quantity", "free", "usd", "estimated_usd")
TOKEN_COLUMNS = ("input_tokens", "cached_tokens", "cache_written_tokens", "output_tokens", "estimated_tokens")
SUMMED_CALLS = ("calls", "usd", "unpriced", "estimated_usd", *TOKEN_COLUMNS)
LINE_ORDER = ("line__agent_did", "line__provider", "line__item", "line__model", "line__rate_id")
LineCharges = tuple[StatementLine, Iterator[StatementCharge]]
LineKey = tuple[Any, ...]  # (agent, provider, item, rate id, model)


def store_charges(account: Account, month: date, lines: Collection[StatementLine]) -> None:
    """Store the charges of the lines of a month that is being closed, in its transaction. The lines are stored already."""
    charges = (charge for _, parts in iter_derived_charges(account, month, lines) for charge in parts)
    while batch := [*islice(charges, SQL_BATCH_SIZE)]:
        StatementCharge.objects.bulk_create(batch)


def iter_stored_charges(lines: "QuerySet[StatementLine]") -> Iterator[LineCharges]:
    """Yield the lines of a statement that have stored charges, in their order, each with these."""
    charges = StatementCharge.objects.filter(line__in=lines).select_related("line__rate").order_by(*LINE_ORDER, "pk")
    for _, group in groupby(charges.iterator(chunk_size=RECORD_BATCH_SIZE), attrgetter("line_id")):
        parts = iter(group)
        first = next(parts)
        yield first.line, chain([first], parts)


def iter_derived_charges(account: Account, month: date, lines: Iterable[StatementLine]) -> Iterator[LineCharges]:
    """Yield the lines to which the records of their month add up, each with its charges. Nothing is stored.

    The records of a line are compared and read in one query, because a pass of pricing may replace them at any time. They do
    not add up to a line of a closed month if its costs have changed since, and to no correction."""
    by_key = {(line.for_month, *_get_key(line)): line for line in lines}
    for key, amount, charges in chain(_iter_rated_charges(account, month), _iter_call_charges(account, month)):
        line = by_key.get((month, *key))
        if line and line.kind == StatementLine.Kind.USAGE and _is_amount(line, amount):
            yield line, _assign(line, charges)


def _assign(line: StatementLine, charges: Iterable[StatementCharge]) -> Iterator[StatementCharge]:
    for charge in charges:
        charge.line = line
        yield charge


def _get_key(line: StatementLine) -> LineKey:
    return (line.agent_did, line.provider, line.item, line.rate_id, line.model)


def _is_amount(line: StatementLine, amount: LineAmount) -> bool:
    """Return whether a line has this amount. Lines of earlier versions do not state their estimated tokens."""
    tokens = amount.tokens if line.estimated_tokens is not None else amount.tokens._replace(estimated=0)
    found = LineAmount(line.quantity, line.free, line.usd, line.unpriced, line.estimated_usd, TokenCounts.of(line))
    return found == amount._replace(tokens=tokens)


def _iter_rated_charges(account: Account, month: date) -> Iterator[tuple[LineKey, LineAmount, Iterator[StatementCharge]]]:
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


def _iter_call_charges(account: Account, month: date) -> Iterator[tuple[LineKey, LineAmount, Iterator[StatementCharge]]]:
    """Yield the totals of model calls of a lease and day, like `_iter_rated_charges`."""
    found = ModelTotal.objects.filter(account=account, period=ModelTotal.Period.LEASE_DAY)
    sums = {f"line_{name}": Sum(name) for name in SUMMED_CALLS}
    for (agent, provider, model), totals in _group(found, month, CALL_COLUMNS, sums):
        first = next(totals)
        calls, usd, unpriced, estimated, *tokens = (int(getattr(first, f"line_{name}") or 0) for name in SUMMED_CALLS)
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


def _charge_record(record: Any) -> StatementCharge:
    return _build_charge(
        record, quantity=record.quantity, free=record.free, usd=record.usd, estimated_usd=record.estimated_usd,
    )  # fmt: skip


def _charge_calls(total: Any) -> StatementCharge:
    return _build_charge(
        total, quantity=Decimal(total.calls), usd=nanos_to_decimal(total.usd),
        estimated_usd=nanos_to_decimal(total.estimated_usd), **{name: getattr(total, name) or 0 for name in TOKEN_COLUMNS},
    )  # fmt: skip


def _build_charge(row: Any, **amounts: Any) -> StatementCharge:
    return StatementCharge(
        day=row.day, environment_id=row.environment_id, environment_type=row.environment_type or "", holder=row.holder,
        project=row.project or "", unpriced=row.unpriced, **amounts,
    )  # fmt: skip
