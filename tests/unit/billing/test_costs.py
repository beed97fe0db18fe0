"""Derivation of costs: repeated, concurrent and interrupted passes, an independent computation, and agents that move."""

import random
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
from django.db import connection
from django.utils import timezone
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from billing import costs, period_totals, totals
from billing.dates import start_of_next_month
from billing.forecast import forecast
from billing.models import CostRecord, Membership, Rate, Unpriced, UsageRecord
from billing.pricing import round_half_up
from controlplane import schedules
from tests.conftest import NOW, run_in_threads
from tests.support.billing import (
    ADA,
    BASIC_INSTANCE,
    BOB,
    HOUR,
    create_rate,
    create_storage_usage,
    create_time_usage,
    create_token_usage,
    derive_lease_id,
    join_account,
    list_cost_records,
    list_cost_values,
    parse_day,
    parse_utc,
    price,
    price_and_list,
    price_and_sum,
)
from tests.support.period_totals import check_period_totals
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: costs and statements are computed in the database")]
DAY = timedelta(days=1)
USD = Decimal


# --- repeated and concurrent passes -----------------------------------------------------------------------------------


@pytest.fixture
def three_months(db: None) -> None:
    """Time, storage, calls, a change of rate and moves of agents over three months."""
    chance = random.Random(7)
    create_rate("time", "0.05", provider="docker", since="2026-11-03T11:11")
    create_rate("storage", "0.015", provider="docker", allowance=USD("0.5"))
    join_account("team", agent="did:plc:a1"), join_account("lab", "2026-11-20", "did:plc:a2")
    join_account("lab", "2026-10-20", "did:plc:a1"), join_account("house", "2026-11-05", "did:plc:a1")
    for number in range(24):
        began = parse_utc("2026-09-15") + timedelta(microseconds=chance.randrange(80 * 86_400 * 10**6))
        agent = f"did:plc:a{number % 5}" if number % 7 else ""
        fields = BASIC_INSTANCE if number % 2 else {"provider": "docker"}
        create_time_usage(began, timedelta(microseconds=chance.randrange(1, 60 * 3600 * 10**6)), agent, **fields)
        if agent:
            create_storage_usage(
                str(began.replace(tzinfo=None)), timedelta(days=chance.randrange(1, 20)), chance.randrange(10**11), agent=agent
            )
            create_token_usage(str(began.replace(tzinfo=None)), f"0.{chance.randrange(10**9):09}", agent=agent)


@pytest.mark.usefixtures("three_months")
@pytest.mark.parametrize(
    "filters",
    [{}, {"account": "team"}, {"account": "house"}, {"agents": ["did:plc:a1", "did:plc:a2"]}, {"provider": "docker"}],
    ids=str,
)
def test_a_forecast_is_the_pace_of_the_days_of_the_cost_report(filters: dict[str, Any]) -> None:
    create_rate("plan", "7", provider="docker")
    costs.price_usage(now=NOW)
    CostRecord.objects.filter(day=date(2026, 11, 3)).delete()  # a day with time and without costs
    period_totals.update_totals([date(2026, 11, 3)])
    for today, last in [(date(2026, 10, 2), 7), (date(2026, 11, 10), 7), (date(2026, 11, 5), 2), (date(2026, 11, 28), 60)]:
        begin, first = today.replace(day=1), today - last * DAY
        recent = totals.sum_costs("day", since=first, until=today, **filters)
        days = (today - date.fromisoformat(recent[0].key)).days if recent else 0
        plans = totals.sum_costs("day", since=first, until=today, item="plan", **filters)
        usd = sum((each.usd for each in recent), USD(0)) - sum((each.usd for each in plans), USD(0))
        spent = totals.sum_costs("day", since=begin, until=start_of_next_month(begin), **filters)
        result = forecast(now=datetime.combine(today, time(9), UTC), last=last, **filters)
        assert (result.spent, result.days) == (sum((each.usd for each in spent), USD(0)), days)
        assert result.a_day == (round_half_up(Fraction(usd) / days) if days else None)


@pytest.mark.usefixtures("three_months")
def test_only_changed_records_are_written() -> None:
    assert costs.price_usage(now=NOW)["written"] > 60
    before = [*CostRecord.objects.order_by("pk").values_list("pk", "usd")]
    assert not costs.price_usage(now=NOW + DAY)
    assert [*CostRecord.objects.order_by("pk").values_list("pk", "usd")] == before
    create_time_usage("2026-11-20T10:00", agent="did:plc:new", provider="docker")
    assert costs.price_usage(now=NOW) == {"written": 1}
    assert {*before} < {*CostRecord.objects.values_list("pk", "usd")}


