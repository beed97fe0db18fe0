"""Forecasts: the day on which a budget runs out, and the costs of the month."""

from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from billing import budgets, costs
from billing.forecast import forecast, predict_exhaustion_date
from billing.models import Account, Budget, Membership, Tab
from billing.pricing import round_half_up
from tests.conftest import NOW
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    create_budget,
    create_rate,
    create_ten_hours_a_day,
    create_time_usage,
    create_token_usage,
    derive_lease_id,
    parse_day,
    parse_utc,
)

pytestmark = pytest.mark.django_db
UNITS = pytest.mark.parametrize("unit", ["hours", "usd"])
DAY = timedelta(days=1)


def create_lasting_budget(amount: Any, unit: str, period: str = "ever", now: datetime = NOW, **fields: Any) -> Budget:
    return create_budget(amount, unit, period, now=now, **fields)


def predict(budget: Budget, now: datetime = NOW) -> str | None:
    """Return the predicted day of exhaustion as month and day."""
    day = predict_exhaustion_date(budget, now)
    return day and f"{day:%m-%d}"


@pytest.fixture
def ten_a_day(db: None) -> None:
    create_ten_hours_a_day()


# --- budgets ----------------------------------------------------------------------------------------------------------


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
def test_future_days_cost_the_average_of_the_last_days(unit: str, amount: str, period: str, when: str | None) -> None:
    assert predict(create_lasting_budget(amount, unit, period)) == when


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_exhausted_budget_reports_its_day_of_exhaustion(unit: str) -> None:
    for period, later in (("ever", "11-21"), ("month", "11-21"), ("day", "11-22")):
        budget = create_lasting_budget(5, unit, period)
        assert budget.exhausted_at == NOW
        assert (predict(budget), predict(budget, NOW + DAY)) == ("11-21", later)


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_raised_budget_is_forecast_before_the_next_sweep(unit: str) -> None:
    budget = create_lasting_budget(5, unit)
    Budget.objects.filter(pk=budget.pk).update(amount=70)
    budget.refresh_from_db()
    assert budget.exhausted_at and predict(budget) == "11-22"


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_budget_spent_since_its_last_sweep_runs_out_today(unit: str) -> None:
    budget = create_lasting_budget(60, unit)
    create_time_usage("2026-11-21T00:00", 4 * HOUR, BOB, provider="acme")
    costs.price_usage(now=NOW)
    assert (budget.exhausted_at, predict(budget)) == (None, "11-21")


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_today_above_the_average_counts_in_full(unit: str) -> None:
    create_time_usage("2026-11-21T00:00", 14 * HOUR, BOB, provider="acme")
    costs.price_usage(now=NOW)
    assert [predict(create_lasting_budget(amount, unit)) for amount in (71, 80, "80.01")] == ["11-22", "11-22", "11-23"]


@UNITS
def test_monthly_budget_uses_the_pace_of_the_previous_month(unit: str) -> None:
    """10 a day on eleven days, up to 1 December, and 10 expected on the 2nd: 20 to 50 at the ends of the 2nd to the 5th."""
    create_rate("time", "1")
    for number in range(11):
        create_time_usage(parse_utc("2026-11-21T06:00") + number * DAY, 10 * HOUR, provider="acme")
    now = parse_utc("2026-12-02T12:00")
    costs.price_usage(now=now)
    assert [predict(create_lasting_budget(amount, unit, "month", now), now) for amount in (20, 45, 310, 311)] == [
        "12-02",
        "12-05",
        "12-31",
        None,
    ]
    assert predict(create_lasting_budget(150, unit, "ever", now), now) == "12-05"


@UNITS
def test_only_full_days_make_the_pace(unit: str) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-21T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    assert predict(create_lasting_budget(12, unit)) is None


