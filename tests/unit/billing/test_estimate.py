"""Estimates by worked tables of providers' prices, and forecasts of a month's costs and of a budget's exhaustion."""

import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from billing import budgets, costs
from billing.estimate import Scenario, compare, estimate
from billing.forecast import forecast, predict_exhaustion_date
from billing.instance_types import INSTANCE_SIZES, find_instance_size
from billing.models import Account, Budget, Membership, Rate, Tab
from billing.pricing import round_half_up
from billing.source_units import convert_price
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
    price,
)

pytestmark = pytest.mark.django_db
UNITS = pytest.mark.parametrize("unit", ["hours", "usd"])
DAY = timedelta(days=1)


# --- worked tables ----------------------------------------------------------------------------------------------------


def amounts(**fields: Any) -> dict[str, str]:
    defaults = {
        "provider": "cloudflare", "instance": "basic", "agents": 8, "hours_per_day": Decimal(4), "days": 30,
        "cpu_utilisation": Decimal("0.1"),
    }  # fmt: skip
    result = estimate(Scenario(**{**defaults, **fields}), Rate.objects.all(), now=NOW)
    return {line.item: str(line.usd) for line in result.lines} | {"total": str(result.total), "agent": str(result.per_agent)}


def test_eight_agents_for_four_hours_a_day() -> None:
    """Design document: (960 - 25) x 0.009 = 8.415, (1440 - 375) x 0.0012 = 1.278, (3840 - 200) x 0.00025 = 0.91, 5."""
    assert amounts() == {"memory": "8.42", "cpu": "1.28", "disk": "0.91", "plan": "5.00", "total": "15.61", "agent": "1.95"}


def test_eight_agents_always_on() -> None:
    """(5760 - 25) x 0.009 = 51.615, (8640 - 375) x 0.0012 = 9.918, (23040 - 200) x 0.00025 = 5.71, 5."""
    assert amounts(hours_per_day=Decimal(24)) == {
        "memory": "51.62", "cpu": "9.92", "disk": "5.71", "plan": "5.00", "total": "72.25", "agent": "9.03",
    }  # fmt: skip


def test_usage_within_the_allowances_costs_only_the_plan() -> None:
    """25 h with 1 GiB and 15 vCPU-minutes an hour use exactly the free 25 GiB-hours and 375 vCPU-minutes."""
    assert amounts(agents=1, hours_per_day=Decimal(1), days=25, cpu_utilisation=Decimal(1)) == {
        "memory": "0.00", "cpu": "0.00", "disk": "0.00", "plan": "5.00", "total": "5.00", "agent": "5.00",
    }  # fmt: skip


def test_fargate_task_for_a_month() -> None:
    """1 vCPU and 4 GB for 720 h: 29.15 + 12.80 = 41.95 (https://www.wring.co/blog/aws-fargate-pricing-guide). `standard-1` has
    4 GiB and half a CPU, so the rate per CPU minute is doubled here: 2 x 0.04048 / 60 = 0.001349333333."""
    create_rate("cpu", "0.001349333333")
    create_rate("memory", "0.004445")
    result = amounts(provider="acme", instance="standard-1", agents=1, hours_per_day=Decimal(24), cpu_utilisation=Decimal(1))
    assert result == {"memory": "12.80", "cpu": "29.15", "total": "41.95", "agent": "41.95"}


def test_custom_hourly_rate() -> None:
    """3 x 2.5 h x 20 d = 150 sandbox-hours at 0.07 = 10.50."""
    create_rate("time", "0.07", provider="docker", since="2026-02-01")
    assert amounts(provider="docker", agents=3, hours_per_day=Decimal("2.5"), days=20) == {
        "time": "10.50", "total": "10.50", "agent": "3.50",
    }  # fmt: skip


def test_shipped_rates_follow_from_cloudflares_prices_per_second() -> None:
    """0.0000025 USD per GiB-second, 0.000020 per vCPU-second, 0.00000007 per GB-second: 0.000252 an hour, which the
    design document rounds to 0.00025."""
    usd = dict(Rate.objects.filter(provider="cloudflare").values_list("item", "usd"))
    assert convert_price(Decimal("0.0000025"), "memory-gib-second") == ("memory", usd["memory"])
    assert convert_price(Decimal("0.000020"), "vcpu-second") == ("cpu", usd["cpu"])
    assert convert_price(Decimal("0.00000007"), "disk-gb-second") == ("disk", Decimal("0.000252"))
    assert usd["disk"] == Decimal("0.00025")