@pytest.mark.usefixtures("three_months")
def test_rebuilt_costs_are_identical() -> None:
    """All days in one pass, and then some one by one in any order, before the others."""
    price()
    before, days = list_cost_records(), [*UsageRecord.objects.order_by().values_list("day", flat=True).distinct()]
    costs.reset_costs()
    assert not CostRecord.objects.exists()
    price()
    assert list_cost_records() == before
    costs.reset_costs()
    Unpriced.objects.all().delete()
    for each in random.Random(1).sample(days, 12):
        Unpriced.note([each])
        price()
    Unpriced.note(days)
    price()
    assert list_cost_records() == before


@pytest.mark.usefixtures("three_months")
@pytest.mark.parametrize("step", ["priced", "repriced"])
def test_crashed_pass_is_completed_by_the_next(step: str, crash_at: Callable[..., Any]) -> None:
    price()
    before = list_cost_records()
    for month in range(3):  # the crash is in the first, the second and the third month
        costs.reset_costs()
        if month:
            Unpriced.objects.filter(day__lt=parse_day(f"2026-{9 + month:02}-01")).delete()
        with crash_at(step):
            price()
        Unpriced.note(UsageRecord.objects.values_list("day", flat=True))
        price()
        assert list_cost_records() == before


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("three_months")
def test_concurrent_passes_write_the_same_as_one() -> None:
    def act(index: int) -> None:
        if index < 2:
            price()
        else:
            UsageRecord.objects.filter(day=parse_day("2026-11-01")).delete()
            create_time_usage("2026-11-01T05:00", provider="docker", source="while pricing")
            create_time_usage("2026-10-01T05:00", provider="docker", source="while pricing")

    with run_in_threads(3) as run:
        assert run(act) == [None] * 3
    price()
    together = list_cost_records()
    assert not Unpriced.objects.exists()
    costs.reset_costs()
    price()
    assert list_cost_records() == together


@pytest.mark.skipif(connection.vendor == "sqlite", reason="has one writer at a time")
@pytest.mark.django_db(transaction=True)
def test_usage_metered_during_a_pricing_pass_is_left_for_the_next(at_checkpoint: Callable[..., None]) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", provider="acme")

    def rival() -> None:
        with run_in_threads(1) as run:
            assert run(lambda _: len(create_time_usage("2026-11-02T12:00", provider="acme"))) == [1]

    at_checkpoint("repriced", rival)
    assert (price_and_sum(), [*Unpriced.objects.values_list("day", flat=True)]) == (1, [parse_day("2026-11-02")])
    assert (price_and_sum(), Unpriced.objects.count()) == (2, 0)


# --- independent computation ------------------------------------------------------------------------------------------

MICROS = 86_400 * 10**6
SPANS = st.lists(
    st.tuples(
        st.integers(0, 70 * MICROS), st.integers(1, 3 * MICROS), st.sampled_from([ADA, BOB, ""]),
        st.sampled_from([(250, 1024), (1000, 512), (333, 777)]),
    ),
    min_size=1, max_size=8,
)  # fmt: skip
MOVES = st.lists(
    st.tuples(st.integers(0, 75), st.sampled_from([ADA, BOB]), st.sampled_from(["house", "team", "lab"])),
    max_size=3, unique_by=lambda each: each[:2],
)  # fmt: skip
PRICES = st.decimals(0, 99, places=12).filter(lambda usd: len(usd.normalize().as_tuple().digits) <= 14)
FREE = st.sampled_from([Decimal(0), Decimal(10)]) | st.decimals(0, 60, places=6)


