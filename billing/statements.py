"""Months of accounts, closed: what was used then, in cents, as it will stay.

A statement is never derived again. What its month costs may be: usage that is told late, a price that came later. The
difference is on the account's next statement, so all its statements together are always what was used. Agents that move
change nothing that is closed (models.Membership)."""

from collections.abc import Iterator, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import TruncMonth

from billing import pricing
from billing.dates import EPOCH, start_of_day, start_of_next_month, to_utc_date
from billing.metering import WATERMARK_NAMES, is_referenced
from billing.models import (
    Account,
    CostRecord,
    Credit,
    Statement,
    StatementLine,
    Unpriced,
    UsageKind,
    UsageRecord,
    Watermark,
)
from billing.money_sums import CENTS_PER_UNIT, nanos_to_decimal, sum_exact
from sandboxes.errors import SandboxError
from sandboxes.lifecycle import checkpoint
from sandboxes.models import DataSize, LlmCall, Reading, Run, Sandbox, Snapshot, Transition

SQL_BATCH_SIZE = 500  # in one statement of SQL: SQLite takes so many values
ZERO_USD = Decimal("0.00")


class MonthNotClosable(SandboxError):
    """This month cannot be closed now."""

    code = "not_closable"


class LineKey(NamedTuple):
    """What one line is about."""

    month: date
    agent_did: str
    provider: str
    item: str


class LineAmount(NamedTuple):
    quantity: Decimal
    usd: Decimal


ZERO_AMOUNT = LineAmount(Decimal(0), ZERO_USD)


def close_month(account: Account, month: date, *, now: datetime, actor: str) -> tuple[Statement, bool]:
    """The statement of a month, and whether this call made it. NotClosable: it is not over, not all priced, or out of turn.

    Whoever closes holds the account's lock, and that of the costs: nobody prices, or moves an agent, between the check and
    the sums."""
    begin, end = month.replace(day=1), start_of_next_month(month)
    with transaction.atomic(durable=True):
        Watermark.hold("costs", EPOCH)
        Account.objects.select_for_update(no_key=True).get(pk=account.pk)
        if there := Statement.objects.filter(account=account, month=begin).first():
            return there, False
        _check_month_complete(begin, end, now)
        _check_order(account, begin)
        lines = [*_build_lines(account, begin, end)]
        subtotal = sum((line.usd for line in lines), ZERO_USD)
        used = min(get_balance(account), max(subtotal, ZERO_USD))
        made = Statement.objects.create(
            account=account, month=begin, closed_at=now, closed_by=actor, subtotal=subtotal, credit_used=used,
            total=subtotal - used,
        )  # fmt: skip
        checkpoint("closing", made)
        for line in lines:
            line.statement = made
        StatementLine.objects.bulk_create(lines, batch_size=SQL_BATCH_SIZE)
        checkpoint("closed", made)
    return made, True


def _check_month_complete(begin: date, end: date, now: datetime) -> None:
    over = start_of_day(end)
    if now < over:
        raise MonthNotClosable(f"{format_month(begin)} is not over.")
    metered = dict(Watermark.objects.filter(name__in=WATERMARK_NAMES).values_list("name", "at"))
    if any(name not in metered or metered[name] < over for name in WATERMARK_NAMES) or _has_unmetered_facts(over):
        raise MonthNotClosable(
            f"{format_month(begin)} is not metered up to its end yet. Run `manage.py meter`, or wait for its sweep."
        )
    if Unpriced.objects.filter(day__lt=end).exists():
        raise MonthNotClosable(
            f"What was used up to the end of {format_month(begin)} is not priced yet. Wait for the next sweep."
        )