@pytest.mark.parametrize(
    ("provider", "price", "unit"),
    [
        ("daytona", "0.0504", "vcpu-hour"), ("daytona", "0.0162", "memory-gib-hour"), ("daytona", "0.000108", "disk-gib-hour"),
        ("langsmith", "0.0576", "vcpu-hour"), ("langsmith", "0.01845", "memory-gib-hour"),
        ("langsmith", "0.000123", "disk-gib-hour"),
        ("modal", "0.00003942", "core-second"), ("modal", "0.00000667", "memory-gib-second"),
        ("runloop", "0.108", "vcpu-hour"), ("runloop", "0.0252", "memory-gib-hour"), ("runloop", "0.00034236", "disk-gb-hour"),
    ],
)  # fmt: skip
def test_shipped_rates_follow_from_the_quoted_prices_of_vendors(provider: str, price: str, unit: str) -> None:
    """LangSmith: 0.0384 LCU x 1.50 USD = 0.0576, 0.0123 LCU x 1.50 USD = 0.01845, 0.000123 LSU x 1.00 USD."""
    item, usd = convert_price(Decimal(price), unit)
    assert Rate.objects.get(provider=provider, item=item).usd == usd


@pytest.mark.parametrize(
    ("price", "unit", "rate"),
    [
        ("0.06", "vcpu-hour", "0.001"), ("0.000010", "core-second", "0.0003"), ("0.12", "core-hour", "0.001"),
        ("0.0001", "disk-gib-hour", "0.000093132257"), ("0.00000003", "disk-gib-second", "0.000100582838"),
        ("0.00001", "sandbox-second", "0.036"), ("0.10", "storage-gib-month", "0.093132257462"), ("5", "plan-month", "5"),
    ],
)  # fmt: skip
def test_price_is_converted_from_the_unit_of_the_vendor(price: str, unit: str, rate: str) -> None:
    """A core is two vCPUs: 0.00001 a core-second x 60 / 2 = 0.0003 a vCPU-minute. One GiB is 1.073741824 GB."""
    assert convert_price(Decimal(price), unit)[1] == Decimal(rate)


def compare_two_agents(*providers: str, **fields: Any) -> dict[str, Any]:
    """Compare two agents with `SMALL` sandboxes (1 vCPU, 2 GiB, 4.295 GB) for 10 h a day on 10 days: 200 sandbox-hours."""
    scenario = Scenario("", "SMALL", 2, Decimal(10), 10, Decimal(1), **fields)
    return {each.provider: each for each in compare(scenario, providers, Rate.objects.all(), now=NOW)}


def test_comparison_prices_the_same_resources_at_each_provider() -> None:
    """By the second: 0.00001 USD per vCPU-second is 0.0006 a minute, 0.000002 per GiB-second is 0.0072 an hour. 200 h x 60 x
    0.0006 = 7.20, 400 GiB-hours x 0.0072 = 2.88, 859 GB-hours x 0.0001 = 0.0859. By the hour: 200 x 0.05 = 10."""
    for item, usd in (("cpu", "0.0006"), ("memory", "0.0072"), ("disk", "0.0001")):
        create_rate(item, usd, provider="seconds")
    create_rate("time", "0.05", provider="hours")
    result = compare_two_agents("hours", "seconds", "kubernetes", "cloudflare")
    assert [*result] == ["hours", "seconds", "kubernetes", "cloudflare"]
    assert {line.item: str(line.usd) for line in result["seconds"].estimate.lines} == {
        "memory": "2.88", "cpu": "7.20", "disk": "0.09",
    }  # fmt: skip
    assert [str(result[name].estimate.total) for name in ("hours", "seconds")] == ["10.00", "10.17"]
    assert [result[name].estimate.unpriced for name in ("hours", "seconds")] == [[], []]
    assert "egress" in result["cloudflare"].excluded


def test_placeholder_of_zero_is_no_price() -> None:
    assert Rate.objects.filter(provider="kubernetes", own=True).exists()
    assert compare_two_agents("kubernetes")["kubernetes"].estimate is None
    create_rate("cpu", "0.00084", provider="kubernetes")
    priced = compare_two_agents("kubernetes")["kubernetes"].estimate
    assert (str(priced.total), priced.unpriced) == ("10.08", ["memory", "disk"])


