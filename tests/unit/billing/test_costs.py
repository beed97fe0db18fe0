"""Derivation of costs: repeated, concurrent and interrupted passes, and an independent computation."""

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
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from billing import costs, metering, pricing, totals
from billing.models import CostRecord, Membership, Rate, Unpriced, UsageRecord
from leases import execution
from sandboxes.runs import Command
from tests.conftest import NOW, SimulatedCrash, run_in_threads
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
)

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)
USD = Decimal


def price() -> None:
    costs.price_usage(now=NOW)


def total(**filters: Any) -> Decimal:
    return sum((usd for (usd,) in list_cost_values("usd", **filters)), USD(0))


# --- repeated and concurrent passes -----------------------------------------------------------------------------------


@pytest.fixture
def three_months(db: None) -> None:
    """Time, storage, calls, a change of rate and moves of agents over three months."""
    chance = random.Random(7)
    create_rate("time", "0.05", provider="docker", since="2026-11-03T11:11")
    create_rate("storage", "0.015", provider="docker", allowance=USD("0.5"))
    join_account("team", agent="did:plc:a1"), join_account("lab", "2026-11-20", "did:plc:a2")
    join_account("lab", "2026-10-20", "did:plc:a1"), join_account("house", "2026-11-05", "did:plc:a1")
    for number in range(60):
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
def test_pricing_is_idempotent() -> None:
    assert costs.price_usage(now=NOW)["written"] > 100
    before = [*CostRecord.objects.order_by("pk").values_list("pk", "usd")]
    assert not costs.price_usage(now=NOW + DAY)
    assert [*CostRecord.objects.order_by("pk").values_list("pk", "usd")] == before


@pytest.mark.usefixtures("three_months")
def test_rebuilt_costs_are_identical() -> None:
    price()
    before = list_cost_records()
    costs.reset_costs()
    assert not CostRecord.objects.exists()
    price()
    assert list_cost_records() == before


@pytest.mark.usefixtures("three_months")
def test_order_of_days_does_not_change_costs() -> None:
    price()
    before, days = list_cost_records(), [*UsageRecord.objects.order_by().values_list("day", flat=True).distinct()]
    costs.reset_costs()
    Unpriced.objects.all().delete()
    for each in random.Random(1).sample(days, len(days)):
        Unpriced.note([each])
        price()
    assert list_cost_records() == before


@pytest.mark.usefixtures("three_months")
@pytest.mark.parametrize("step", ["priced", "repriced"])
def test_crashed_pass_is_completed_by_the_next(step: str, at_checkpoint: Callable[..., None]) -> None:
    price()
    before = list_cost_records()
    for month in range(3):  # the crash is in the first, the second and the third month
        costs.reset_costs()
        if month:
            Unpriced.objects.filter(day__lt=parse_day(f"2026-{9 + month:02}-01")).delete()

        def die() -> None:
            raise SimulatedCrash

        at_checkpoint(step, die)
        with pytest.raises(SimulatedCrash):
            price()
        Unpriced.note(UsageRecord.objects.values_list("day", flat=True))
        price()
        assert list_cost_records() == before


@pytest.mark.usefixtures("three_months")
def test_only_changed_records_are_written() -> None:
    price()
    before = {*CostRecord.objects.values_list("pk", flat=True)}
    create_time_usage("2026-11-20T10:00", agent="did:plc:new", provider="docker")
    assert costs.price_usage(now=NOW) == {"written": 1}
    assert before < {*CostRecord.objects.values_list("pk", flat=True)}


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
    price()
    assert (total(), [*Unpriced.objects.values_list("day", flat=True)]) == (1, [parse_day("2026-11-02")])
    price()
    assert (total(), Unpriced.objects.count()) == (2, 0)


def test_metered_usage_is_priced(grant: Callable[..., Any]) -> None:
    """A sandbox that waits for half an hour after its exec, at 2 USD an hour."""
    create_rate("time", "2", provider="memory", since="2026-01-01")
    lease = grant()
    execution.exec_command(lease.pk, Command(["true"], timedelta(seconds=5)), now=NOW)
    metering.meter_usage(now=NOW + HOUR / 2)
    price()
    (duration,) = totals.sum_sandbox_time("lease").values()
    assert timedelta(minutes=29) < duration <= HOUR / 2
    assert total(holder=lease.pk) == pricing.round_half_up(Fraction(duration // timedelta(microseconds=1), 3600 * 10**6) * 2)


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


@hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    spans=SPANS, changes=st.lists(st.tuples(st.integers(0, 70 * MICROS), st.tuples(PRICES, FREE)), max_size=3),
    first=st.tuples(PRICES, FREE), moved=MOVES,
)  # fmt: skip
def test_costs_match_an_independent_computation(
    spans: list[Any], changes: list[tuple[int, tuple[Decimal, Decimal]]], first: tuple[Decimal, Decimal],
    moved: list[tuple[int, str, str]],
) -> None:  # fmt: skip
    Membership.objects.all().delete()
    CostRecord.objects.all().delete()
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
    for first in (None, begin.date(), begin.date() + 30 * DAY):
        expected_time: dict[str, timedelta] = defaultdict(timedelta)
        for row in UsageRecord.objects.filter(day__gte=first or date.min):
            expected_time[find_account(moves, row.agent_did, row.day)] += row.ended_at - row.began_at
        assert totals.sum_sandbox_time("account", since=first) == expected_time
        for account in ("house", "team", "lab"):
            filters = {"account": account, "since": first}
            assert sum(totals.sum_sandbox_time("day", **filters).values(), timedelta(0)) == expected_time.get(
                account, timedelta(0)
            )
            assert totals.sum_sandbox_time("account", **filters) == {
                name: time_ for name, time_ in expected_time.items() if name == account
            }


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
