"""Statements: closing, corrections, moves of agents and credits."""

from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, models, transaction

from billing import costs, metering, statement_lines, statements
from billing.budgets import call_admission
from billing.models import Account, CostRecord, Credit, Membership, Statement, StatementLine, UsageRecord, Watermark
from billing.statements import MonthNotClosable
from leases import execution, snapshots
from sandboxes.egress import model_pricing
from sandboxes.egress.repricing import reprice_calls
from sandboxes.models import DataSize, LlmCall
from sandboxes.runs.operations import Command
from sandboxes.sweeps import measurements
from tests.conftest import run_in_threads
from tests.support.actors import console_user
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    advance_and_price,
    close_month,
    create_llm_call,
    create_rate,
    create_time_usage,
    create_token_usage,
    get_house_account,
    is_balanced,
    join_account,
    list_statement_lines,
    parse_day,
    parse_utc,
)
from tests.support.model_rates import create_rates

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: costs and statements are computed in the database")]
DECEMBER, JANUARY, FEBRUARY = parse_utc("2026-12-01T00:00"), parse_utc("2027-01-01T00:00"), parse_utc("2027-02-01T00:00")
MARCH = parse_utc("2027-03-01T00:00")
OCTOBER, NOVEMBER = parse_day("2026-10-01"), parse_day("2026-11-01")
USD = Decimal
BATCHES = [
    metering._meter_time, metering._meter_resource_use, metering._meter_runs, metering._meter_snapshots,
    metering._meter_agent_data, metering._meter_llm_calls,
]  # fmt: skip


def price(now: datetime = DECEMBER) -> None:
    advance_and_price(now)


def close(account: Account, month: date = NOVEMBER, now: datetime = DECEMBER) -> Statement:
    return close_month(account, month, now=now)


def grant_credit(usd: str) -> Credit:
    return statements.grant_credit(get_house_account(), USD(usd), now=DECEMBER, actor="eve", reason="welcome")


@pytest.fixture
def november(db: None) -> None:
    """Ada: 3 h and calls of 0.005 USD; Bob: 1 h. An hour costs 0.335 USD."""
    create_rate("time", "0.335")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    create_token_usage("2026-11-03T10:00", "0.005", provider="acme")
    create_time_usage("2026-11-30T23:00", HOUR, BOB, provider="acme")
    price()


@pytest.fixture
def uncertain_november(db: None) -> None:
    """Ada: 7 calls of 2.005 USD, of which 5 have no price and one is an estimate of 0.125 USD. Bob: one estimate."""
    create_token_usage("2026-11-03T10:00", "2.005", 7, unpriced=5, estimated=1, estimated_usd=USD("0.125"), source="calls")
    create_token_usage("2026-11-03T10:00", "0.1", agent=BOB, estimated=1, estimated_usd=USD("0.1"))
    price()


# --- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_month_of_an_installation_without_any_usage_is_closed() -> None:
    metering.meter_usage(now=DECEMBER)
    price()
    assert (close(get_house_account()).total, Watermark.objects.filter(name="costs").count()) == (0, 1)
    create_rate("time", "1")
    create_time_usage("2026-12-02T22:00", HOUR, provider="acme")
    price(JANUARY)
    assert close(get_house_account(), parse_day("2026-12-01"), JANUARY).total == 1


@pytest.mark.usefixtures("uncertain_november")
def test_statement_names_the_estimated_and_unpriced_calls_of_its_month() -> None:
    statement = close(get_house_account())
    columns = ("agent_did", "usd", "estimated_usd", "unpriced")
    assert [*statement.lines.values_list(*columns)] == [(ADA, USD("2.01"), USD("0.13"), 5), (BOB, USD("0.1"), USD("0.1"), 0)]
    assert (statement.unpriced, statement.estimated_usd) == (5, USD("0.23"))
    assert statement.uncertainty == "0.23 USD estimated, 5 calls without a price"