def test_suspended_hours_cost_disk_and_suspended_memory() -> None:
    """Two sandboxes, suspended for 12 h a day: 240 h x 2 GiB x 0.001 = 0.48, and (200 + 240) h x 4.295 GB x 0.001 = 1.8898."""
    for item, usd in (("time", "0.05"), ("suspend", "0.001"), ("disk", "0.001")):
        create_rate(item, usd, provider="acme")
    lines = compare_two_agents("acme", suspended_hours_per_day=Decimal(12))["acme"].estimate.lines
    assert {line.item: str(line.usd) for line in lines} == {"time": "10.00", "disk": "1.89", "suspend": "0.48"}


def test_stated_disk_and_gpus_are_priced_where_rates_state_them() -> None:
    """200 sandbox-hours with 10,000 MiB (10.48576 GB) and two GPUs: 2097.152 x 0.001 = 2.10, 400 x 2.5 = 1000."""
    for item, usd, kind in (("disk", "0.001", ""), ("gpu", "2.5", "H100"), ("gpu", "1", "")):
        create_rate(item, usd, provider="acme", instance_type=kind)
    create_rate("disk", "0.001", provider="other")
    requested: dict[str, Any] = {"disk_mib": 10_000, "gpus": 2, "gpu_type": "H100"}
    result = compare_two_agents("acme", "other", **requested)
    assert {line.item: str(line.usd) for line in result["acme"].estimate.lines} == {"disk": "2.10", "gpu": "1000.00"}
    assert "gpu" in result["other"].estimate.unpriced
    any_type = compare_two_agents("acme", **requested | {"gpu_type": "T4"})["acme"].estimate
    assert {line.item: str(line.usd) for line in any_type.lines}["gpu"] == "400.00"


def test_sizes_match_the_providers_table() -> None:
    """https://developers.cloudflare.com/containers/platform/limits/"""
    result = {
        name: (float(size.vcpus), size.memory_mib / 1024, size.disk_mb / 1000)
        for name, size in INSTANCE_SIZES["cloudflare"].items()
    }
    assert result == {
        "lite": (0.0625, 0.25, 2), "basic": (0.25, 1, 4), "standard-1": (0.5, 4, 8), "standard-2": (1, 6, 12),
        "standard-3": (2, 8, 16), "standard-4": (4, 12, 20),
    }  # fmt: skip
    assert find_instance_size("docker", "basic") == INSTANCE_SIZES["cloudflare"]["basic"]


# --- budgets ----------------------------------------------------------------------------------------------------------


def create_lasting_budget(amount: Any, unit: str = "hours", period: str = "ever", now: datetime = NOW, **fields: Any) -> Budget:
    return create_budget(amount, unit, period, now=now, **fields)


def predict(budget: Budget, now: datetime = NOW) -> str | None:
    """Return the predicted day of exhaustion as month and day."""
    day = predict_exhaustion_date(budget, now)
    return day and f"{day:%m-%d}"


def use(began: str, hours: float, agent: str = ADA) -> None:
    """Add priced usage that begins on a day and time of November 2026."""
    create_time_usage(f"2026-11-{began}", hours * HOUR, agent, provider="acme")
    price()


@pytest.fixture
def one_usd(db: None) -> Rate:
    return create_rate("time", "1")


@pytest.fixture
def ten_a_day(db: None) -> None:
    create_ten_hours_a_day()


@pytest.mark.usefixtures("ten_a_day")
def test_future_days_cost_the_average_of_the_last_days() -> None:
    expected = {
        ("60", "ever"): "11-21", ("60.01", "ever"): "11-22", ("70", "ever"): "11-22", ("150.01", "ever"): "12-01",
        ("100000000", "ever"): None, ("60", "month"): "11-21", ("150", "month"): "11-30", ("150.01", "month"): None,
        ("10", "day"): "11-21", ("10.01", "day"): None,
    }  # fmt: skip
    assert {key: predict(create_lasting_budget(key[0], "usd", key[1])) for key in expected} == expected


@pytest.mark.usefixtures("ten_a_day")
def test_exhausted_budget_reports_its_day_of_exhaustion() -> None:
    for period, later in (("ever", "11-21"), ("month", "11-21"), ("day", "11-22")):
        budget = create_lasting_budget(5, period=period)
        assert budget.exhausted_at == NOW
        assert (predict(budget), predict(budget, NOW + DAY)) == ("11-21", later)


@pytest.mark.usefixtures("ten_a_day")
def test_forecast_precedes_the_next_sweep() -> None:
    raised, spent = create_lasting_budget(5), create_lasting_budget(60)
    Budget.objects.filter(pk=raised.pk).update(amount=70)
    raised.refresh_from_db()
    assert raised.exhausted_at and predict(raised) == "11-22"
    use("21T00:00", 4, BOB)
    assert (spent.exhausted_at, predict(spent)) == (None, "11-21")


