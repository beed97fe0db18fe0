"""Statements: closed months of accounts, in cents, and the credits that they use up.

A statement is never derived again. The costs of its month may change later, by late usage or a late price. The difference
becomes a correction on the account's next statement, so that the sum of an account's statements always equals its costs. A
move of an agent does not change closed months (models.Membership)."""

from collections.abc import Collection, Iterator, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from billing.dates import EPOCH, start_of_day, start_of_next_month, to_utc_date
from billing.metering import WATERMARK_NAMES, is_referenced
from billing.model_sums import TokenCounts
from billing.models import (
    Account,
    CostRecord,
    Credit,
    ModelTotal,
    Statement,
    StatementLine,
    Unpriced,
    UsageKind,
    UsageRecord,
    Watermark,
)
from billing.money_sums import CENTS_PER_UNIT, sum_exact
from billing.statement_charges import store_charges
from billing.statement_lines import (
    ZERO_AMOUNT,
    ZERO_USD,
    LineAmount,
    LineKey,
    find_whole_groups,
    sum_billed_costs,
    sum_derived_costs,
)
from billing.uncertainty import Uncertainty
from sandboxes import audit
from sandboxes.errors import SandboxError
from sandboxes.lifecycle import checkpoint
from sandboxes.models import DataSize, LlmCall, Reading, Run, Sandbox, Snapshot, Transition

SQL_BATCH_SIZE = 500  # rows per SQL statement; SQLite limits the number of values


class MonthNotClosable(SandboxError):
    """This month cannot be closed."""

    code = "not_closable"


def close_month(account: Account, month: date, *, now: datetime, actor: audit.Actor) -> tuple[Statement, bool]:
    """Close an account's month. Return its statement and whether this call created it. Idempotent.

    Raise MonthNotClosable if the month is not over, not completely metered and priced, or not next in order. The locks of the
    account and of the costs watermark exclude pricing and moves of agents between the check and the sums."""
    begin, end = month.replace(day=1), start_of_next_month(month)
    with transaction.atomic(durable=True):
        Watermark.hold("costs", EPOCH)
        Account.objects.select_for_update(no_key=True).get(pk=account.pk)
        if existing := Statement.objects.filter(account=account, month=begin).first():
            return existing, False
        _check_month_complete(begin, end, now)
        _check_order(account, begin)
        lines = [*_build_lines(account, begin, end)]
        statement = build_statement(account, begin, lines)
        statement.closed_at, statement.closed_by, statement.has_charges = now, actor, True
        statement.save()
        checkpoint("closing", statement)
        for line in lines:
            line.statement = statement
        StatementLine.objects.bulk_create(lines, batch_size=SQL_BATCH_SIZE)
        store_charges(account, begin, lines)
        audit.record(statement, "Close month", f"total {audit.format_value(statement.total)} USD", actor=actor, now=now)
        checkpoint("closed", statement)
    return statement, True


def build_statement(account: Account, month: date, lines: Collection[StatementLine]) -> Statement:
    """Build the statement of a month with these lines, which uses the credit of now. Nothing is stored."""
    subtotal = sum((line.usd for line in lines), ZERO_USD)
    used = min(get_balance(account), max(subtotal, ZERO_USD))
    uncertainty = Uncertainty.sum(line for line in lines if line.kind == StatementLine.Kind.USAGE)
    return Statement(
        account=account, month=month, subtotal=subtotal, credit_used=used, total=subtotal - used,
        unpriced=uncertainty.unpriced, estimated_usd=ZERO_USD + uncertainty.estimated_usd,
    )  # fmt: skip


def _check_month_complete(begin: date, end: date, now: datetime) -> None:
    month_end = start_of_day(end)
    if now < month_end:
        raise MonthNotClosable(f"{format_month(begin)} is not over.")
    metered = dict(Watermark.objects.filter(name__in=WATERMARK_NAMES).values_list("name", "at"))
    if any(name not in metered or metered[name] < month_end for name in WATERMARK_NAMES) or _has_unmetered_facts(month_end):
        raise MonthNotClosable(
            f"{format_month(begin)} is not metered up to its end yet. Run `manage.py meter`, or wait for its sweep."
        )
    has_totals = ModelTotal.are_derived() or not CostRecord.objects.exists()  # none before the first day is priced
    if Unpriced.objects.filter(day__lt=end).exists() or not has_totals:
        raise MonthNotClosable(f"Usage up to the end of {format_month(begin)} is not priced yet. Wait for the next sweep.")