@pytest.mark.usefixtures("uncertain_november")
def test_correction_of_calls_that_have_a_price_since_takes_them_back() -> None:
    close(get_house_account())
    UsageRecord.objects.filter(source="calls").delete()
    create_token_usage("2026-11-03T10:00", "3", 7, source="calls")
    price(JANUARY)
    statement = close(get_house_account(), parse_day("2026-12-01"), JANUARY)
    lines = [(line.kind, line.usd, line.estimated_usd, line.unpriced) for line in statement.lines.all()]
    assert lines == [("correction", USD("0.99"), USD("-0.13"), -5)]
    assert (statement.unpriced, statement.estimated_usd, statement.uncertainty) == (0, 0, "")
    assert is_balanced(get_house_account())


@pytest.mark.usefixtures("november")
def test_statement_sums_lines_rounded_to_cents() -> None:
    statement = close(get_house_account())
    assert list_statement_lines(statement) == [
        ("usage", NOVEMBER, ADA, "llm", 1, USD("0.01")),
        ("usage", NOVEMBER, ADA, "time", 3, USD("1.01")),  # 1.005
        ("usage", NOVEMBER, BOB, "time", 1, USD("0.34")),  # 0.335
    ]
    assert (statement.subtotal, statement.credit_used, statement.total) == (USD("1.36"), 0, USD("1.36"))
    assert (statement.closed_at, statement.closed_by) == (DECEMBER, "eve")


def test_each_rate_of_a_month_has_a_line_whose_amount_follows_from_its_quantity_and_rate() -> None:
    create_rate("time", "0.335", allowance=USD("0.5")), create_rate("time", "0.777", "2026-11-10T12:00")
    create_time_usage("2026-11-10T10:20", timedelta(hours=3, seconds=1), provider="acme")  # 1 h 40 min by the first rate
    price()
    statement = close(get_house_account())
    lines = [(line.rate.usd, line.quantity, line.free, line.usd) for line in statement.lines.select_related("rate")]
    assert lines == [
        (USD("0.335"), USD("1.666666667"), USD("0.5"), USD("0.39")),
        (USD("0.777"), USD("1.333611111"), USD(0), USD("1.04")),
    ]
    for rate, quantity, free, usd in lines:
        assert usd == ((quantity - free) * rate).quantize(USD("0.01"), ROUND_HALF_UP)
    assert statement.subtotal == USD("1.43")


@pytest.mark.usefixtures("november")
def test_month_closed_before_lines_had_a_rate_is_not_corrected() -> None:
    statement = close(get_house_account())
    models.QuerySet(StatementLine).update(rate=None)
    price(JANUARY)
    assert list_statement_lines(close(get_house_account(), parse_day("2026-12-01"), JANUARY)) == []
    assert sum(line.usd for line in statement.lines.all()) == USD("1.36")


@pytest.fixture
def models_of_november(db: None) -> None:
    """Ada: a call each of two models. The two cost 0.004 USD each, which is 0.01 USD together."""
    for model in ("claude-opus-4-5", "gpt-5"):
        create_token_usage("2026-11-03T10:00", "0.004", 2, model=model, input_tokens=70, cached_tokens=40, output_tokens=3)
    price()


LINE_OF_CALLS = ("kind", "model", "quantity", "usd", "input_tokens", "cached_tokens", "output_tokens")


@pytest.mark.usefixtures("models_of_november")
def test_each_model_has_a_line_with_its_tokens_and_is_corrected_by_itself() -> None:
    lines = close(get_house_account()).lines.values_list(*LINE_OF_CALLS)
    assert [*lines] == [("usage", model, 2, 0, 70, 40, 3) for model in ("claude-opus-4-5", "gpt-5")]
    create_token_usage("2026-11-04T10:00", "1", model="gpt-5", input_tokens=9, output_tokens=1)
    price(JANUARY)
    corrections = close(get_house_account(), parse_day("2026-12-01"), JANUARY).lines.values_list(*LINE_OF_CALLS)
    assert [*corrections] == [("correction", "gpt-5", 1, 1, 9, 0, 1)]
    assert is_balanced(get_house_account())