def _has_unmetered_facts(over: datetime) -> bool:
    """Is there a fact from before that is not metered up to then? The watermark is there already when a pass stops in the
    middle, and stays when one starts over."""
    began = Exists(Transition.objects.filter(sandbox=OuterRef("pk"), at__lt=over))
    boxes = Sandbox.objects.filter(began, metered=False).exclude(meter__read_at__gte=over)
    calls = LlmCall.objects.filter(counted=False, ended_at__lt=over)
    runs = Run.objects.filter(metered=False, started_at__lt=over)
    used = Reading.objects.filter(metered=False, since__lt=over)
    data = DataSize.objects.filter(metered=False, at__lt=over)
    if any(each.exists() for each in (boxes, calls, runs, used)):
        return True
    unmetered = Snapshot.objects.filter(metered=False, at__lt=over).annotate(kept=is_referenced())
    copies = [each for each in unmetered.only("key", "size_bytes") if each.own]
    if not all(each.kept for each in copies):
        return True
    sources = {f"snapshot {each.pk}" for each in copies if each.size_bytes}
    sources |= {f"data {pk}" for pk in data.filter(size_bytes__gt=0).values_list("pk", flat=True)}
    last = over - timedelta(days=1)
    there = UsageRecord.objects.filter(item=UsageKind.STORAGE, day=last.date(), ended_at__gte=over).values_list(
        "source", flat=True
    )
    return bool(sources - {*there})


def _check_order(account: Account, begin: date) -> None:
    last = Statement.objects.filter(account=account).order_by("-month").first()
    if last and last.month > begin:
        raise MonthNotClosable(
            f"{format_month(last.month)} is closed. What belongs to {format_month(begin)} is on the next statement."
        )
    open_ = CostRecord.objects.filter(account=account, day__lt=begin)
    if last:
        open_ = open_.filter(day__gte=start_of_next_month(last.month))
    if first := open_.order_by("day").first():
        raise MonthNotClosable(f"{format_month(first.day)} has costs and is not closed. Close it first.")


def _build_lines(account: Account, begin: date, end: date) -> Iterator[StatementLine]:
    """What was used in this month; then how far the months before it differ from what statements have said of them."""
    derived, frozen = sum_derived_costs(account, until=end), sum_billed_costs(account)
    for key in sorted({*derived, *frozen}):
        now, before = derived.get(key, ZERO_AMOUNT), frozen.get(key, ZERO_AMOUNT)
        if key.month == begin or now.usd != before.usd:
            yield StatementLine(
                kind=StatementLine.Kind.USAGE if key.month == begin else StatementLine.Kind.CORRECTION,
                for_month=key.month, agent_did=key.agent_did, provider=key.provider, item=key.item,
                quantity=now.quantity - before.quantity, usd=now.usd - before.usd,
            )  # fmt: skip


def sum_derived_costs(account: Account, *, until: date, since: date | None = None) -> dict[LineKey, LineAmount]:
    """What an account's months cost as derived now, each line rounded to cents, a half up."""
    rows = CostRecord.objects.filter(Q(day__gte=since) if since else Q(), account=account, day__lt=until)
    rows = rows.annotate(month=TruncMonth("day")).order_by()
    sums = rows.values_list("month", "agent_did", "provider", "item").annotate(a=sum_exact("quantity"), b=sum_exact("usd"))
    return {
        LineKey(*key): LineAmount(nanos_to_decimal(quantity), pricing.round_half_up(Fraction(nano, 10**9), pricing.CENT_PLACES))
        for *key, quantity, nano in sums
    }


def sum_billed_costs(account: Account) -> dict[LineKey, LineAmount]:
    """What an account's statements say, corrections included."""
    rows = StatementLine.objects.filter(statement__account=account).order_by()
    sums = rows.values_list("for_month", "agent_did", "provider", "item").annotate(a=sum_exact("quantity"), b=sum_exact("usd"))
    return {
        LineKey(*key): LineAmount(nanos_to_decimal(quantity), nanos_to_decimal(nano).quantize(ZERO_USD))
        for *key, quantity, nano in sums
    }


