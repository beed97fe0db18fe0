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
from billing.dates import LONG_AGO, day_of, following, midnight
from billing.metering import NAMES, pointed_to
from billing.models import (
    Account,
    CostRecord,
    Credit,
    Item,
    Statement,
    StatementLine,
    Unpriced,
    UsageRecord,
    Watermark,
)
from billing.money_sums import CENT, exactly, nano_usd
from sandboxes.errors import SandboxError
from sandboxes.lifecycle import step
from sandboxes.models import DataSize, LlmCall, Reading, Run, Sandbox, Snapshot, Transition

ROWS = 500  # in one statement of SQL: SQLite takes so many values
NOTHING = Decimal("0.00")


class NotClosable(SandboxError):
    """This month cannot be closed now."""

    code = "not_closable"


class Key(NamedTuple):
    """What one line is about."""

    month: date
    agent_did: str
    provider: str
    item: str


class Amount(NamedTuple):
    quantity: Decimal
    usd: Decimal


NONE = Amount(Decimal(0), NOTHING)


def close(account: Account, month: date, *, now: datetime, actor: str) -> tuple[Statement, bool]:
    """The statement of a month, and whether this call made it. NotClosable: it is not over, not all priced, or out of turn.

    Whoever closes holds the account's lock, and that of the costs: nobody prices, or moves an agent, between the check and
    the sums."""
    begin, end = month.replace(day=1), following(month)
    with transaction.atomic(durable=True):
        Watermark.hold("costs", LONG_AGO)
        Account.objects.select_for_update(no_key=True).get(pk=account.pk)
        if there := Statement.objects.filter(account=account, month=begin).first():
            return there, False
        _check_over(begin, end, now)
        _check_order(account, begin)
        lines = [*_lines(account, begin, end)]
        subtotal = sum((line.usd for line in lines), NOTHING)
        used = min(balance(account), max(subtotal, NOTHING))
        made = Statement.objects.create(
            account=account, month=begin, closed_at=now, closed_by=actor, subtotal=subtotal, credit_used=used,
            total=subtotal - used,
        )  # fmt: skip
        step("closing", made)
        for line in lines:
            line.statement = made
        StatementLine.objects.bulk_create(lines, batch_size=ROWS)
        step("closed", made)
    return made, True


def _check_over(begin: date, end: date, now: datetime) -> None:
    over = midnight(end)
    if now < over:
        raise NotClosable(f"{named(begin)} is not over.")
    metered = dict(Watermark.objects.filter(name__in=NAMES).values_list("name", "at"))
    if any(name not in metered or metered[name] < over for name in NAMES) or _unread(over):
        raise NotClosable(f"{named(begin)} is not metered up to its end yet. Run `manage.py meter`, or wait for its sweep.")
    if Unpriced.objects.filter(day__lt=end).exists():
        raise NotClosable(f"What was used up to the end of {named(begin)} is not priced yet. Wait for the next sweep.")


def _unread(over: datetime) -> bool:
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
    unmetered = Snapshot.objects.filter(metered=False, at__lt=over).annotate(kept=pointed_to())
    copies = [each for each in unmetered.only("key", "size_bytes") if each.own]
    if not all(each.kept for each in copies):
        return True
    sources = {f"snapshot {each.pk}" for each in copies if each.size_bytes}
    sources |= {f"data {pk}" for pk in data.filter(size_bytes__gt=0).values_list("pk", flat=True)}
    last = over - timedelta(days=1)
    there = UsageRecord.objects.filter(item=Item.STORAGE, day=last.date(), ended_at__gte=over).values_list("source", flat=True)
    return bool(sources - {*there})


def _check_order(account: Account, begin: date) -> None:
    last = Statement.objects.filter(account=account).order_by("-month").first()
    if last and last.month > begin:
        raise NotClosable(f"{named(last.month)} is closed. What belongs to {named(begin)} is on the next statement.")
    open_ = CostRecord.objects.filter(account=account, day__lt=begin)
    if last:
        open_ = open_.filter(day__gte=following(last.month))
    if first := open_.order_by("day").first():
        raise NotClosable(f"{named(first.day)} has costs and is not closed. Close it first.")


def _lines(account: Account, begin: date, end: date) -> Iterator[StatementLine]:
    """What was used in this month; then how far the months before it differ from what statements have said of them."""
    derived, frozen = rounded(account, until=end), billed(account)
    for key in sorted({*derived, *frozen}):
        now, before = derived.get(key, NONE), frozen.get(key, NONE)
        if key.month == begin or now.usd != before.usd:
            yield StatementLine(
                kind=StatementLine.Kind.USAGE if key.month == begin else StatementLine.Kind.CORRECTION,
                for_month=key.month, agent_did=key.agent_did, provider=key.provider, item=key.item,
                quantity=now.quantity - before.quantity, usd=now.usd - before.usd,
            )  # fmt: skip


