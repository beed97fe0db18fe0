"""Estimates, forecasts, and the commands that show them."""

import json
from datetime import date, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from billing import costs
from billing.estimate import Scenario, estimate
from billing.forecast import forecast
from billing.instance_types import INSTANCE_SIZES, find_instance_size
from billing.models import CostRecord, Rate, UsageRecord
from tests.conftest import NOW
from tests.support.billing import (
    ADA,
    BASIC_INSTANCE,
    BOB,
    HOUR,
    create_rate,
    create_time_usage,
    list_cost_records,
    parse_day,
    parse_utc,
)

pytestmark = pytest.mark.django_db
EIGHT = ["--agents", "8", "--days", "30", "--instance", "basic", "--cpu-utilisation", "0.1"]


def run(*args: str) -> str:
    out = StringIO()
    call_command(*args, stdout=out)
    return out.getvalue()


def amounts(**fields: Any) -> dict[str, str]:
    known = {
        "provider": "cloudflare", "instance": "basic", "agents": 8, "hours_per_day": Decimal(4), "days": 30,
        "cpu_utilisation": Decimal("0.1"),
    }  # fmt: skip
    found = estimate(Scenario(**{**known, **fields}), Rate.objects.all(), now=NOW)
    return {line.item: str(line.usd) for line in found.lines} | {"total": str(found.total), "agent": str(found.per_agent)}


# --- worked tables ----------------------------------------------------------------------------------------------------


def test_eight_agents_for_four_hours_a_day() -> None:
    """The design's table: (960 - 25) x 0.009 = 8.415, (1440 - 375) x 0.0012 = 1.278, (3840 - 200) x 0.00025 = 0.91, 5."""
    assert amounts() == {"memory": "8.42", "cpu": "1.28", "disk": "0.91", "plan": "5.00", "total": "15.61", "agent": "1.95"}


def test_eight_agents_that_never_sleep() -> None:
    """(5760 - 25) x 0.009 = 51.615, (8640 - 375) x 0.0012 = 9.918, (23040 - 200) x 0.00025 = 5.71, 5."""
    assert amounts(hours_per_day=Decimal(24)) == {
        "memory": "51.62", "cpu": "9.92", "disk": "5.71", "plan": "5.00", "total": "72.25", "agent": "9.03",
    }  # fmt: skip


def test_what_is_within_the_allowances_costs_the_plan() -> None:
    """1 GiB for 25 h and 15 vCPU-minutes an hour for 25 h = 375: all that is free."""
    assert amounts(agents=1, hours_per_day=Decimal(1), days=25, cpu_utilisation=Decimal(1)) == {
        "memory": "0.00", "cpu": "0.00", "disk": "0.00", "plan": "5.00", "total": "5.00", "agent": "5.00",
    }  # fmt: skip


def test_a_fargate_task_for_a_month() -> None:
    """1 vCPU and 4 GB for 720 h: 29.15 + 12.80 = 41.95 (https://www.wring.co/blog/aws-fargate-pricing-guide). `standard-1` has
    4 GiB and half a CPU, so that a minute of one is taken twice as dear here: 2 x 0.04048 / 60 = 0.001349333333."""
    create_rate("cpu", "0.001349333333")
    create_rate("memory", "0.004445")
    found = amounts(provider="acme", instance="standard-1", agents=1, hours_per_day=Decimal(24), cpu_utilisation=Decimal(1))
    assert found == {"memory": "12.80", "cpu": "29.15", "total": "41.95", "agent": "41.95"}


def test_an_hourly_price_of_ones_own() -> None:
    """3 x 2.5 h x 20 d = 150 sandbox-hours at 0.07 = 10.50."""
    create_rate("time", "0.07", provider="docker", since="2026-02-01")
    assert amounts(provider="docker", agents=3, hours_per_day=Decimal("2.5"), days=20) == {
        "time": "10.50", "total": "10.50", "agent": "3.50",
    }  # fmt: skip