@pytest.mark.usefixtures("models_of_november")
def test_month_closed_before_lines_had_a_model_is_corrected_as_a_whole() -> None:
    """The statement has 0.01 USD: the line of all models, rounded once."""
    statement = close(get_house_account())
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM billing_statementcharge")
        cursor.execute("DELETE FROM billing_statementline")
    line = {"kind": "usage", "for_month": NOVEMBER, "agent_did": ADA, "provider": "docker", "item": "llm"}
    StatementLine.objects.create(statement=statement, quantity=4, usd=USD("0.01"), **line)
    price(JANUARY)
    assert not close(get_house_account(), parse_day("2026-12-01"), JANUARY).lines.exists()
    create_token_usage("2026-11-04T10:00", "1", model="gpt-5", input_tokens=9)
    price(FEBRUARY)
    corrections = close(get_house_account(), parse_day("2027-01-01"), FEBRUARY).lines.values_list(*LINE_OF_CALLS)
    assert [*corrections] == [("correction", "", 1, 1, 0, 0, 0)]
    price(MARCH)
    assert not close(get_house_account(), parse_day("2027-02-01"), MARCH).lines.exists()


def test_open_month_is_previewed_without_the_open_months_before() -> None:
    create_rate("time", "1")
    for month in ("2026-10", "2026-11", "2026-12"):
        create_time_usage(f"{month}-02T10:00", HOUR, provider="acme")
    price()
    assert close(get_house_account(), OCTOBER).total == 1
    create_time_usage("2026-10-03T10:00", HOUR, provider="acme")
    price()
    lines = statements.preview_month(get_house_account(), parse_day("2026-12-01"))
    assert [(line.kind, line.for_month, line.usd) for line in lines] == [
        ("correction", OCTOBER, 1), ("usage", parse_day("2026-12-01"), 1),
    ]  # fmt: skip
    assert [line.kind for line in statements.preview_month(get_house_account(), OCTOBER)] == ["usage"]
    assert Statement.objects.count() == 1


@pytest.mark.usefixtures("november")
def test_closing_is_idempotent() -> None:
    first, created = statements.close_month(get_house_account(), NOVEMBER, now=DECEMBER, actor=console_user())
    again, created_again = statements.close_month(
        get_house_account(), parse_day("2026-11-17"), now=JANUARY, actor=console_user("bob")
    )
    assert (first, created, created_again) == (again, True, False)
    assert Statement.objects.get().closed_by == "eve"


@pytest.mark.usefixtures("november")
def test_month_closes_only_after_its_end() -> None:
    with pytest.raises(MonthNotClosable, match="2026-11 is not over"):
        close(get_house_account(), now=DECEMBER - timedelta(microseconds=1))
    assert close(get_house_account(), now=DECEMBER)


@pytest.mark.usefixtures("november")
@pytest.mark.parametrize("behind", metering.WATERMARK_NAMES)
def test_month_behind_a_watermark_does_not_close(behind: str) -> None:
    Watermark.objects.filter(name=behind).update(at=parse_utc("2026-11-30T23:59:59"))
    with pytest.raises(MonthNotClosable, match="2026-11 is not metered"):
        close(get_house_account())
    Watermark.objects.filter(name=behind).delete()
    with pytest.raises(MonthNotClosable, match="2026-11 is not metered"):
        close(get_house_account())
    assert not Statement.objects.exists()


@pytest.mark.usefixtures("november")
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