@UNITS
def test_days_before_the_window_make_no_pace(unit: str) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-13T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    assert predict(create_lasting_budget(7, unit)) is None
    create_time_usage("2026-11-14T06:00", 7 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    assert predict(create_lasting_budget(15, unit)) == "11-22"  # 13, and 1 on each of two days


@UNITS
def test_unused_budget_does_not_run_out(unit: str) -> None:
    assert {predict(create_lasting_budget(1, unit, period)) for period in ("day", "month", "ever")} == {None}


@UNITS
@pytest.mark.usefixtures("ten_a_day")
def test_inactive_budget_does_not_run_out(unit: str) -> None:
    assert predict(create_lasting_budget(70, unit, active=False)) is None


def test_pace_is_an_exact_fraction() -> None:
    """One hour in three days. Today is expected to take a third; 1 2/3 hours more last five days."""
    for each in (18, 19, 20):
        create_time_usage(f"2026-11-{each}T06:00", HOUR / 3)
    assert [predict(create_lasting_budget(amount, "hours")) for amount in ("3", "3.000001")] == ["11-26", "11-27"]


def test_plan_counts_once_and_is_not_part_of_the_pace() -> None:
    create_rate("time", "1")
    create_rate("plan", "30")
    for each in (19, 20, 21):
        create_time_usage(f"2026-11-{each}T06:00", HOUR, provider="acme")
    costs.price_usage(now=NOW)
    for scope in ({"scope": "all"}, {"scope": "account", "subject": "house"}):
        assert [predict(create_lasting_budget(amount, "usd", **scope)) for amount in (33, 34, 35)] == [
            "11-21",
            "11-22",
            "11-23",
        ]
    assert predict(create_lasting_budget(5, "usd", scope="agent", subject=ADA)) == "11-23"  # a plan belongs to no agent


def test_plan_charged_today_does_not_count_as_usage_of_today() -> None:
    create_rate("plan", "30", since="2026-11-21")
    create_rate("time", "1")
    for each in (20, 21):
        create_time_usage(f"2026-11-{each}T06:00", 2 * HOUR / (each - 19), provider="acme")
    costs.price_usage(now=NOW)
    assert [predict(create_lasting_budget(amount, "usd")) for amount in (34, "34.01")] == [
        "11-21",
        "11-22",
    ]  # 2, the plan, 1 and 1 more today


SCOPES = [
    ({"scope": "all"}, 4), ({"scope": "agent", "subject": ADA}, 3), ({"scope": "agent", "subject": BOB}, 1),
    ({"scope": "key", "subject": "7"}, 3), ({"scope": "environment_type", "subject": "rpg"}, 1),
    ({"scope": "account", "subject": "team"}, 1), ({"scope": "account", "subject": "house"}, 3),
]  # fmt: skip


@pytest.fixture
def two_agents(db: None) -> None:
    """Ada uses 3 a day in catan by key 7, Bob of the team 1 a day in rpg by key 8: on five days, and nothing today yet."""
    create_rate("time", "1")
    Membership.objects.create(agent_did=BOB, account=Account.objects.create(name="team"))
    for agent, kind, key, hours in ((ADA, "catan", "7", 3), (BOB, "rpg", "8", 1)):
        Tab.objects.create(holder=derive_lease_id(agent), agent_did=agent, environment_type=kind, key_id=key, opened_at=NOW)
        for each in range(16, 21):
            create_time_usage(f"2026-11-{each}T06:00", hours * HOUR, agent, provider="acme")
    costs.price_usage(now=NOW)


@UNITS
@pytest.mark.usefixtures("two_agents")
@pytest.mark.parametrize(("scope", "a_day"), SCOPES)
def test_budget_runs_out_by_the_usage_of_its_scope(unit: str, scope: dict[str, str], a_day: int) -> None:
    """Today is expected to be the sixth day, so the ninth is the 24th."""
    assert [predict(create_lasting_budget(a_day * days, unit, **scope)) for days in (6, 9)] == ["11-21", "11-24"]
    assert predict(create_lasting_budget(a_day * 9 + 1, unit, **scope)) == "11-25"


@UNITS
@pytest.mark.usefixtures("two_agents")
@pytest.mark.parametrize("period", ["day", "month", "ever"])
def test_daily_sums_add_up_to_the_recorded_spending(unit: str, period: str) -> None:
    create_rate("memory", "0.000000012345")
    create_time_usage("2026-11-20T23:17", 3 * HOUR / 7, provider="acme")
    create_token_usage("2026-11-21T10:00", "0.123456789", provider="acme")
    costs.reset_costs()
    costs.price_usage(now=NOW)
    for scope, _ in SCOPES:
        budget = create_lasting_budget(1000, unit, period, **scope)
        sums = budgets.sum_spending_by_day(budget, *budgets.get_period_bounds(period, NOW))
        assert round_half_up(sum((each.total for each in sums.values()), Fraction(0))) == budget.spent, scope
        assert budget.spent or period == "day", scope


@UNITS
@pytest.mark.usefixtures("two_agents")
def test_forecast_takes_one_query_and_none_for_an_exhausted_budget(
    unit: str, django_assert_num_queries: Callable[..., Any]
) -> None:
    budget, exhausted = create_lasting_budget(100, unit, scope="key", subject="7"), create_lasting_budget(1, unit)
    with django_assert_num_queries(1):
        assert predict_exhaustion_date(budget, NOW)
    with django_assert_num_queries(0):
        assert predict_exhaustion_date(exhausted, NOW) == parse_day("2026-11-21")


# --- the month --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ten_a_day")
def test_month_continues_at_the_pace_of_the_last_days() -> None:
    """50 until yesterday, 10 today (6 of them so far), and 9 more days: 150."""
    result = forecast(now=NOW)
    assert (result.spent, result.a_day, result.days, result.month) == (56, 10, 5, 150)


@pytest.mark.usefixtures("ten_a_day")
@pytest.mark.parametrize(
    ("budget", "runs_out"),
    [
        ("10", "2026-11-16"), ("10.01", "2026-11-17"), ("56", "2026-11-21"), ("56.01", "2026-11-21"), ("60", "2026-11-21"),
        ("60.01", "2026-11-22"), ("150", "2026-11-30"), ("151", "2026-12-01"), ("1e9", None),
    ],
)  # fmt: skip
def test_month_reaches_an_amount_on_a_day(budget: str, runs_out: str | None) -> None:
    assert forecast(now=NOW, budget=Decimal(budget)).runs_out == (parse_day(runs_out) if runs_out else None)


@pytest.mark.usefixtures("ten_a_day")
def test_month_forecast_is_limited_to_given_agents() -> None:
    create_time_usage("2026-11-20T06:00", HOUR, BOB, provider="acme")
    costs.price_usage(now=NOW)
    assert [forecast(now=NOW, agents=agents).a_day for agents in (None, [ADA], [BOB], [])] == [Decimal("10.2"), 10, 1, None]
    assert forecast(now=NOW, agents=[ADA], agent=BOB).a_day is None


@pytest.mark.usefixtures("ten_a_day")
def test_month_counts_today_above_the_average_in_full() -> None:
    create_time_usage("2026-11-21T06:00", 5 * HOUR, "did:plc:bob", provider="acme")
    costs.price_usage(now=NOW)
    assert forecast(now=NOW).month == 50 + 11 + 90


@pytest.mark.usefixtures("ten_a_day")
def test_month_pace_excludes_plans() -> None:
    create_rate("plan", "30")
    costs.reset_costs()
    costs.price_usage(now=NOW)
    result = forecast(now=NOW)
    assert (result.spent, result.a_day, result.month) == (86, 10, 180)


@pytest.mark.usefixtures("ten_a_day")
def test_month_expects_the_rest_of_the_day_of_a_plan() -> None:
    """50 before today; today 10, of which 6 are used, and a plan of 30; 10 on each of the 9 remaining days."""
    create_rate("plan", "30", provider="other")
    create_rate("time", "0", provider="other")
    create_time_usage("2026-11-21T06:00", HOUR, provider="other")
    costs.price_usage(now=NOW)
    result = forecast(now=NOW, budget=Decimal(85))
    assert (result.spent, result.month, str(result.runs_out)) == (86, 50 + 40 + 90, "2026-11-21")


@pytest.mark.usefixtures("ten_a_day")
def test_month_pace_counts_only_the_window() -> None:
    create_time_usage("2026-11-20T17:00", 6 * HOUR, "did:plc:bob", provider="acme")
    costs.price_usage(now=NOW)
    assert [forecast(now=NOW, last=last).a_day for last in (1, 2, 5, 30)] == [16, 13, Decimal("11.2"), Decimal("11.2")]


def test_month_without_a_full_day_has_no_pace() -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-21T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    result = forecast(now=NOW, budget=Decimal(100))
    assert (result.spent, result.a_day, result.month, result.runs_out) == (6, None, 6, None)


def test_month_forecast_on_its_last_day_is_the_amount_spent() -> None:
    create_rate("time", "1")
    create_time_usage("2028-02-28", 2 * 24 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    assert forecast(now=parse_utc("2028-02-29T23:00")).month == 48