def test_the_sizes_are_those_of_the_providers_table() -> None:
    """https://developers.cloudflare.com/containers/platform/limits/"""
    found = {
        name: (float(size.vcpus), size.memory_mib / 1024, size.disk_mb / 1000)
        for name, size in INSTANCE_SIZES["cloudflare"].items()
    }
    assert found == {
        "lite": (0.0625, 0.25, 2), "basic": (0.25, 1, 4), "standard-1": (0.5, 4, 8), "standard-2": (1, 6, 12),
        "standard-3": (2, 8, 16), "standard-4": (4, 12, 20),
    }  # fmt: skip
    assert find_instance_size("docker", "basic") == INSTANCE_SIZES["cloudflare"]["basic"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_table() -> None:
    said = run("estimate", *EIGHT, "--hours-per-day", "4").splitlines()
    assert [line.split()[-1] for line in said] == ["USD", "8.42", "1.28", "0.91", "5.00", "15.61", "1.95"]
    assert len({len(line) for line in said}) == 1


def test_the_command_says_it_in_json() -> None:
    said = run("estimate", *EIGHT, "--always-on", "--json")
    assert said.count("\n") == 1
    found = json.loads(said)
    assert ([line["usd"] for line in found["lines"]], found["total_usd"]) == (["51.62", "9.92", "5.71", "5.00"], "72.25")
    assert found["lines"][0] == {
        "item": "memory", "unit": "GiB-hours of memory", "quantity": "5760", "free": "25", "rate_usd": "0.009", "usd": "51.62",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "--agents"), (["--agents", "0"], "--agents"), (["--agents", "x"], "--agents"),
        (["--agents", "1", "--days", "32"], "--days"), (["--agents", "1", "--hours-per-day", "24.1"], "--hours-per-day"),
        (["--agents", "1", "--hours-per-day", "NaN"], "--hours-per-day"),
        (["--agents", "1", "--cpu-utilisation", "1.1"], "--cpu-utilisation"),
        (["--agents", "1", "--instance", "huge"], "--instance"), (["--agents", "1", "--provider", "nowhere"], "--provider"),
        (["--agents", "1", "--hours-per-day", "4", "--always-on"], "--always-on"),
        (["--forecast", "--last", "0"], "--last"), (["--forecast", "--budget", "0"], "--budget"),
        (["--forecast", "--budget", "much"], "--budget"),
    ],
)  # fmt: skip
def test_the_command_names_what_is_wrong(args: list[str], named: str) -> None:
    with pytest.raises(CommandError, match=f"^{named}: "):
        run("estimate", *args)


# --- from what was used -----------------------------------------------------------------------------------------------


