"""Closed months: what is frozen stays, what changes comes as corrections, and all of it together is always what was used."""

from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import hypothesis
import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from billing import costs, dates, metering, statements
from billing.models import Account, CostRecord, Credit, Membership, Rate, Statement, StatementLine, UsageRecord, Watermark
from billing.statements import MonthNotClosable
from leases import execution, snapshots
from sandboxes import sweeps
from sandboxes.models import DataSize, LlmCall
from sandboxes.runs import Command
from tests.conftest import SimulatedCrash, run_in_threads
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    advance_and_price,
    close_month,
    create_rate,
    create_time_usage,
    create_token_usage,
    get_house_account,
    join_account,
    list_cost_records,
    parse_day,
    parse_utc,
)

pytestmark = pytest.mark.django_db
DECEMBER, JANUARY, FEBRUARY = parse_utc("2026-12-01T00:00"), parse_utc("2027-01-01T00:00"), parse_utc("2027-02-01T00:00")
OCTOBER, NOVEMBER = parse_day("2026-10-01"), parse_day("2026-11-01")
USD = Decimal
BATCHES = [
    metering._meter_time,
    metering._meter_resource_use,
    metering._meter_runs,
    metering._meter_snapshots,
    metering._meter_agent_data,
    metering._meter_llm_calls,
]


def price(now: datetime = DECEMBER) -> None:
    advance_and_price(now)


def close(account: Account, month: date = NOVEMBER, now: datetime = DECEMBER) -> Statement:
    return close_month(account, month, now=now)


def shown(statement: Statement) -> list[tuple[Any, ...]]:
    return [*statement.lines.values_list("kind", "for_month", "agent_did", "item", "quantity", "usd")]


def even(account: Account) -> bool:
    """Are its statements together what its costs are, line by line, up to the last month that is closed?"""
    last = Statement.objects.filter(account=account).order_by("month").last()
    if last is None:
        return not statements.sum_billed_costs(account)
    derived = statements.sum_derived_costs(account, until=dates.start_of_next_month(last.month))
    billed = {key: amount.usd for key, amount in statements.sum_billed_costs(account).items() if amount.usd}
    return billed == {key: amount.usd for key, amount in derived.items() if amount.usd}


@pytest.fixture
def used(db: None) -> None:
    """Ada: 3 h in November and 0.005 USD of calls; Bob: 1 h. An hour costs 0.335 USD."""
    create_rate("time", "0.335")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    create_token_usage("2026-11-03T10:00", "0.005", provider="acme")
    create_time_usage("2026-11-30T23:00", HOUR, BOB, provider="acme")
    price()


# --- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("used")
def test_statement_sums_lines_rounded_to_cents() -> None:
    made = close(get_house_account())
    assert shown(made) == [
        ("usage", NOVEMBER, ADA, "llm", 1, USD("0.01")),
        ("usage", NOVEMBER, ADA, "time", 3, USD("1.01")),  # 1.005
        ("usage", NOVEMBER, BOB, "time", 1, USD("0.34")),  # 0.335
    ]
    assert (made.subtotal, made.credit_used, made.total) == (USD("1.36"), 0, USD("1.36"))
    assert (made.closed_at, made.closed_by) == (DECEMBER, "eve")


@pytest.mark.usefixtures("used")
def test_closing_is_idempotent() -> None:
    first, made = statements.close_month(get_house_account(), NOVEMBER, now=DECEMBER, actor="eve")
    again, made_again = statements.close_month(get_house_account(), parse_day("2026-11-17"), now=JANUARY, actor="bob")
    assert (first, made, made_again) == (again, True, False)
    assert Statement.objects.get().closed_by == "eve"


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize(("now", "why"), [("2026-11-30T23:59:59.999999", "2026-11 is not over"), ("2026-12-01T00:00", None)])
def test_month_closes_only_after_its_end(now: str, why: str | None) -> None:
    if why is None:
        assert close(get_house_account(), now=parse_utc(now))
    else:
        with pytest.raises(MonthNotClosable, match=why):
            close(get_house_account(), now=parse_utc(now))


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("behind", metering.WATERMARK_NAMES)
def test_month_behind_a_watermark_does_not_close(behind: str) -> None:
    Watermark.objects.filter(name=behind).update(at=parse_utc("2026-11-30T23:59:59"))
    with pytest.raises(MonthNotClosable, match="2026-11 is not metered"):
        close(get_house_account())
    Watermark.objects.filter(name=behind).delete()
    with pytest.raises(MonthNotClosable, match="2026-11 is not metered"):
        close(get_house_account())
    assert not Statement.objects.exists()