def find_due_accounts(month: date) -> QuerySet[Account]:
    """The accounts that have something on a statement of this month, or may have: costs, or earlier statements."""
    begin, end = month.replace(day=1), start_of_next_month(month)
    used = CostRecord.objects.filter(day__gte=begin, day__lt=end).order_by().values("account")
    before = Statement.objects.filter(month__lte=begin).order_by().values("account")
    return Account.objects.filter(Q(pk__in=used) | Q(pk__in=before)).order_by("name")


def find_open_months(account: Account, *, now: datetime) -> list[date]:
    """The months to close, in their order: from the first that has costs and no statement to the last that is over. If none has
    costs, the last alone: what was corrected since the last statement is on it."""
    last = Statement.objects.filter(account=account).order_by("-month").first()
    this = to_utc_date(now).replace(day=1)
    days = CostRecord.objects.filter(
        account=account, day__lt=this, **({"day__gte": start_of_next_month(last.month)} if last else {})
    )
    first = days.order_by("day").values_list("day", flat=True).first()
    if first is None:
        before = (this - timedelta(days=1)).replace(day=1)
        return [before] if last and last.month < before else []
    months = [first.replace(day=1)]
    while start_of_next_month(months[-1]) < this:
        months.append(start_of_next_month(months[-1]))
    return months


def last_day_of_month(month: date) -> date:
    return start_of_next_month(month) - timedelta(days=1)


def format_month(month: date) -> str:
    return f"{month:%Y-%m}"


# --- credits ----------------------------------------------------------------------------------------------------------


def grant_credit(account: Account, usd: Decimal, *, now: datetime, actor: str, reason: str) -> Credit:
    return Credit.objects.create(account=account, usd=usd, at=now, actor=actor, reason=reason)


def reverse_credit(pk: int, *, now: datetime, actor: str, reason: str) -> bool:
    """Take back what is left of a credit. False: nothing is, or it was taken back before."""
    credit = Credit.objects.select_related("account").get(pk=pk)
    with transaction.atomic(durable=True):
        Account.objects.select_for_update(no_key=True).get(pk=credit.account_id)
        rest = get_remaining_credits(credit.account).get(pk, ZERO_USD)
        if rest <= 0:
            return False
        Credit.objects.create(
            account=credit.account, kind=Credit.Kind.REVERSAL, usd=-rest, at=now, actor=actor, reason=reason, reversed=credit
        )
    return True


def get_remaining_credits(account: Account) -> dict[int, Decimal]:
    """What is left of each credit granted. Statements use up the oldest first."""
    booked = [*Credit.objects.filter(account=account).order_by("pk").values_list("pk", "usd", "reversed")]
    back = {of: usd for _, usd, of in booked if of}
    used = _sum_credit_used(account)
    rest: dict[int, Decimal] = {}
    for pk, usd, of in booked:
        if not of:
            whole = usd + back.get(pk, ZERO_USD)
            taken = min(whole, used)
            used -= taken
            rest[pk] = whole - taken
    return rest


def get_balance(account: Account) -> Decimal:
    """Credits that no statement has used yet."""
    booked = Credit.objects.filter(account=account).values_list("usd", flat=True)
    return sum(booked, ZERO_USD) - _sum_credit_used(account)


def _sum_credit_used(account: Account) -> Decimal:
    return sum(Statement.objects.filter(account=account).values_list("credit_used", flat=True), ZERO_USD)


def get_balances() -> Mapping[int, Decimal]:
    """Of every account that was ever given credit."""
    cents: dict[int, int] = {}
    for model, field, sign in ((Credit, "usd", 1), (Statement, "credit_used", -1)):
        rows: Any = model.objects.order_by().values_list("account").annotate(cents=sum_exact(field, parts=CENTS_PER_UNIT))
        for account, amount in rows:
            cents[account] = cents.get(account, 0) + sign * int(amount)
    return {account: Decimal(amount).scaleb(-2) for account, amount in cents.items()}