@pytest.mark.usefixtures("ten_a_day")
def test_today_above_the_average_counts_in_full() -> None:
    use("21T00:00", 14, BOB)
    assert [predict(create_lasting_budget(amount)) for amount in (71, 80, "80.01")] == ["11-22", "11-22", "11-23"]


@UNITS
def test_monthly_budget_uses_the_pace_of_the_previous_month(unit: str) -> None:
    """10 a day on eleven days, up to 1 December, and 10 expected on the 2nd: 20 to 50 at the ends of the 2nd to the 5th."""
    create_rate("time", "1")
    for number in range(11):
        create_time_usage(parse_utc("2026-11-21T06:00") + number * DAY, 10 * HOUR, provider="acme")
    now = parse_utc("2026-12-02T12:00")
    price(now)
    expected = {20: "12-02", 45: "12-05", 310: "12-31", 311: None}
    assert {amount: predict(create_lasting_budget(amount, unit, "month", now), now) for amount in expected} == expected
    assert predict(create_lasting_budget(150, unit, "ever", now), now) == "12-05"


def test_only_full_days_in_the_window_make_the_pace() -> None:
    use("13T06:00", 6), use("21T06:00", 6)  # a day too early, and today
    assert predict(create_lasting_budget(13)) is None
    use("14T06:00", 7)
    assert predict(create_lasting_budget(21)) == "11-23"  # 19, and 1 on each of two days


def test_unused_or_inactive_budget_does_not_run_out() -> None:
    assert {predict(create_lasting_budget(1, period=period)) for period in ("day", "month", "ever")} == {None}
    create_ten_hours_a_day()
    assert predict(create_lasting_budget(70, active=False)) is None


def test_pace_is_an_exact_fraction() -> None:
    """One hour in three days. Today is expected to take a third; 1 2/3 hours more last five days."""
    for each in (18, 19, 20):
        use(f"{each}T06:00", 1 / 3)
    assert [predict(create_lasting_budget(amount)) for amount in ("3", "3.000001")] == ["11-26", "11-27"]


@pytest.mark.usefixtures("one_usd")
def test_plan_counts_once_and_is_not_part_of_the_pace() -> None:
    create_rate("plan", "30")
    for each in (19, 20, 21):
        use(f"{each}T06:00", 1)
    expected = {33: "11-21", 34: "11-22", 35: "11-23"}
    for scope in ({"scope": "all"}, {"scope": "account", "subject": "house"}):
        assert {amount: predict(create_lasting_budget(amount, "usd", **scope)) for amount in expected} == expected
    assert predict(create_lasting_budget(5, "usd", scope="agent", subject=ADA)) == "11-23"  # a plan belongs to no agent


@pytest.mark.usefixtures("one_usd")
def test_plan_charged_today_does_not_count_as_usage_of_today() -> None:
    """2, the plan, 1 and 1 more today."""
    create_rate("plan", "30", since="2026-11-21")
    use("20T06:00", 2), use("21T06:00", 1)
    assert [predict(create_lasting_budget(amount, "usd")) for amount in (34, "34.01")] == ["11-21", "11-22"]


SCOPES = [
    ({"scope": "all"}, 4), ({"scope": "agent", "subject": ADA}, 3), ({"scope": "agent", "subject": BOB}, 1),
    ({"scope": "key", "subject": "7"}, 3), ({"scope": "environment_type", "subject": "rpg"}, 1),
    ({"scope": "account", "subject": "team"}, 1), ({"scope": "account", "subject": "house"}, 3),
]  # fmt: skip


@pytest.fixture
def two_agents(one_usd: Rate) -> None:
    """Ada uses 3 a day in catan by key 7, Bob of the team 1 a day in rpg by key 8: on five days, and nothing today yet."""
    Membership.objects.create(agent_did=BOB, account=Account.objects.create(name="team"))
    for agent, kind, key, hours in ((ADA, "catan", "7", 3), (BOB, "rpg", "8", 1)):
        Tab.objects.create(holder=derive_lease_id(agent), agent_did=agent, environment_type=kind, key_id=key, opened_at=NOW)
        for each in range(16, 21):
            create_time_usage(f"2026-11-{each}T06:00", hours * HOUR, agent, provider="acme")
    price()


@UNITS
@pytest.mark.usefixtures("two_agents")
def test_budget_runs_out_by_the_usage_of_its_scope(unit: str) -> None:
    """Today is expected to be the sixth day, so the ninth is the 24th."""
    for scope, a_day in SCOPES:
        days = [predict(create_lasting_budget(amount, unit, **scope)) for amount in (6 * a_day, 9 * a_day, 9 * a_day + 1)]
        assert days == ["11-21", "11-24", "11-25"], scope