@pytest.mark.usefixtures("used")
def test_month_with_unpriced_days_does_not_close() -> None:
    create_time_usage("2026-12-01T01:00", provider="acme")
    assert close(get_house_account())
    create_time_usage("2026-10-31T01:00", agent="did:plc:late", provider="acme")
    for name in metering.WATERMARK_NAMES:
        Watermark.objects.filter(name=name).update(at=JANUARY)
    with pytest.raises(MonthNotClosable, match="not priced yet"):
        close(get_house_account(), parse_day("2026-12-01"), JANUARY)
    price(JANUARY)
    assert close(get_house_account(), parse_day("2026-12-01"), JANUARY)


@pytest.mark.parametrize("metered", [BATCHES[number:] + BATCHES[:number] for number in range(6)])  # each is the last once
def test_month_with_unmetered_facts_does_not_close(grant: Callable[..., Any], metered: Any) -> None:
    """A pass that stopped, or started over, has moved its watermark; what it has not read would be missing."""
    now, following = parse_utc("2026-11-21T12:00"), parse_utc("2026-12-02T00:00")
    create_rate("time", "1", provider="memory", since="2026-01-01")
    held = grant(now=now)
    execution.exec_command(held.pk, Command(["true"], timedelta(seconds=5)), now=now)
    sweeps.record_readings(now=now + timedelta(minutes=5))
    snapshots.take_snapshot(held.pk, name="", now=now, actor="eve")
    DataSize.objects.create(agent_did=held.agent_did, size_bytes=10**9, at=now)
    LlmCall.objects.create(
        call_id="1" * 32, holder=held.pk, agent_did=held.agent_did, model="m", started_at=now, deadline_at=now, ended_at=now,
        outcome="ok", cost=USD("0.5"),
    )  # fmt: skip
    metering.meter_usage(now=following)
    price(following)
    whole = statements.sum_derived_costs(get_house_account(), until=parse_day("2026-12-01"))
    metering.reset_usage()
    costs.price_usage(now=following)
    assert not CostRecord.objects.exists()
    for each in metered:  # one after the other, as passes that stop in between leave them
        with pytest.raises(MonthNotClosable, match="not metered up to its end"):
            close(get_house_account(), now=following)
        each(None, following)
        costs.price_usage(now=following)
    made = close(get_house_account(), now=following)
    assert (made.subtotal > 200, statements.sum_billed_costs(get_house_account())) == (True, whole)


@pytest.mark.usefixtures("used")
def test_months_close_in_order() -> None:
    create_time_usage("2026-10-05T10:00", provider="acme")
    price()
    with pytest.raises(MonthNotClosable, match="2026-10 has costs and is not closed"):
        close(get_house_account())
    assert statements.find_open_months(get_house_account(), now=DECEMBER) == [OCTOBER, NOVEMBER]
    close(get_house_account(), OCTOBER)
    close(get_house_account())
    assert statements.find_open_months(get_house_account(), now=DECEMBER) == []
    with pytest.raises(MonthNotClosable, match="2026-11 is closed"):
        close(get_house_account(), parse_day("2026-09-01"))


@pytest.mark.usefixtures("used")
def test_booked_rows_cannot_be_changed_or_deleted() -> None:
    made = close(get_house_account())
    credit = statements.grant_credit(get_house_account(), USD("5"), now=DECEMBER, actor="eve", reason="sorry")
    for row in (made, made.lines.first(), credit):
        assert row
        with pytest.raises(ValidationError, match="cannot be"):
            row.save()
        with pytest.raises(ValidationError, match="cannot be"):
            row.delete()
        with pytest.raises(ValidationError, match="cannot be"):
            type(row).objects.filter(pk=row.pk).update(pk=0)
        with pytest.raises(ValidationError, match="cannot be"):
            type(row).objects.all().delete()
    with pytest.raises(ValidationError, match="cannot be"):
        Credit.objects.bulk_update([credit], ["reason"])


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("where", ["closing", "closed"])
def test_crash_while_closing_closes_nothing(where: str, at_checkpoint: Callable[..., None]) -> None:
    def die() -> None:
        raise SimulatedCrash

    at_checkpoint(where, die)
    with pytest.raises(SimulatedCrash):
        close(get_house_account())
    assert not Statement.objects.exists()
    close(get_house_account())
    assert even(get_house_account())


