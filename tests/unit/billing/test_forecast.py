"""When a budget runs out, by what its own scope has used."""

from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from billing import budgets, costs
from billing.forecast import predict_exhaustion_date
from billing.models import Account, Budget, Membership, Tab
from billing.pricing import round_half_up
from tests.conftest import NOW
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    create_rate,
    create_time_usage,
    create_token_usage,
    derive_lease_id,
    parse_day,
    parse_utc,
)

pytestmark = pytest.mark.django_db
UNITS = pytest.mark.parametrize("unit", ["hours", "usd"])
DAY = timedelta(days=1)


def budget(amount: Any, unit: str, period: str = "ever", now: datetime = NOW, **fields: Any) -> Budget:
    made = Budget(**{"scope": "all", "amount": Decimal(amount), "unit": unit, "period": period, **fields})
    budgets.save_budget(made, now=now)
    return made


def said(made: Budget, now: datetime = NOW) -> str | None:
    found = predict_exhaustion_date(made, now)
    return found and f"{found:%m-%d}"


@pytest.fixture
def ten_a_day(db: None) -> None:
    """Ten hours at 1 USD on each day from the 16th on; it is noon of the 21st, and six of today are over."""
    create_rate("time", "1")
    for each in range(16, 21):
        create_time_usage(f"2026-11-{each}T06:00", 10 * HOUR, provider="acme")
    create_time_usage("2026-11-21T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)


@UNITS
@pytest.mark.usefixtures("ten_a_day")
@pytest.mark.parametrize(
    ("amount", "period", "when"),
    [
        ("60", "ever", "11-21"), ("60.01", "ever", "11-22"), ("70", "ever", "11-22"), ("150.01", "ever", "12-01"),
        ("100000000", "ever", None), ("60", "month", "11-21"), ("150", "month", "11-30"), ("150.01", "month", None),
        ("10", "day", "11-21"), ("10.01", "day", None),
    ],
)  # fmt: skip
def test_days_to_come_take_what_the_last_ones_took(unit: str, amount: str, period: str, when: str | None) -> None:
    assert said(budget(amount, unit, period)) == when


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_one_that_is_spent_says_when_that_was_seen(unit: str) -> None:
    for period, later in (("ever", "11-21"), ("month", "11-21"), ("day", "11-22")):
        made = budget(5, unit, period)
        assert made.exhausted_at == NOW
        assert (said(made), said(made, NOW + DAY)) == ("11-21", later)


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_one_that_is_raised_counts_on_before_a_sweep_has_seen_it(unit: str) -> None:
    made = budget(5, unit)
    Budget.objects.filter(pk=made.pk).update(amount=70)
    made.refresh_from_db()
    assert made.exhausted_at and said(made) == "11-22"


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_one_that_is_spent_since_its_last_sweep_runs_out_today(unit: str) -> None:
    made = budget(60, unit)
    create_time_usage("2026-11-21T00:00", 4 * HOUR, BOB, provider="acme")
    costs.price_usage(now=NOW)
    assert (made.exhausted_at, said(made)) == (None, "11-21")


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_a_day_that_took_more_than_usual_counts_as_it_is(unit: str) -> None:
    create_time_usage("2026-11-21T00:00", 14 * HOUR, BOB, provider="acme")
    costs.price_usage(now=NOW)
    assert [said(budget(amount, unit)) for amount in (71, 80, "80.01")] == ["11-22", "11-22", "11-23"]


@UNITS
def test_a_month_counts_from_its_beginning_at_the_pace_of_the_days_before(unit: str) -> None:
    """10 on each of eleven days, 1 December among them. On the 2nd 10 are spent: 20, 30, 40 and 50 at the ends of four days."""
    create_rate("time", "1")
    for number in range(11):
        create_time_usage(parse_utc("2026-11-21T06:00") + number * DAY, 10 * HOUR, provider="acme")
    now = parse_utc("2026-12-02T12:00")
    costs.price_usage(now=now)
    assert [said(budget(amount, unit, "month", now), now) for amount in (20, 45, 310, 311)] == ["12-02", "12-05", "12-31", None]
    assert said(budget(150, unit, "ever", now), now) == "12-05"


@UNITS
def test_only_days_that_are_over_make_the_pace(unit: str) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-21T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    assert said(budget(12, unit)) is None


@UNITS
def test_what_is_longer_ago_than_the_last_days_makes_no_pace(unit: str) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-13T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    assert said(budget(7, unit)) is None
    create_time_usage("2026-11-14T06:00", 7 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    assert said(budget(15, unit)) == "11-22"  # 13, and 1 on each of two days


@UNITS
def test_where_nothing_was_used_none_runs_out(unit: str) -> None:
    assert {said(budget(1, unit, period)) for period in ("day", "month", "ever")} == {None}


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_one_that_is_off_runs_out_never(unit: str) -> None:
    assert said(budget(70, unit, active=False)) is None


def test_a_third_of_an_hour_a_day_is_exactly_that() -> None:
    """1 hour in three days; the 4th third is today's, and five more make 3 hours."""
    for each in (18, 19, 20):
        create_time_usage(f"2026-11-{each}T06:00", HOUR / 3)
    assert [said(budget(amount, "hours")) for amount in ("3", "3.000001")] == ["11-26", "11-27"]


def test_a_plan_counts_once_and_is_not_paid_again_each_day() -> None:
    create_rate("time", "1")
    create_rate("plan", "30")
    for each in (19, 20, 21):
        create_time_usage(f"2026-11-{each}T06:00", HOUR, provider="acme")
    costs.price_usage(now=NOW)
    for scope in ({"scope": "all"}, {"scope": "account", "subject": "house"}):
        assert [said(budget(amount, "usd", **scope)) for amount in (33, 34, 35)] == ["11-21", "11-22", "11-23"]
    assert said(budget(5, "usd", scope="agent", subject=ADA)) == "11-23"  # a plan is nobody's


def test_a_plan_that_is_paid_today_is_not_what_today_was_used_for() -> None:
    create_rate("plan", "30", since="2026-11-21")
    create_rate("time", "1")
    for each in (20, 21):
        create_time_usage(f"2026-11-{each}T06:00", 2 * HOUR / (each - 19), provider="acme")
    costs.price_usage(now=NOW)
    assert [said(budget(amount, "usd")) for amount in (34, "34.01")] == ["11-21", "11-22"]  # 2, the plan, 1 and 1 more today


SCOPES = [
    ({"scope": "all"}, 4), ({"scope": "agent", "subject": ADA}, 3), ({"scope": "agent", "subject": BOB}, 1),
    ({"scope": "key", "subject": "7"}, 3), ({"scope": "environment_type", "subject": "rpg"}, 1),
    ({"scope": "account", "subject": "team"}, 1), ({"scope": "account", "subject": "house"}, 3),
]  # fmt: skip


@pytest.fixture
def two(db: None) -> None:
    """Ada takes 3 a day in catan by key 7, Bob of the team 1 in rpg by key 8; for five days, and not yet today."""
    create_rate("time", "1")
    Membership.objects.create(agent_did=BOB, account=Account.objects.create(name="team"))
    for agent, kind, key, hours in ((ADA, "catan", "7", 3), (BOB, "rpg", "8", 1)):
        Tab.objects.create(holder=derive_lease_id(agent), agent_did=agent, environment_type=kind, key_id=key, opened_at=NOW)
        for each in range(16, 21):
            create_time_usage(f"2026-11-{each}T06:00", hours * HOUR, agent, provider="acme")
    costs.price_usage(now=NOW)


@UNITS
@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(("scope", "a_day"), SCOPES)
def test_a_budget_runs_out_by_what_its_own_scope_takes(unit: str, scope: dict[str, str], a_day: int) -> None:
    """Six days at the end of today, so nine at the end of the 24th."""
    assert [said(budget(a_day * days, unit, **scope)) for days in (6, 9)] == ["11-21", "11-24"]
    assert said(budget(a_day * 9 + 1, unit, **scope)) == "11-25"


@UNITS
@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("period", ["day", "month", "ever"])
def test_days_come_to_the_same_as_what_is_settled(unit: str, period: str) -> None:
    create_rate("memory", "0.000000012345")
    create_time_usage("2026-11-20T23:17", 3 * HOUR / 7, provider="acme")
    create_token_usage("2026-11-21T10:00", "0.123456789", provider="acme")
    costs.reset_costs()
    costs.price_usage(now=NOW)
    for scope, _ in SCOPES:
        made = budget(1000, unit, period, **scope)
        sums = budgets.sum_spending_by_day(made, *budgets.get_period_bounds(period, NOW))
        assert round_half_up(sum((all_ for all_, _ in sums.values()), Fraction(0))) == made.spent, scope
        assert made.spent or period == "day", scope


@UNITS
@pytest.mark.usefixtures("two")
def test_it_takes_one_query_and_none_once_it_is_spent(unit: str, django_assert_num_queries: Callable[..., Any]) -> None:
    made, gone = budget(100, unit, scope="key", subject="7"), budget(1, unit)
    with django_assert_num_queries(1):
        assert predict_exhaustion_date(made, NOW)
    with django_assert_num_queries(0):
        assert predict_exhaustion_date(gone, NOW) == parse_day("2026-11-21")