@UNITS
@pytest.mark.usefixtures("two_agents")
def test_daily_sums_add_up_to_the_recorded_spending(unit: str) -> None:
    create_rate("memory", "0.000000012345")
    create_time_usage("2026-11-20T23:17", 3 * HOUR / 7, provider="acme")
    create_token_usage("2026-11-21T10:00", "0.123456789", provider="acme")
    costs.reset_costs()
    price()
    for (scope, _), period in itertools.product(SCOPES, ("day", "month", "ever")):
        budget = create_lasting_budget(1000, unit, period, **scope)
        sums = budgets.sum_spending_by_day(budget, *budgets.compute_period_bounds(period, NOW))
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


@pytest.mark.parametrize(("minute", "day"), [(29, "11-21"), (31, None)])
def test_hourly_budget_is_extrapolated_from_its_own_hour(minute: int, day: str | None) -> None:
    create_time_usage(NOW, 15 * HOUR / 60)
    now = NOW + minute * HOUR / 60
    budget = create_budget("0.5", period="hour", now=now)  # 15 minutes used: 30 minutes an hour at half past
    assert predict(budget, now) == day


# --- the month --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ten_a_day")
def test_month_continues_at_the_pace_of_the_last_days() -> None:
    """50 until yesterday, 10 today (6 of them so far), and 9 more days: 150."""
    result = forecast(now=NOW)
    assert (result.spent, result.a_day, result.days, result.month) == (56, 10, 5, 150)
    use("21T06:00", 5, BOB)
    assert forecast(now=NOW).month == 50 + 11 + 90  # today is above the average


@pytest.mark.usefixtures("ten_a_day")
def test_month_reaches_an_amount_on_a_day() -> None:
    expected = {
        "10": "2026-11-16", "10.01": "2026-11-17", "56": "2026-11-21", "56.01": "2026-11-21", "60": "2026-11-21",
        "60.01": "2026-11-22", "150": "2026-11-30", "151": "2026-12-01", "1e9": "None",
    }  # fmt: skip
    assert {budget: str(forecast(now=NOW, budget=Decimal(budget)).runs_out) for budget in expected} == expected


@pytest.mark.usefixtures("ten_a_day")
def test_month_forecast_is_limited_to_given_agents() -> None:
    use("20T06:00", 1, BOB)
    assert [forecast(now=NOW, agents=agents).a_day for agents in (None, [ADA], [BOB], [])] == [Decimal("10.2"), 10, 1, None]
    assert forecast(now=NOW, agents=[ADA], agent=BOB).a_day is None


@pytest.mark.usefixtures("ten_a_day")
def test_month_pace_excludes_plans() -> None:
    create_rate("plan", "30")
    costs.reset_costs()
    price()
    result = forecast(now=NOW)
    assert (result.spent, result.a_day, result.month) == (86, 10, 180)


@pytest.mark.usefixtures("ten_a_day")
def test_month_expects_the_rest_of_the_day_of_a_plan() -> None:
    """50 before today; today 10, of which 6 are used, and a plan of 30; 10 on each of the 9 remaining days."""
    create_rate("plan", "30", provider="other")
    create_rate("time", "0", provider="other")
    create_time_usage("2026-11-21T06:00", HOUR, provider="other")
    price()
    result = forecast(now=NOW, budget=Decimal(85))
    assert (result.spent, result.month, str(result.runs_out)) == (86, 50 + 40 + 90, "2026-11-21")


@pytest.mark.usefixtures("ten_a_day")
def test_month_pace_counts_only_the_window() -> None:
    use("20T17:00", 6, BOB)
    assert [forecast(now=NOW, last=last).a_day for last in (1, 2, 5, 30)] == [16, 13, Decimal("11.2"), Decimal("11.2")]


@pytest.mark.usefixtures("one_usd")
def test_month_without_a_full_day_has_no_pace() -> None:
    use("21T06:00", 6)
    result = forecast(now=NOW, budget=Decimal(100))
    assert (result.spent, result.a_day, result.month, result.runs_out) == (6, None, 6, None)


def test_month_forecast_on_its_last_day_is_the_amount_spent() -> None:
    create_rate("time", "1")
    create_time_usage("2028-02-28", 2 * 24 * HOUR, provider="acme")
    price()
    assert forecast(now=parse_utc("2028-02-29T23:00")).month == 48