@pytest.mark.django_db(transaction=True)
def test_concurrent_closings_use_a_credit_once() -> None:
    create_rate("time", "10")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    price()
    statements.grant_credit(get_house_account(), USD("12"), now=DECEMBER, actor="eve", reason="welcome")
    with run_in_threads(4) as run:
        done = run(lambda number: statements.close_month(get_house_account(), NOVEMBER, now=DECEMBER, actor=f"eve {number}"))
    assert sorted(made for _, made in done) == [False, False, False, True]
    assert len({statement.pk for statement, _ in done}) == 1
    assert Statement.objects.get().total == 18
    assert (StatementLine.objects.count(), statements.get_balance(get_house_account())) == (1, 0)


# --- what changes afterwards ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("used")
def test_late_usage_is_a_correction_on_the_next_statement() -> None:
    before = shown(close(get_house_account()))
    create_time_usage("2026-11-15T10:00", 2 * HOUR, provider="acme")
    price(JANUARY)
    assert shown(Statement.objects.get()) == before
    later = close(get_house_account(), parse_day("2026-12-01"), JANUARY)
    assert shown(later) == [("correction", NOVEMBER, ADA, "time", 2, USD("0.67"))]  # 1.675 is 1.68, and 1.01 was billed
    assert even(get_house_account())


# --- agents that move -------------------------------------------------------------------------------------------------


@pytest.fixture
def team(db: None) -> Account:
    return Account.objects.create(name="team")


@pytest.mark.usefixtures("used")
def test_move_changes_no_closed_month_and_corrects_nothing(team: Account) -> None:
    join_account(team, agent="did:plc:old")
    create_time_usage("2026-11-05T10:00", agent="did:plc:old", provider="acme")
    price()
    before = shown(close(get_house_account())), shown(close(team))
    moved = join_account(team)
    assert moved.since == parse_day("2026-12-01")
    create_time_usage("2026-12-31T23:00", 2 * HOUR, provider="acme")
    price(FEBRUARY)
    given, taken = close(get_house_account(), parse_day("2026-12-01"), FEBRUARY), close(team, parse_day("2026-12-01"), FEBRUARY)
    assert (shown(given), shown(taken)) == ([], [("usage", parse_day("2026-12-01"), ADA, "time", 1, USD("0.34"))])
    assert before == tuple(shown(each) for each in Statement.objects.filter(month=NOVEMBER).order_by("account__name"))


@pytest.mark.usefixtures("used")
def test_move_within_a_month_is_on_both_statements(team: Account) -> None:
    join_account(team, "2026-11-03")
    price()
    bills = {each.name: [line[2:] for line in shown(close(each))] for each in (get_house_account(), team)}
    assert bills == {
        "house": [(ADA, "time", 2, USD("0.67")), (BOB, "time", 1, USD("0.34"))],
        "team": [(ADA, "llm", 1, USD("0.01")), (ADA, "time", 1, USD("0.34"))],
    }


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("closed", ["", "house", "team"])
@pytest.mark.parametrize("since", ["2026-11-30", "2026-12-01", ""])
def test_membership_begins_after_the_closed_months_of_both_accounts(team: Account, closed: str, since: str) -> None:
    if closed:
        close(Account.objects.get(name=closed))
    if closed and since == "2026-11-30":
        with pytest.raises(ValidationError, match=f"{closed} has closed 2026-11.*from 2026-12-01 on"):
            join_account(team, since)
        assert not Membership.objects.exists()
    else:
        assert str(join_account(team, since).since) == since or ("2026-12-01" if closed else "1970-01-01")