def test_month_with_unmetered_facts_does_not_close(grant: Callable[..., Any]) -> None:
    """The watermark has advanced although the pass stopped, or a rebuild started over, before it read all facts."""
    now, following = parse_utc("2026-11-21T12:00"), parse_utc("2026-12-02T00:00")
    create_rate("time", "1", provider="memory", since="2026-01-01")
    lease = grant(now=now)
    execution.exec_command(lease.pk, Command(["true"], timedelta(seconds=5)), now=now)
    measurements.record_readings(now=now + timedelta(minutes=5))
    snapshots.take_snapshot(lease.pk, name="", now=now, actor="eve")
    DataSize.objects.create(agent_did=lease.agent_did, size_bytes=10**9, at=now)
    LlmCall.objects.create(
        call_id="1" * 32, holder=lease.pk, agent_did=lease.agent_did, model="m", started_at=now, deadline_at=now, ended_at=now,
        outcome="ok", cost=USD("0.5"),
    )  # fmt: skip
    metering.meter_usage(now=following)
    price(following)
    costs_by_line = statement_lines.sum_derived_costs(get_house_account(), until=parse_day("2026-12-01"))
    for number in range(len(BATCHES)):  # each batch is last once
        metering.reset_usage()
        costs.price_usage(now=following)
        assert not CostRecord.objects.exists()
        for meter_batch in BATCHES[number + 1 :] + BATCHES[:number]:  # the state after an interrupted pass
            meter_batch(None, following)
        costs.price_usage(now=following)
        with pytest.raises(MonthNotClosable, match="not metered up to its end"):
            close(get_house_account(), now=following)
        BATCHES[number](None, following)
        costs.price_usage(now=following)
    statement = close(get_house_account(), now=following)
    assert (statement.subtotal > 200, statement_lines.sum_billed_costs(get_house_account())) == (True, costs_by_line)


@pytest.mark.usefixtures("november")
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


@pytest.mark.usefixtures("november")
def test_booked_rows_cannot_be_changed_or_deleted() -> None:
    statement = close(get_house_account())
    credit = grant_credit("5")
    changes: list[Callable[[], Any]] = [partial(Credit.objects.bulk_update, [credit], ["reason"])]
    for row in (statement, statement.lines.get(item="llm"), credit):
        rows = type(row).objects.filter(pk=row.pk)
        changes += [row.save, row.delete, partial(rows.update, pk=0), rows.delete]
    for change in changes:
        with pytest.raises(ValidationError, match="cannot be"):
            change()


@pytest.mark.usefixtures("november")
@pytest.mark.parametrize("where", ["closing", "closed"])
def test_crash_while_closing_closes_nothing(where: str, crash_at: Callable[..., Any]) -> None:
    with crash_at(where):
        close(get_house_account())
    assert not Statement.objects.exists()
    close(get_house_account())
    assert is_balanced(get_house_account())


@pytest.mark.django_db(transaction=True)
def test_concurrent_closings_use_a_credit_once() -> None:
    create_rate("time", "10")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    price()
    grant_credit("12")
    with run_in_threads(4) as run:
        results = run(
            lambda number: statements.close_month(
                get_house_account(), NOVEMBER, now=DECEMBER, actor=console_user(f"eve {number}")
            )
        )
    assert sorted(created for _, created in results) == [False, False, False, True]
    assert len({statement.pk for statement, _ in results}) == 1
    assert Statement.objects.get().total == 18
    assert (StatementLine.objects.count(), statements.get_balance(get_house_account())) == (1, 0)


# --- corrections ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("november")
def test_late_usage_is_a_correction_on_the_next_statement() -> None:
    before = list_statement_lines(close(get_house_account()))
    create_time_usage("2026-11-15T10:00", 2 * HOUR, provider="acme")
    price(JANUARY)
    assert list_statement_lines(Statement.objects.get()) == before
    following = close(get_house_account(), parse_day("2026-12-01"), JANUARY)
    correction = ("correction", NOVEMBER, ADA, "time", 2, USD("0.67"))  # 1.675 is 1.68, and 1.01 was billed
    assert list_statement_lines(following) == [correction]
    assert is_balanced(get_house_account())