def rounded(account: Account, *, until: date, since: date | None = None) -> dict[Key, Amount]:
    """What an account's months cost as derived now, each line rounded to cents, a half up."""
    rows = CostRecord.objects.filter(Q(day__gte=since) if since else Q(), account=account, day__lt=until)
    rows = rows.annotate(month=TruncMonth("day")).order_by()
    sums = rows.values_list("month", "agent_did", "provider", "item").annotate(a=exactly("quantity"), b=exactly("usd"))
    return {
        Key(*key): Amount(nano_usd(quantity), pricing.rounded(Fraction(nano, 10**9), pricing.CENTS))
        for *key, quantity, nano in sums
    }


def billed(account: Account) -> dict[Key, Amount]:
    """What an account's statements say, corrections included."""
    rows = StatementLine.objects.filter(statement__account=account).order_by()
    sums = rows.values_list("for_month", "agent_did", "provider", "item").annotate(a=exactly("quantity"), b=exactly("usd"))
    return {Key(*key): Amount(nano_usd(quantity), nano_usd(nano).quantize(NOTHING)) for *key, quantity, nano in sums}


def due(month: date) -> QuerySet[Account]:
    """The accounts that have something on a statement of this month, or may have: costs, or earlier statements."""
    begin, end = month.replace(day=1), following(month)
    used = CostRecord.objects.filter(day__gte=begin, day__lt=end).order_by().values("account")
    before = Statement.objects.filter(month__lte=begin).order_by().values("account")
    return Account.objects.filter(Q(pk__in=used) | Q(pk__in=before)).order_by("name")


def open_months(account: Account, *, now: datetime) -> list[date]:
    """The months to close, in their order: from the first that has costs and no statement to the last that is over. If none has
    costs, the last alone: what was corrected since the last statement is on it."""
    last = Statement.objects.filter(account=account).order_by("-month").first()
    this = day_of(now).replace(day=1)
    days = CostRecord.objects.filter(account=account, day__lt=this, **({"day__gte": following(last.month)} if last else {}))
    first = days.order_by("day").values_list("day", flat=True).first()
    if first is None:
        before = (this - timedelta(days=1)).replace(day=1)
        return [before] if last and last.month < before else []
    months = [first.replace(day=1)]
    while following(months[-1]) < this:
        months.append(following(months[-1]))
    return months


def last_of(month: date) -> date:
    return following(month) - timedelta(days=1)


def named(month: date) -> str:
    return f"{month:%Y-%m}"


# --- credits ----------------------------------------------------------------------------------------------------------


def grant(account: Account, usd: Decimal, *, now: datetime, actor: str, reason: str) -> Credit:
    return Credit.objects.create(account=account, usd=usd, at=now, actor=actor, reason=reason)


def reverse(pk: int, *, now: datetime, actor: str, reason: str) -> bool:
    """Take back what is left of a credit. False: nothing is, or it was taken back before."""
    credit = Credit.objects.select_related("account").get(pk=pk)
    with transaction.atomic(durable=True):
        Account.objects.select_for_update(no_key=True).get(pk=credit.account_id)
        rest = left(credit.account).get(pk, NOTHING)
        if rest <= 0:
            return False
        Credit.objects.create(
            account=credit.account, kind=Credit.Kind.REVERSAL, usd=-rest, at=now, actor=actor, reason=reason, reversed=credit
        )
    return True


def left(account: Account) -> dict[int, Decimal]:
    """What is left of each credit granted. Statements use up the oldest first."""
    booked = [*Credit.objects.filter(account=account).order_by("pk").values_list("pk", "usd", "reversed")]
    back = {of: usd for _, usd, of in booked if of}
    used = _used(account)
    rest: dict[int, Decimal] = {}
    for pk, usd, of in booked:
        if not of:
            whole = usd + back.get(pk, NOTHING)
            taken = min(whole, used)
            used -= taken
            rest[pk] = whole - taken
    return rest


def balance(account: Account) -> Decimal:
    """Credits that no statement has used yet."""
    booked = Credit.objects.filter(account=account).values_list("usd", flat=True)
    return sum(booked, NOTHING) - _used(account)


def _used(account: Account) -> Decimal:
    return sum(Statement.objects.filter(account=account).values_list("credit_used", flat=True), NOTHING)


def balances() -> Mapping[int, Decimal]:
    """Of every account that was ever given credit."""
    cents: dict[int, int] = {}
    for model, field, sign in ((Credit, "usd", 1), (Statement, "credit_used", -1)):
        rows: Any = model.objects.order_by().values_list("account").annotate(cents=exactly(field, parts=CENT))
        for account, amount in rows:
            cents[account] = cents.get(account, 0) + sign * int(amount)
    return {account: Decimal(amount).scaleb(-2) for account, amount in cents.items()}