def _has_unmetered_facts(month_end: datetime) -> bool:
    """Return whether a fact from before `month_end` is not metered up to `month_end`.

    The watermarks alone are not sufficient: they advance before a pass is complete, and a rebuild does not set them back."""
    began = Exists(Transition.objects.filter(sandbox=OuterRef("pk"), at__lt=month_end))
    sandboxes = Sandbox.objects.filter(began, metered=False).exclude(meter__read_at__gte=month_end)
    calls = LlmCall.objects.filter(counted=False, ended_at__lt=month_end)
    runs = Run.objects.filter(metered=False, started_at__lt=month_end)
    readings = Reading.objects.filter(metered=False, since__lt=month_end)
    data = DataSize.objects.filter(metered=False, at__lt=month_end)
    if any(each.exists() for each in (sandboxes, calls, runs, readings)):
        return True
    unmetered = Snapshot.objects.filter(metered=False, at__lt=month_end).annotate(referenced=is_referenced())
    copies = [each for each in unmetered.only("key", "size_bytes") if each.own]
    if not all(each.referenced for each in copies):
        return True
    sources = {f"snapshot {each.pk}" for each in copies if each.size_bytes}
    sources |= {f"data {pk}" for pk in data.filter(size_bytes__gt=0).values_list("pk", flat=True)}
    last = month_end - timedelta(days=1)
    recorded = UsageRecord.objects.filter(item=UsageKind.STORAGE, day=last.date(), ended_at__gte=month_end).values_list(
        "source", flat=True
    )
    return bool(sources - {*recorded})


def _check_order(account: Account, begin: date) -> None:
    last = Statement.objects.filter(account=account).order_by("-month").first()
    if last and last.month > begin:
        raise MonthNotClosable(
            f"{format_month(last.month)} is closed. Costs of {format_month(begin)} are corrected on the next statement."
        )
    open_records = CostRecord.objects.filter(account=account, day__lt=begin)
    if last:
        open_records = open_records.filter(day__gte=start_of_next_month(last.month))
    if first := open_records.order_by("day").first():
        raise MonthNotClosable(f"{format_month(first.day)} has costs and is not closed. Close it first.")


def _build_lines(account: Account, begin: date, end: date) -> Iterator[StatementLine]:
    """Yield the month's usage, and corrections: differences between costs and earlier statements of the months before."""
    billed = sum_billed_costs(account)
    whole = find_whole_groups(billed)
    derived = sum_derived_costs(account, until=end, whole=whole)
    for key in sorted({*derived, *billed}, key=lambda key: (*key[:5], key.rate or 0)):
        cost, earlier = derived.get(key, ZERO_AMOUNT), billed.get(key, ZERO_AMOUNT)
        if key.group in whole and earlier.tokens == TokenCounts():  # billed before lines had tokens
            cost = cost._replace(tokens=TokenCounts())
        if key.month == begin or cost.usd != earlier.usd:
            kind = StatementLine.Kind.USAGE if key.month == begin else StatementLine.Kind.CORRECTION
            yield _build_line(kind, key, cost.minus(earlier))


def _build_line(kind: StatementLine.Kind, key: LineKey, amount: LineAmount) -> StatementLine:
    return StatementLine(
        kind=kind, for_month=key.month, agent_did=key.agent_did, provider=key.provider, item=key.item, model=key.model,
        rate_id=key.rate, quantity=amount.quantity, free=amount.free, usd=amount.usd, unpriced=amount.unpriced,
        estimated_usd=amount.estimated_usd, input_tokens=amount.tokens.input, cached_tokens=amount.tokens.cached,
        cache_written_tokens=amount.tokens.cache_written, output_tokens=amount.tokens.output,
        estimated_tokens=amount.tokens.estimated if amount.has_estimated_tokens else None,
    )  # fmt: skip


def preview_month(account: Account, month: date) -> list[StatementLine]:
    """Build the lines that the statement of an open month would have if it were closed now. Nothing is stored.

    The lines are preliminary: usage may still be metered and priced. Earlier open months have statements of their own and are
    left out."""
    begin = month.replace(day=1)
    closed = {*Statement.objects.filter(account=account).values_list("month", flat=True)}
    lines = _build_lines(account, begin, start_of_next_month(begin))
    return [line for line in lines if line.for_month == begin or (line.for_month < begin and line.for_month in closed)]