@pytest.mark.parametrize("corrected", ["3", "500"])
def test_calls_priced_again_are_a_correction_on_the_next_statement(grant: Callable[..., Any], corrected: str) -> None:
    since, called = parse_utc("2026-11-01T00:00"), parse_utc("2026-11-21T12:00")
    create_rates("m", input=300, output=1, since=since)
    lease = grant(now=called)
    fields = {"model": "m", "input_tokens": 10**6, "cached_tokens": 0, "output_tokens": 0}
    create_llm_call(lease, started_at=called, ended_at=called, cost=None, priced="", **fields)
    assert model_pricing.price_calls(called) == 1
    metering.meter_usage(now=DECEMBER)
    costs.price_usage(now=DECEMBER)
    before = list_statement_lines(close(get_house_account()))
    assert before == [("usage", NOVEMBER, lease.agent_did, "llm", 1, 300)]

    create_rates("m", input=corrected, since=since)
    reprice_calls(since, now=JANUARY, apply=True)
    assert call_admission.sum_lease_calls(lease.pk) == USD(corrected)  # once: the part in the usage record is known
    metering.meter_usage(now=JANUARY)
    costs.price_usage(now=JANUARY)
    assert call_admission.sum_lease_calls(lease.pk) == USD(corrected)
    assert list_statement_lines(Statement.objects.get()) == before
    [line] = list_statement_lines(close(get_house_account(), parse_day("2026-12-01"), JANUARY))
    assert (line[0], line[1], line[3], line[5]) == ("correction", NOVEMBER, "llm", USD(corrected) - 300)
    assert is_balanced(get_house_account())


# --- agents that move -------------------------------------------------------------------------------------------------


@pytest.fixture
def team(db: None) -> Account:
    return Account.objects.create(name="team")


@pytest.mark.usefixtures("november")
def test_move_changes_no_closed_month_and_corrects_nothing(team: Account) -> None:
    join_account(team, agent="did:plc:old")
    create_time_usage("2026-11-05T10:00", agent="did:plc:old", provider="acme")
    price()
    before = list_statement_lines(close(get_house_account())), list_statement_lines(close(team))
    moved = join_account(team)
    assert moved.since == parse_day("2026-12-01")
    create_time_usage("2026-12-31T23:00", 2 * HOUR, provider="acme")
    price(FEBRUARY)
    assert list_statement_lines(close(get_house_account(), parse_day("2026-12-01"), FEBRUARY)) == []
    december = list_statement_lines(close(team, parse_day("2026-12-01"), FEBRUARY))
    assert december == [("usage", parse_day("2026-12-01"), ADA, "time", 1, USD("0.34"))]
    of_november = Statement.objects.filter(month=NOVEMBER).order_by("account__name")
    assert before == tuple(list_statement_lines(each) for each in of_november)


@pytest.mark.usefixtures("november")
def test_move_within_a_month_is_on_both_statements(team: Account) -> None:
    join_account(team, "2026-11-03")
    price()
    bills = {each.name: [line[2:] for line in list_statement_lines(close(each))] for each in (get_house_account(), team)}
    assert bills == {
        "house": [(ADA, "time", 2, USD("0.67")), (BOB, "time", 1, USD("0.34"))],
        "team": [(ADA, "llm", 1, USD("0.01")), (ADA, "time", 1, USD("0.34"))],
    }


@pytest.mark.usefixtures("november")
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


@pytest.mark.usefixtures("november")
def test_membership_begun_in_a_closed_month_is_fixed(team: Account) -> None:
    early, late = join_account(team, "2026-11-30"), join_account(get_house_account(), "2026-12-10")
    price()
    close(team)
    sinces = [("since", parse_day("2026-11-29")), ("since", parse_day("2026-12-01"))]
    for name, value in [*sinces, ("account", get_house_account()), ("agent_did", BOB)]:
        row = Membership.objects.get(pk=early.pk)
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