@pytest.mark.usefixtures("used")
def test_membership_begun_in_a_closed_month_is_fixed(team: Account) -> None:
    early, late = join_account(team, "2026-11-30"), join_account(get_house_account(), "2026-12-10")
    price()
    close(team)
    for change in (
        {"account": get_house_account()},
        {"since": parse_day("2026-11-29")},
        {"since": parse_day("2026-12-01")},
        {"agent_did": BOB},
    ):
        row = Membership.objects.get(pk=early.pk)
        for name, value in change.items():
            setattr(row, name, value)
        with pytest.raises(ValidationError, match="has closed 2026-11"):
            row.save()
    with pytest.raises(ValidationError, match="has closed 2026-11"):
        early.delete()
    assert (early.fixed, late.fixed) == (True, False)
    late.since = parse_day("2026-12-01")
    late.save()
    late.delete()
    assert [*Membership.objects.values_list("since", flat=True)] == [parse_day("2026-11-30")]


@pytest.mark.usefixtures("used")
def test_closed_months_of_unaffected_accounts_do_not_block_a_move(team: Account) -> None:
    """The team has closed November; a move in October between two others, which ends when the team's time begins, may be."""
    lab = Account.objects.create(name="lab")
    join_account(team, "2026-11-01")
    price()
    close(team)
    join_account(lab, "2026-10-10")
    with pytest.raises(ValidationError, match="team has closed 2026-11"):
        join_account(lab, "2026-11-02")


@pytest.mark.usefixtures("used")
def test_membership_is_unique_per_agent_and_day(team: Account) -> None:
    join_account(team, "2026-11-05")
    with pytest.raises(ValidationError, match="begins on this day"):
        join_account(get_house_account(), "2026-11-05")
    join_account(get_house_account(), "2026-11-05", BOB)


@pytest.mark.django_db(transaction=True)
def test_concurrent_move_and_closing_refuse_one(team: Account) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-20T10:00", provider="acme")
    price()
    account = get_house_account()

    def act(number: int) -> bool:
        try:
            return bool(close(account) if number else join_account(team, "2026-11-15"))
        except (MonthNotClosable, ValidationError):
            return False

    with run_in_threads(2) as run:
        assert sorted(run(act)) == [False, True]
    price(JANUARY)
    close(account, now=JANUARY)
    assert shown(close(account, parse_day("2026-12-01"), JANUARY)) == []


# --- what does not change ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("used")
def test_empty_month_can_be_closed() -> None:
    close(get_house_account())
    price(JANUARY)
    later = close(get_house_account(), parse_day("2026-12-01"), JANUARY)
    assert (shown(later), later.total) == ([], 0)


@pytest.mark.usefixtures("used")
def test_rebuild_changes_no_statement() -> None:
    before = shown(close(get_house_account()))
    costs.reset_costs()
    price(JANUARY)
    assert shown(Statement.objects.get()) == before
    assert shown(close(get_house_account(), parse_day("2026-12-01"), JANUARY)) == []


def test_accounts_with_costs_or_earlier_statements_are_due() -> None:
    create_rate("time", "1")
    for name in ("team", "idle"):
        Account.objects.create(name=name)
    Membership.objects.create(agent_did=ADA, account=Account.objects.get(name="team"))
    create_time_usage("2026-11-05T10:00", provider="acme")
    price()
    assert [each.name for each in statements.find_due_accounts(NOVEMBER)] == ["team"]
    close(Account.objects.get(name="team"))
    assert [each.name for each in statements.find_due_accounts(parse_day("2026-12-01"))] == ["team"]
    assert [*statements.find_due_accounts(OCTOBER)] == []


# --- credits ----------------------------------------------------------------------------------------------------------


def test_statements_use_the_oldest_credit_first() -> None:
    create_rate("time", "1")
    for month, hours in (("2026-11", 6), ("2026-12", 8), ("2027-01", 1)):
        create_time_usage(f"{month}-05T10:00", hours * HOUR, provider="acme")
    price(FEBRUARY)
    one, two = (
        statements.grant_credit(get_house_account(), USD(usd), now=DECEMBER, actor="eve", reason="x" * 5)
        for usd in ("5", "4.50")
    )
    assert statements.get_balance(get_house_account()) == USD("9.50")
    found = []
    for month in ("2026-11-01", "2026-12-01", "2027-01-01"):
        made = close(get_house_account(), parse_day(month), FEBRUARY)
        found.append((made.subtotal, made.credit_used, made.total, statements.get_remaining_credits(get_house_account())))
    assert found == [
        (6, 6, 0, {one.pk: 0, two.pk: USD("3.50")}),
        (8, USD("3.50"), USD("4.50"), {one.pk: 0, two.pk: 0}),
        (1, 0, 1, {one.pk: 0, two.pk: 0}),
    ]
    assert statements.get_balances() == {get_house_account().pk: 0}