@hypothesis.settings(max_examples=budget(fast=7, full=25), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    spans=SPANS, changes=st.lists(st.tuples(st.integers(0, 70 * MICROS), st.tuples(PRICES, FREE)), max_size=3),
    first=st.tuples(PRICES, FREE), moved=MOVES,
)  # fmt: skip
def test_costs_match_an_independent_computation(
    spans: list[Any], changes: list[tuple[int, tuple[Decimal, Decimal]]], first: tuple[Decimal, Decimal],
    moved: list[tuple[int, str, str]],
) -> None:  # fmt: skip
    Membership.objects.all().delete()
    costs.reset_costs()
    UsageRecord.objects.all().delete()
    Rate.objects.filter(provider="acme").delete()
    begin = parse_utc("2026-10-10")
    prices = {parse_utc("2020-01-01"): first} | {begin + timedelta(microseconds=when): change for when, change in changes}
    for when, (usd, allowance) in prices.items():
        create_rate("memory", str(usd), valid_from=when, allowance=allowance)
    for start, lasts, agent, (millicpus, memory) in spans:
        create_time_usage(
            begin + timedelta(microseconds=start), timedelta(microseconds=lasts), agent, provider="acme", millicpus=millicpus,
            memory_mib=memory,
        )  # fmt: skip
        price()  # after each span, so that passes build on each other
    moves = {(agent, begin.date() + number * DAY): account for number, agent, account in moved}
    for (agent, since), account in moves.items():
        join_account(account, str(since), agent)
        price()
    expected = compute_costs(begin, spans, prices, moves)
    actual: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for when, account, usd in list_cost_values("day", "account__name", "usd"):
        actual[f"{when:%Y-%m}", account] += Fraction(usd)
    line_count = CostRecord.objects.count()
    for month in {*expected, *actual}:
        assert abs(expected[month] - actual[month]) <= Fraction(line_count, 2 * 10**9)  # each line is rounded once
    for first in (None, begin.date() + 30 * DAY):
        expected_time: dict[str, timedelta] = defaultdict(timedelta)
        for row in UsageRecord.objects.filter(day__gte=first or date.min):
            expected_time[find_account(moves, row.agent_did, row.day)] += row.ended_at - row.began_at
        check_period_totals()
        assert totals.sum_sandbox_time("account", since=first) == expected_time
        for account in ("house", "team", "lab"):
            filters, time_of_account = {"account": account, "since": first}, expected_time.get(account, timedelta(0))
            assert sum(totals.sum_sandbox_time("day", **filters).values(), timedelta(0)) == time_of_account
            assert totals.sum_sandbox_time("account", **filters) == ({account: time_of_account} if time_of_account else {})


def find_account(moves: dict[tuple[str, date], str], agent: str, day: date) -> str:
    begun = [since for did, since in moves if did == agent and since <= day]
    return moves[agent, max(begun)] if begun else "house"


def compute_costs(
    begin: datetime, spans: list[Any], prices: dict[datetime, tuple[Decimal, Decimal]], moves: dict[tuple[str, date], str]
) -> dict[tuple[str, str], Fraction]:
    """Compute USD by month and account from GiB-hours of memory.

    Usage is cut at each midnight and change of price. The pieces are priced in the order of days, rates and leases, and use
    up the allowance of their account first."""
    cuts = sorted({*prices, *(datetime.combine(begin.date(), time(), UTC) + timedelta(days=n) for n in range(80))})
    pieces: dict[tuple[Any, ...], Fraction] = defaultdict(Fraction)
    for start, lasts, agent, (_, memory) in spans:
        began = begin + timedelta(microseconds=start)
        ended = began + timedelta(microseconds=lasts)
        edges = [began, *(cut for cut in cuts if began < cut < ended), ended]
        for a, b in pairwise(edges):
            since = max(when for when in prices if when <= a)
            hours = Fraction((b - a) // timedelta(microseconds=1), 3600 * 10**6)
            account = find_account(moves, agent, a.date())
            pieces[a.date(), since, str(derive_lease_id(agent)) if agent else "", account] += hours * memory / 1024
    taken: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    paid: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for (when, since, _, account), used in sorted(pieces.items()):
        group, (usd, allowance) = (f"{when:%Y-%m}", account), prices[since]
        free = min(max(Fraction(allowance) - taken[group], Fraction(0)), used)
        taken[group] += free
        paid[group] += (used - free) * Fraction(usd)
    return paid


# --- agents that move between accounts ---------------------------------------------------------------------------------


def price_by_account() -> dict[str, tuple[Decimal, timedelta]]:
    """Price all usage. Return (USD, time) by account, after a check that totals by cost and by usage agree on the accounts."""
    price()
    sums = {each.key: (each.usd, each.sandbox_time or timedelta(0)) for each in totals.sum_costs("account")}
    assert {name: duration for name, (_, duration) in sums.items() if duration} == totals.sum_sandbox_time("account")
    for name, (_, duration) in sums.items():
        assert sum(totals.sum_sandbox_time("day", account=name).values(), timedelta(0)) == duration
    return sums


@pytest.mark.usefixtures("ten_free")
def test_move_within_a_month_splits_costs_and_gives_each_account_its_allowance() -> None:
    for number in range(1, 7):
        create_time_usage(f"2026-10-{number:02}T00:00", 4 * HOUR, provider="acme")
    create_time_usage("2026-10-02T00:00", 7 * HOUR, BOB, provider="acme")
    join_account("team")
    price()
    join_account("lab", "2026-10-04")
    assert price_and_list("day", "account__name", "free", "usd", agent_did=ADA) == [
        *((parse_day(f"2026-10-0{number}"), "team", free, 4 - free) for number, free in ((1, 4), (2, 4), (3, 2))),
        *((parse_day(f"2026-10-0{number}"), "lab", free, 4 - free) for number, free in ((4, 4), (5, 4), (6, 2))),
    ]
    assert price_by_account() == {"team": (2, 12 * HOUR), "lab": (2, 12 * HOUR), "house": (0, 7 * HOUR)}


@pytest.mark.usefixtures("ten_free")
def test_move_takes_effect_at_midnight_utc() -> None:
    join_account("team", "2026-11-01")
    join_account("lab", "2026-11-15")
    create_time_usage("2026-10-31T12:00", 24 * HOUR, provider="acme")
    create_time_usage("2026-11-14T22:00", 4 * HOUR, provider="acme")
    create_storage_usage("2026-11-14T23:00", 2 * HOUR, 10**9, provider="acme")
    create_token_usage("2026-11-14T23:59:58", "0.5", provider="acme")
    create_token_usage("2026-11-15T00:00", "0.25", provider="acme")
    assert price_by_account() == {
        "house": (2, 12 * HOUR), "team": (USD("4.5"), 14 * HOUR), "lab": (USD("0.25"), 2 * HOUR),
    }  # fmt: skip


def test_plan_is_charged_to_both_accounts_in_the_month_of_a_move() -> None:
    create_time_usage("2026-11-02T10:00", **BASIC_INSTANCE)
    create_time_usage("2026-11-20T10:00", **BASIC_INSTANCE)
    join_account("team")
    price()
    move, of_team = join_account("lab", "2026-11-10"), [("team", parse_day("2026-11-02"))]
    assert price_and_list("account__name", "day", item="plan") == [*of_team, ("lab", parse_day("2026-11-20"))]
    move.delete()
    assert price_and_list("account__name", "day", item="plan") == of_team


@pytest.mark.usefixtures("ten_free")
def test_changed_or_deleted_move_leaves_no_trace_in_costs() -> None:
    for number in range(1, 7):
        create_time_usage(f"2026-10-{number:02}T00:00", 4 * HOUR, provider="acme")
    join_account("team")
    move = join_account("lab", "2026-10-04")
    price()
    move.since = parse_day("2026-10-06")
    move.save()
    assert price_by_account() == {"team": (10, 20 * HOUR), "lab": (0, 4 * HOUR)}
    move.delete()
    assert price_by_account() == {"team": (14, 24 * HOUR)}


@pytest.mark.usefixtures("ten_free")
def test_first_account_pays_all_earlier_usage_until_the_agent_leaves_for_the_house_account() -> None:
    create_time_usage("2026-10-31T00:00", 48 * HOUR, provider="acme")
    price()
    join_account("team"), join_account("house", "2026-11-01")
    assert price_by_account() == {"team": (14, 24 * HOUR), "house": (14, 24 * HOUR)}


def test_future_membership_changes_nothing_until_its_day() -> None:
    create_rate("time", "1")
    today = timezone.now().date()
    join_account("team"), join_account("lab", str(today + DAY))
    create_time_usage(datetime.combine(today, time(), UTC), provider="acme")
    assert [*price_by_account()] == ["team"]
    create_time_usage(datetime.combine(today + DAY, time(), UTC), provider="acme")
    assert {*price_by_account()} == {"team", "lab"}


def test_later_membership_begins_today_by_default() -> None:
    assert join_account("team").since == parse_day("1970-01-01")
    before = timezone.now().astimezone(UTC).date()
    assert before <= join_account("lab").since <= timezone.now().astimezone(UTC).date()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="has one writer at a time")
