"""Export of a month: rows of one account, and CSV.

1. A closed month is exported from its statement, which never changes. Its rows are those of the statement's lines.
2. By day, a line is split into the cost records that add up to it, with a row for the rounding to cents. A line whose costs
   have changed since the month was closed stays one row. The sum of a line's rows is always the line.
3. A month that is not closed is exported by day, and each row has the status `preliminary`."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from io import StringIO

from django.db.models import Q

from billing.dates import start_of_next_month
from billing.focus.charges import Charge, Rounding, charge_line, iter_charges_by_day
from billing.focus.rows import (
    COLUMNS,
    FINAL,
    PRELIMINARY,
    Row,
    Value,
    build_account_row,
    build_charge_rows,
    build_credit_row,
    format_number,
)
from billing.models import Account, CostRecord, Rate, Statement, StatementLine
from billing.statement_charges import RECORD_BATCH_SIZE, iter_derived_charges, iter_stored_charges
from billing.statements import build_statement, preview_month

CHUNK_SIZE = 1 << 16  # characters
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet evaluates text that begins with one of them


@dataclass(frozen=True)
class AccountMonth:
    """Account and month to export. Without a statement the month is not closed, and `lines` are those it would have now."""

    account: Account
    month: date
    statement: Statement | None
    lines: tuple[StatementLine, ...] = ()
    credit_used: Decimal = Decimal(0)

    @classmethod
    def of(cls, statement: Statement) -> "AccountMonth":
        return cls(statement.account, statement.month, statement, credit_used=statement.credit_used)

    @property
    def status(self) -> str:
        return FINAL if self.statement else PRELIMINARY


def open_month(account: Account, month: date, *, preliminary: bool) -> AccountMonth | None:
    """Return a month to export. None if it is not closed, unless `preliminary` is set."""
    statement = Statement.objects.filter(account=account, month=month).select_related("account").first()
    if statement:
        return AccountMonth.of(statement)
    if not preliminary:
        return None
    lines = tuple(preview_month(account, month))
    rates = Rate.objects.in_bulk({line.rate_id for line in lines if line.rate_id})
    for line in lines:
        line.rate = rates[line.rate_id] if line.rate_id else None
    return AccountMonth(account, month, None, lines, build_statement(account, month, lines).credit_used)


def find_accounts(month: date) -> list[Account]:
    """Return the accounts that have a statement for a month, or costs in it that a statement will still include."""
    closed = Statement.objects.filter(month=month).order_by().values("account")
    later = Statement.objects.filter(month__gt=month).order_by().values("account")
    used = CostRecord.objects.filter(day__gte=month, day__lt=start_of_next_month(month)).order_by().values("account")
    return [*Account.objects.filter(Q(pk__in=closed) | (Q(pk__in=used) & ~Q(pk__in=later))).order_by("name")]


def iter_rows(source: AccountMonth, *, daily: bool) -> Iterator[Row]:
    """Yield the rows of an account's month: usage and corrections, and the credit last."""
    shared = build_account_row(source.account.name, source.month, source.status)
    for charge in _iter_charges(source, daily=daily):
        for row in build_charge_rows(charge):
            yield shared | row
    if source.credit_used:
        yield shared | build_credit_row(source.month, source.credit_used)


def _iter_charges(source: AccountMonth, *, daily: bool) -> Iterator[Charge | Rounding]:
    """Yield the charges of a month. A statement of a version before has no stored charges: the records of now are compared."""
    if source.statement is None:
        return iter_charges_by_day(source.lines, iter_derived_charges(source.account, source.month, source.lines))
    lines = source.statement.lines.select_related("rate")
    if not daily:
        return map(charge_line, lines.iterator(chunk_size=RECORD_BATCH_SIZE))
    if source.statement.has_charges:
        return iter_charges_by_day(lines, iter_stored_charges(source.statement.lines.all()))
    return iter_charges_by_day(lines, iter_derived_charges(source.account, source.month, lines))


def iter_csv(sources: Iterable[AccountMonth], *, daily: bool) -> Iterator[str]:
    """Yield the CSV of months in chunks: one header, then the rows of each. A null is an empty field."""
    buffer = StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for source in sources:
        for row in iter_rows(source, daily=daily):
            writer.writerow([format_value(row[column]) for column in COLUMNS])
            if buffer.tell() > CHUNK_SIZE:
                yield buffer.getvalue()
                buffer.seek(0)
                buffer.truncate()
    yield buffer.getvalue()


def format_value(value: Value) -> str:
    """Format a value of a row. Text that a spreadsheet would evaluate gets an apostrophe; numbers may be negative."""
    if value is None:
        return ""
    if isinstance(value, Decimal):
        return format_number(value)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M:%SZ}"
    text = str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(FORMULA_STARTS) else text