def test_reversal_takes_back_only_the_remainder() -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-05T10:00", 3 * HOUR, provider="acme")
    price()
    one, two = (
        statements.grant_credit(get_house_account(), USD(usd), now=DECEMBER, actor="eve", reason="x" * 5) for usd in ("5", "4")
    )
    close(get_house_account())
    assert statements.reverse_credit(one.pk, now=DECEMBER, actor="eve", reason="a mistake")
    assert not statements.reverse_credit(one.pk, now=DECEMBER, actor="eve", reason="again")
    entry = Credit.objects.get(kind="reversal")
    assert (entry.usd, entry.reversed, entry.reason) == (-2, one, "a mistake")
    assert (statements.get_remaining_credits(get_house_account()), statements.get_balance(get_house_account())) == (
        {one.pk: 0, two.pk: 4},
        4,
    )
    assert statements.reverse_credit(two.pk, now=DECEMBER, actor="eve", reason="this, too")
    assert statements.get_balance(get_house_account()) == 0


@pytest.mark.parametrize("usd", ["0", "-1"])
def test_credit_must_be_positive(usd: str) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        statements.grant_credit(get_house_account(), USD(usd), now=DECEMBER, actor="eve", reason="nothing")


@pytest.mark.django_db(transaction=True)
def test_credit_is_reversed_or_used_but_not_both() -> None:
    create_rate("time", "10")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    price()
    credit = statements.grant_credit(get_house_account(), USD("12"), now=DECEMBER, actor="eve", reason="welcome")

    def act(number: int) -> Any:
        if number:
            return statements.reverse_credit(credit.pk, now=DECEMBER, actor="eve", reason="a mistake")
        return close(get_house_account()).credit_used

    with run_in_threads(3) as run:
        used, *taken = run(act)
    assert (used, sorted(taken)) in [(12, [False, False]), (0, [False, True])]
    assert statements.get_balance(get_house_account()) == 0


# --- whatever happens in whatever order -------------------------------------------------------------------------------

MONTHS = [date(2026, number, 1) for number in (8, 9, 10, 11)]
AGENTS = st.sampled_from(["did:plc:a", "did:plc:b", "did:plc:c"])
DAYS = st.dates(date(2026, 8, 1), date(2026, 12, 2))
FIRST_ACCOUNTS = ("house", "one", "two")