@pytest.fixture
def ten_a_day(db: None) -> None:
    """10 hours at 1 USD on each day from the 16th on; it is noon of the 21st, and 6 of today are over."""
    create_rate("time", "1")
    for each in range(16, 21):
        create_time_usage(f"2026-11-{each}T06:00", 10 * HOUR, provider="acme")
    create_time_usage("2026-11-21T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)


@pytest.mark.usefixtures("ten_a_day")
def test_a_month_goes_on_as_the_last_days_went() -> None:
    """50 until yesterday, 10 today (6 of them already), and 9 days to come: 150."""
    found = forecast(now=NOW)
    assert (found.spent, found.a_day, found.days, found.month) == (56, 10, 5, 150)


@pytest.mark.usefixtures("ten_a_day")
@pytest.mark.parametrize(
    ("budget", "runs_out"),
    [
        ("10", "2026-11-16"), ("10.01", "2026-11-17"), ("56", "2026-11-21"), ("56.01", "2026-11-21"), ("60", "2026-11-21"),
        ("60.01", "2026-11-22"), ("150", "2026-11-30"), ("151", "2026-12-01"), ("1e9", None),
    ],
)  # fmt: skip
def test_a_budget_runs_out_on_a_day(budget: str, runs_out: str | None) -> None:
    assert forecast(now=NOW, budget=Decimal(budget)).runs_out == (parse_day(runs_out) if runs_out else None)


@pytest.mark.usefixtures("ten_a_day")
def test_a_forecast_is_of_some_agents_alone() -> None:
    create_time_usage("2026-11-20T06:00", HOUR, BOB, provider="acme")
    costs.price_usage(now=NOW)
    assert [forecast(now=NOW, agents=agents).a_day for agents in (None, [ADA], [BOB], [])] == [Decimal("10.2"), 10, 1, None]
    assert forecast(now=NOW, agents=[ADA], agent=BOB).a_day is None


@pytest.mark.usefixtures("ten_a_day")
def test_a_day_that_is_dearer_than_usual_counts_as_it_is() -> None:
    create_time_usage("2026-11-21T06:00", 5 * HOUR, "did:plc:bob", provider="acme")
    costs.price_usage(now=NOW)
    assert forecast(now=NOW).month == 50 + 11 + 90


@pytest.mark.usefixtures("ten_a_day")
def test_a_plan_is_not_paid_again_each_day() -> None:
    create_rate("plan", "30")
    costs.reset_costs()
    costs.price_usage(now=NOW)
    found = forecast(now=NOW)
    assert (found.spent, found.a_day, found.month) == (86, 10, 180)


@pytest.mark.usefixtures("ten_a_day")
def test_on_the_day_of_a_plan_the_rest_of_that_day_is_still_to_come() -> None:
    """6 of today's 10 are used, and the plan of a provider that was used today for the first time is 30: 50 before today, 10
    and 30 today, 10 on each of the 9 days that are left."""
    create_rate("plan", "30", provider="other")
    create_rate("time", "0", provider="other")
    create_time_usage("2026-11-21T06:00", HOUR, provider="other")
    costs.price_usage(now=NOW)
    found = forecast(now=NOW, budget=Decimal(85))
    assert (found.spent, found.month, str(found.runs_out)) == (86, 50 + 40 + 90, "2026-11-21")


@pytest.mark.usefixtures("ten_a_day")
def test_only_the_last_days_count() -> None:
    create_time_usage("2026-11-20T17:00", 6 * HOUR, "did:plc:bob", provider="acme")
    costs.price_usage(now=NOW)
    assert [forecast(now=NOW, last=last).a_day for last in (1, 2, 5, 30)] == [16, 13, Decimal("11.2"), Decimal("11.2")]


def test_before_a_day_is_over_nothing_is_known() -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-21T06:00", 6 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    found = forecast(now=NOW, budget=Decimal(100))
    assert (found.spent, found.a_day, found.month, found.runs_out) == (6, None, 6, None)


def test_a_month_that_ends_today_has_nothing_to_come() -> None:
    create_rate("time", "1")
    create_time_usage("2028-02-28", 2 * 24 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    assert forecast(now=parse_utc("2028-02-29T23:00")).month == 48


def test_the_command_forecasts() -> None:
    create_rate("time", "1")
    yesterday = timezone.now().date() - timedelta(days=1)
    create_time_usage(f"{yesterday}", 24 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    found = json.loads(run("estimate", "--forecast", "--budget", "100000", "--json"))
    assert (found["a_day_usd"], found["days"], found["budget_usd"]) == ("24", 1, "100000")
    assert date.fromisoformat(found["runs_out"]) > yesterday + timedelta(days=4000)
    said = run("estimate", "--forecast", "--budget", "100000")
    assert f"100000 USD reached on {found['runs_out']}" in said
    assert "24 USD a day, days averaged: 1" in said
    for only in (["--agent", ADA], ["--account", "house"], ["--environment", "game-1"], ["--provider", "acme"]):
        assert json.loads(run("estimate", "--forecast", "--json", *only))["a_day_usd"] == "24"
        assert json.loads(run("estimate", "--forecast", "--json", only[0], "other"))["a_day_usd"] is None


# --- costs and meter --------------------------------------------------------------------------------------------------


def test_costs_are_a_table_or_csv_or_json() -> None:
    create_rate("time", "0.5")
    create_time_usage("2026-11-02T10:00", 3 * HOUR, provider="acme")
    create_time_usage("2026-11-02T10:00", HOUR, agent="", provider="acme")
    costs.price_usage(now=NOW)
    assert run("costs", "--since", "2026-11-01").splitlines() == [
        "agent        hours   USD",
        "did:plc:ada      3  1.50",
        "(none)           1  0.50",
        "total               2.00",
    ]
    assert run("costs", "--csv").splitlines() == [
        "agent,usd,hours,time,memory,cpu,disk,storage,request,plan,llm",
        "did:plc:ada,1.5,3,3,,,,,,,",
        ",0.5,1,1,,,,,,,",
    ]
    found = json.loads(run("costs", "--by", "day", "--until", "2026-11-03", "--json"))
    assert (found["total_usd"], [each["key"] for each in found["results"]]) == ("2", ["2026-11-02"])
    assert run("costs", "--until", "2026-11-02", "--csv").count("\n") == 1


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--since", "yesterday"], "--since"), (["--since", "2026-11-02", "--until", "2026-11-02"], "--until"),
        (["--lease", "x"], "--lease"),
    ],
)  # fmt: skip
def test_costs_name_what_is_wrong(args: list[str], named: str) -> None:
    with pytest.raises(CommandError, match=f"^{named}: "):
        run("costs", *args)


def test_meter_again_throws_away_and_derives_anew(grant: Any) -> None:
    create_time_usage("2026-11-02T10:00", **BASIC_INSTANCE)  # of no fact
    assert run("meter").splitlines() == ["usage: nothing to do", "costs: 4 written"]
    before = list_cost_records()
    assert run("meter").splitlines()[1] == "costs: nothing to do"
    assert list_cost_records() == before
    run("meter", "--again")
    assert not UsageRecord.objects.exists()
    assert not CostRecord.objects.exists()