@pytest.mark.django_db(transaction=True)
def test_move_waits_for_a_pricing_pass_in_progress(at_checkpoint: Callable[..., None]) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", provider="acme")
    outcomes: list[Any] = []

    def act(_: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '50ms'")
        join_account("team")

    def rival() -> None:
        with run_in_threads(1) as run:
            outcomes.extend(run(act))

    at_checkpoint("repriced", rival)
    price()
    assert "lock timeout" in str(outcomes)
    join_account("team")
    assert price_and_list("account__name", "usd") == [("team", 1)]


# --- amounts out of range ---------------------------------------------------------------------------------------------


def test_record_above_the_largest_amount_is_limited_and_reported_and_the_others_are_priced() -> None:
    create_rate("time", "999999"), create_rate("time", "1", provider="other")
    (
        create_time_usage("2026-11-02T00:00", 2 * HOUR, provider="acme"),
        create_time_usage("2026-11-02", provider="other", agent=BOB),
    )
    create_token_usage("2026-11-02T01:00", "900000"), create_token_usage("2026-11-02T01:00", "900000", model="n")
    result = schedules.run_sweep("meter", now=NOW)
    assert price_and_sum(agent_did=BOB) == 1
    assert price_and_sum(agent_did=ADA) == 2 * 10**6
    models = {each.key: each.usd for each in totals.sum_costs("model", agent=ADA, item="llm")}
    assert models == {"m": 900_000, "n": 100_000}, "the models add up to the limited record"
    assert len(result.failures) == 2 and all("limited to 1000000 USD" in each for each in result.failures)