class Ledger(RuleBasedStateMachine):
    """Usage that comes and goes in any month, agents that move on any day, months that are closed, credits given and taken
    back."""

    @initialize()
    def begin(self) -> None:
        for model in (StatementLine, Statement, Credit, CostRecord, Membership):
            rows = model._base_manager.all()
            rows.filter(kind="reversal").delete() if model is Credit else None
            rows.delete()
        UsageRecord.objects.all().delete()
        Rate.objects.filter(provider="acme").delete()
        Account.objects.exclude(name="house").delete()
        self.accounts = [Account.objects.get_or_create(name=name)[0] for name in FIRST_ACCOUNTS]
        create_rate("memory", "0.337", allowance=USD("1.5"))
        create_rate("time", "0.123456789")
        create_rate("plan", "1.005")
        price(DECEMBER)

    @rule(month=st.sampled_from(MONTHS), number=st.integers(0, 27), agent=AGENTS, minutes=st.integers(1, 2000))
    def something_is_used(self, month: date, number: int, agent: str, minutes: int) -> None:
        create_time_usage(parse_utc(f"{month.replace(day=number + 1)}T10:00"), HOUR * minutes / 60, agent, provider="acme")

    @rule(month=st.sampled_from(MONTHS), agent=AGENTS, nano=st.integers(1, 10**8))
    def a_model_is_called(self, month: date, agent: str, nano: int) -> None:
        create_token_usage(parse_utc(f"{month}T10:00"), str(USD(nano).scaleb(-9)), agent=agent, provider="acme")

    @rule(agent=AGENTS)
    def it_was_not_used_after_all(self, agent: str) -> None:
        first = UsageRecord.objects.filter(agent_did=agent).order_by("pk").first()
        UsageRecord.objects.filter(pk=first.pk if first else 0).delete()

    @rule(agent=AGENTS, number=st.integers(0, 2), since=st.none() | DAYS)
    def an_agent_moves(self, agent: str, number: int, since: date | None) -> None:
        known = Membership.objects.filter(agent_did=agent)
        if not (known.filter(since=since) if since else known).exists():  # none is told apart by the clock
            self.changes(Membership(agent_did=agent, account=self.accounts[number], since=since).save)

    @rule(agent=AGENTS, number=st.integers(0, 2), since=DAYS)
    def a_move_is_put_right(self, agent: str, number: int, since: date) -> None:
        last = Membership.objects.filter(agent_did=agent).order_by("-pk").first()
        if last and not Membership.objects.filter(agent_did=agent, since=since).exclude(pk=last.pk).exists():
            last.account, last.since = self.accounts[number], since
            self.changes(last.save)

    @rule(agent=AGENTS)
    def a_move_is_taken_back(self, agent: str) -> None:
        if first := Membership.objects.filter(agent_did=agent).order_by("since").first():
            self.changes(first.delete)

    def changes(self, act: Callable[[], Any]) -> None:
        """It may be refused. What is closed never costs another account, or something else, because of it."""
        price(DECEMBER)
        before, why = self.closed(), ""
        try:
            act()
        except ValidationError as refused:
            why = str(refused)
        price(DECEMBER)
        assert self.closed() == before
        assert not why or (before and "closed months cannot change" in why)

    def closed(self) -> dict[str, Any]:
        last = {each: Statement.objects.filter(account=each).order_by("month").last() for each in self.accounts}
        return {
            each.name: statements.sum_derived_costs(each, until=dates.start_of_next_month(one.month))
            for each, one in last.items()
            if one
        }

    @rule()
    def all_is_derived_again(self) -> None:
        price(DECEMBER)
        before = list_cost_records()
        costs.reset_costs()
        price(DECEMBER)
        assert list_cost_records() == before

    @rule(usd=st.integers(1, 300), number=st.integers(0, 2))
    def credit_is_given(self, usd: int, number: int) -> None:
        statements.grant_credit(self.accounts[number], USD(usd).scaleb(-2), now=DECEMBER, actor="eve", reason="given")

    @rule()
    def credit_is_taken_back(self) -> None:
        last = Credit.objects.filter(kind="grant").order_by("-pk").first()
        if last:
            statements.reverse_credit(last.pk, now=DECEMBER, actor="eve", reason="taken")

    @rule(number=st.integers(0, 2), month=st.sampled_from(MONTHS))
    def a_month_is_closed(self, number: int, month: date) -> None:
        account = self.accounts[number]
        price(DECEMBER)
        before = [shown(each) for each in Statement.objects.order_by("pk")]
        try:
            _, made = statements.close_month(account, month, now=DECEMBER, actor="eve")
        except MonthNotClosable:
            made = False
        known = [shown(each) for each in Statement.objects.order_by("pk")]
        assert known[: len(before)] == before
        assert len(known) == len(before) + made
        assert not made or even(account)

    @invariant()
    def books_balance(self) -> None:
        for account in getattr(self, "accounts", []):
            rest = statements.get_remaining_credits(account)
            assert all(usd >= 0 for usd in rest.values())
            assert statements.get_balance(account) == sum(rest.values(), USD(0))
        for each in Statement.objects.all():
            assert each.subtotal == sum((line.usd for line in each.lines.all()), USD(0))
            assert (each.total, each.credit_used >= 0) == (each.subtotal - each.credit_used, True)


def test_statements_equal_costs_after_any_history() -> None:
    run_state_machine_as_test(
        Ledger,
        settings=hypothesis.settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target],
        ),
    )  # fmt: skip