@pytest.mark.usefixtures("november")
def test_closed_months_of_unaffected_accounts_do_not_block_a_move(team: Account) -> None:
    """The team has closed November. A move in October between two other accounts, before the team's membership, is allowed."""
    lab = Account.objects.create(name="lab")
    join_account(team, "2026-11-01")
    price()
    close(team)
    join_account(lab, "2026-10-10")
    with pytest.raises(ValidationError, match="team has closed 2026-11"):
        join_account(lab, "2026-11-02")


@pytest.mark.usefixtures("november")
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
    assert list_statement_lines(close(account, parse_day("2026-12-01"), JANUARY)) == []


# --- unchanged statements and due accounts ----------------------------------------------------------------------------


@pytest.mark.usefixtures("november")
def test_rebuild_changes_no_statement_and_an_empty_month_can_be_closed() -> None:
    before = list_statement_lines(close(get_house_account()))
    costs.reset_costs()
    price(JANUARY)
    assert list_statement_lines(Statement.objects.get()) == before
    following = close(get_house_account(), parse_day("2026-12-01"), JANUARY)
    assert (list_statement_lines(following), following.total) == ([], 0)


def test_accounts_with_costs_or_earlier_statements_are_due() -> None:
    create_rate("time", "1")
    Account.objects.create(name="idle"), join_account("team")
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
    first, second = grant_credit("5"), grant_credit("4.50")
    assert statements.get_balance(get_house_account()) == USD("9.50")
    for month, expected, of_second in (
        ("2026-11-01", (6, 6, 0), USD("3.50")), ("2026-12-01", (8, USD("3.50"), USD("4.50")), 0), ("2027-01-01", (1, 0, 1), 0),
    ):  # fmt: skip
        statement = close(get_house_account(), parse_day(month), FEBRUARY)
        assert (statement.subtotal, statement.credit_used, statement.total) == expected
        assert statements.get_remaining_credits(get_house_account()) == {first.pk: 0, second.pk: of_second}
    assert statements.get_balances() == {get_house_account().pk: 0}


def test_reversal_takes_back_only_the_remainder() -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-05T10:00", 3 * HOUR, provider="acme")
    price()
    first, second = grant_credit("5"), grant_credit("4")
    close(get_house_account())
    assert statements.reverse_credit(first.pk, now=DECEMBER, actor="eve", reason="a mistake")
    assert not statements.reverse_credit(first.pk, now=DECEMBER, actor="eve", reason="again")
    entry = Credit.objects.get(kind="reversal")
    assert (entry.usd, entry.reversed, entry.reason) == (-2, first, "a mistake")
    assert statements.get_remaining_credits(get_house_account()) == {first.pk: 0, second.pk: 4}
    assert statements.get_balance(get_house_account()) == 4
    assert statements.reverse_credit(second.pk, now=DECEMBER, actor="eve", reason="this, too")
    assert statements.get_balance(get_house_account()) == 0


@pytest.mark.parametrize("usd", ["0", "-1"])
def test_credit_must_be_positive(usd: str) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        grant_credit(usd)


@pytest.mark.django_db(transaction=True)
def test_credit_is_reversed_or_used_but_not_both() -> None:
    create_rate("time", "10")
    create_time_usage("2026-11-02T22:00", 3 * HOUR, provider="acme")
    price()
    credit = grant_credit("12")

    def act(number: int) -> Any:
        if number:
            return statements.reverse_credit(credit.pk, now=DECEMBER, actor="eve", reason="a mistake")
        return close(get_house_account()).credit_used

    with run_in_threads(3) as run:
        credit_used, *reversed_ = run(act)
    assert (credit_used, sorted(reversed_)) in [(12, [False, False]), (0, [False, True])]
    assert statements.get_balance(get_house_account()) == 0