def find_due_accounts(month: date) -> QuerySet[Account]:
    """Find the accounts that have costs in this month, or a statement for it or an earlier one, which may need corrections."""
    begin, end = month.replace(day=1), start_of_next_month(month)
    used = CostRecord.objects.filter(day__gte=begin, day__lt=end).order_by().values("account")
    before = Statement.objects.filter(month__lte=begin).order_by().values("account")
    return Account.objects.filter(Q(pk__in=used) | Q(pk__in=before)).order_by("name")


def find_open_months(account: Account, *, now: datetime) -> list[date]:
    """Return the months to close, in order: from the first one with costs and no statement to the last one that has ended.

    If no open month has costs, return the last one that has ended, for corrections since the last statement."""
    last = Statement.objects.filter(account=account).order_by("-month").first()
    this_month = to_utc_date(now).replace(day=1)
    days = CostRecord.objects.filter(
        account=account, day__lt=this_month, **({"day__gte": start_of_next_month(last.month)} if last else {})
    )
    first = days.order_by("day").values_list("day", flat=True).first()
    if first is None:
        before = (this_month - timedelta(days=1)).replace(day=1)
        return [before] if last and last.month < before else []
    months = [first.replace(day=1)]
    while start_of_next_month(months[-1]) < this_month:
        months.append(start_of_next_month(months[-1]))
    return months


def last_day_of_month(month: date) -> date:
    return start_of_next_month(month) - timedelta(days=1)


def format_month(month: date) -> str:
    return f"{month:%Y-%m}"


# --- credits ----------------------------------------------------------------------------------------------------------


def grant_credit(account: Account, usd: Decimal, *, now: datetime, actor: str, reason: str) -> Credit:
    """Grant credit to an account, for the statements closed from now on. Not idempotent."""
    return Credit.objects.create(account=account, usd=usd, at=now, actor=actor, reason=reason)


def reverse_credit(pk: int, *, now: datetime, actor: str, reason: str) -> bool:
    """Reverse the remainder of a credit. Return False if nothing remains."""
    credit = Credit.objects.select_related("account").get(pk=pk)
    with transaction.atomic(durable=True):
        Account.objects.select_for_update(no_key=True).get(pk=credit.account_id)
        remainder = get_remaining_credits(credit.account).get(pk, ZERO_USD)
        if remainder <= 0:
            return False
        Credit.objects.create(
            account=credit.account,
            kind=Credit.Kind.REVERSAL,
            usd=-remainder,
            at=now,
            actor=actor,
            reason=reason,
            reversed=credit,
        )
    return True


def get_remaining_credits(account: Account) -> dict[int, Decimal]:
    """Return the remainder of each granted credit by id. Statements use up the oldest credit first."""
    booked = [*Credit.objects.filter(account=account).order_by("pk").values_list("pk", "usd", "reversed")]
    reversals = {reversed_pk: usd for _, usd, reversed_pk in booked if reversed_pk}
    used = _sum_credit_used(account)
    remaining: dict[int, Decimal] = {}
    for pk, usd, reversed_pk in booked:
        if not reversed_pk:
            usable = usd + reversals.get(pk, ZERO_USD)
            taken = min(usable, used)
            used -= taken
            remaining[pk] = usable - taken
    return remaining


def get_balance(account: Account) -> Decimal:
    """Return an account's credit that no statement has used yet, in USD."""
    booked = Credit.objects.filter(account=account).values_list("usd", flat=True)
    return sum(booked, ZERO_USD) - _sum_credit_used(account)


def _sum_credit_used(account: Account) -> Decimal:
    return sum(Statement.objects.filter(account=account).values_list("credit_used", flat=True), ZERO_USD)


def get_balances() -> Mapping[int, Decimal]:
    """Return the balance of every account that was ever granted credit, by account id."""
    cents: dict[int, int] = {}
    for model, field, sign in ((Credit, "usd", 1), (Statement, "credit_used", -1)):
        rows: Any = model.objects.order_by().values_list("account").annotate(cents=sum_exact(field, parts=CENTS_PER_UNIT))
        for account, amount in rows:
            cents[account] = cents.get(account, 0) + sign * int(amount)
    return {account: Decimal(amount).scaleb(-2) for account, amount in cents.items()}
