"""manage.py estimate, costs and meter: options, output and exit."""

import json
import re
from datetime import date, timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from billing import costs, horizon
from billing.models import CostRecord, Rate, UsageRecord, Watermark
from tests.conftest import NOW
from tests.support.billing import (
    ADA,
    BASIC_INSTANCE,
    BOB,
    HOUR,
    create_rate,
    create_time_usage,
    create_token_usage,
    list_cost_records,
)

pytestmark = pytest.mark.django_db
EIGHT = ["--agents", "8", "--days", "30", "--instance", "basic", "--cpu-utilisation", "0.1"]


def run(*args: str) -> str:
    out = StringIO()
    call_command(*args, stdout=out)
    return out.getvalue()


def test_estimate_prints_a_table() -> None:
    output = run("estimate", *EIGHT, "--hours-per-day", "4").splitlines()
    assert [line.split()[-1] for line in output] == ["USD", "8.42", "1.28", "0.91", "5.00", "15.61", "1.95"]
    assert len({len(line) for line in output}) == 1


def test_estimate_prints_json() -> None:
    output = run("estimate", *EIGHT, "--always-on", "--json")
    assert output.count("\n") == 1
    result = json.loads(output)
    assert ([line["usd"] for line in result["lines"]], result["total_usd"]) == (["51.62", "9.92", "5.71", "5.00"], "72.25")
    assert result["lines"][0] == {
        "item": "memory", "unit": "GiB-hours of memory", "quantity": "5760", "free": "25", "rate_usd": "0.009", "usd": "51.62",
    }  # fmt: skip


def test_estimate_compares_providers() -> None:
    compared = ["--hours-per-day", "4", "--provider", "kubernetes", "--provider", "cloudflare"]
    assert run("estimate", *EIGHT, *compared).splitlines() == [
        "USD a month          kubernetes  cloudflare",
        "GiB-hours of memory     no rate        8.42",
        "vCPU-minutes            no rate        1.28",
        "GB-hours of disk        no rate        0.91",
        "months of a plan        no rate        5.00",
        "total                   no rate       15.61",
        "per agent               no rate        1.95",
        "kubernetes: no rate is known. Add its prices with manage.py rate add.",
        "cloudflare: not covered: network egress, requests of Workers and Durable Objects, logs",
    ]
    results = json.loads(run("estimate", *EIGHT, "--provider", "all", "--json"))["results"]
    assert [each["provider"] for each in results if each["estimate"] is None] == ["kubernetes"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("estimate --agents 1 --provider cloudflare --provider nowhere", "--provider"),
        ("estimate --agents 1 --suspended-hours-per-day 1", "--suspended-hours-per-day"),
        ("estimate --forecast --provider all", "--provider"),
        ("estimate", "--agents"), ("estimate --agents 0", "--agents"), ("estimate --agents x", "--agents"),
        ("estimate --agents 1 --days 32", "--days"), ("estimate --agents 1 --hours-per-day 24.1", "--hours-per-day"),
        ("estimate --agents 1 --hours-per-day NaN", "--hours-per-day"),
        ("estimate --agents 1 --cpu-utilisation 1.1", "--cpu-utilisation"),
        ("estimate --agents 1 --instance huge", "--instance"), ("estimate --agents 1 --provider nowhere", "--provider"),
        ("estimate --agents 1 --hours-per-day 4 --always-on", "--always-on"), ("estimate --forecast --last 0", "--last"),
        ("estimate --forecast --budget 0", "--budget"), ("estimate --forecast --budget much", "--budget"),
        ("costs --since yesterday", "--since"), ("costs --since 2026-11-02 --until 2026-11-02", "--until"),
        ("costs --lease x", "--lease"),
    ],
)  # fmt: skip
def test_invalid_option_is_named(command: str, option: str) -> None:
    with pytest.raises(CommandError, match=f"^{option}: "):
        run(*command.split())


def test_estimate_prints_a_forecast() -> None:
    create_rate("time", "1")
    yesterday = timezone.now().date() - timedelta(days=1)
    create_time_usage(f"{yesterday}", 24 * HOUR, provider="acme")
    costs.price_usage(now=NOW)
    result = json.loads(run("estimate", "--forecast", "--budget", "100000", "--json"))
    assert (result["a_day_usd"], result["days"], result["budget_usd"]) == ("24", 1, "100000")
    assert date.fromisoformat(result["runs_out"]) > yesterday + timedelta(days=4000)
    output = run("estimate", "--forecast", "--budget", "100000")
    assert f"100000 USD reached on {result['runs_out']}" in output
    assert "24 USD a day, days averaged: 1" in output
    for only in (["--agent", ADA], ["--account", "house"], ["--environment", "game-1"], ["--provider", "acme"]):
        assert json.loads(run("estimate", "--forecast", "--json", *only))["a_day_usd"] == "24"
        assert json.loads(run("estimate", "--forecast", "--json", only[0], "other"))["a_day_usd"] is None


# --- costs and meter --------------------------------------------------------------------------------------------------


def test_costs_prints_a_table_csv_or_json() -> None:
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
        "agent,usd,hours,time,memory,cpu,disk,gpu,suspend,storage,request,plan,llm,estimated_usd,unpriced_calls,"
        "input_tokens,cached_tokens,cache_written_tokens,output_tokens,estimated_tokens",
        "did:plc:ada,1.5,3,3,,,,,,,,,,0,0,0,0,0,0,0",
        ",0.5,1,1,,,,,,,,,,0,0,0,0,0,0,0",
    ]
    result = json.loads(run("costs", "--by", "day", "--until", "2026-11-03", "--json"))
    assert (result["total_usd"], [each["key"] for each in result["results"]]) == ("2", ["2026-11-02"])
    assert run("costs", "--until", "2026-11-02", "--csv").count("\n") == 1


TOKEN_KINDS = ("input", "cached", "cache written", "output", "estimated")


def test_costs_by_model_have_tokens() -> None:
    tokens = {
        "input_tokens": 900,
        "cached_tokens": 500,
        "cache_written_tokens": 300,
        "output_tokens": 40,
        "estimated_tokens": 7,
    }
    create_token_usage("2026-10-02T10:00", "3", 9, model="claude-opus-4-5", **tokens)
    create_token_usage("2026-10-03T10:00", "1", model="gpt-5")
    create_token_usage("2026-11-03T10:00", "7", model="claude-opus-4-5", **tokens)
    costs.price_usage(now=NOW)
    october = ["--since", "2026-10-01", "--until", "2026-11-01"]
    lines = run("costs", "--by", "model", *october).splitlines()
    assert len({*map(len, lines)}) == 1
    assert [re.split("  +", line.strip()) for line in lines] == [
        ["model", "hours", "USD", "calls", *(f"{kind} tokens" for kind in TOKEN_KINDS)],
        ["claude-opus-4-5", "3.00", "9", "900", "500", "300", "40", "7"],
        ["gpt-5", "1.00", "1"],
        ["total", "4.00", "10", "900", "500", "300", "40", "7"],
    ]
    (ada,) = json.loads(run("costs", "--model", "claude-opus-4-5", "--json", *october))["results"]
    assert (ada["key"], ada["usd"], ada["tokens"]["input"], ada["quantities"]) == (ADA, "3", 900, {"llm": "9"})
    assert json.loads(run("costs", "--by", "model_provider", "--json"))["total_tokens"]["output"] == 80


def test_costs_by_model_are_refused_until_they_are_derived() -> None:
    create_token_usage("2026-10-02T10:00", "3", model="claude-opus-4-5")
    costs.price_usage(now=NOW)
    Watermark.hold("costs", NOW + HOUR)  # by a pass of the version before
    with pytest.raises(CommandError, match="not derived yet"):
        run("costs", "--by", "model")
    assert json.loads(run("costs", "--json"))["total_tokens"] is None


def test_costs_names_estimated_and_unpriced_calls() -> None:
    create_token_usage("2026-11-02T10:00", "3", 9, unpriced=5, estimated_usd="0.125")
    create_token_usage("2026-11-02T10:00", "1", agent=BOB)
    costs.price_usage(now=NOW)
    assert run("costs").splitlines() == [
        "agent        hours   USD  USD estimated  unpriced calls",
        "did:plc:ada      0  3.00          0.125               5",
        "did:plc:bob      0  1.00                               ",
        "total               4.00          0.125               5",
    ]
    assert run("costs", "--csv").splitlines()[1].endswith(",9,0.125,5,0,0,0,0,0")
    result = json.loads(run("costs", "--json"))
    assert (result["total_estimated_usd"], result["total_unpriced_calls"]) == ("0.125", 5)
    assert [(each["estimated_usd"], each["unpriced_calls"]) for each in result["results"]] == [("0.125", 5), ("0", 0)]


def test_meter_again_rebuilds_usage_and_costs(grant: Any) -> None:
    create_time_usage("2026-11-02T10:00", **BASIC_INSTANCE)  # without a fact, so a rebuild removes it
    output = run("meter").splitlines()
    assert output[:2] == ["usage: nothing to do", "costs: 4 written"]
    assert output[2:] == [f"horizon: usage of days before {horizon.get_horizon().date()} is final"]
    assert horizon.get_horizon().year > 2000
    before = list_cost_records()
    assert run("meter").splitlines()[1] == "costs: nothing to do"
    assert list_cost_records() == before
    run("meter", "--again")
    assert not UsageRecord.objects.exists()
    assert not CostRecord.objects.exists()


# --- rate -------------------------------------------------------------------------------------------------------------


def test_rate_is_added_in_the_unit_of_the_vendor_and_priced_from_its_start() -> None:
    """0.0360 USD per vCPU-hour are 0.0006 a minute: 2 agents x 10 h x 10 days x 1 vCPU are 12000 minutes, 7.20 USD."""
    scenario = ["--agents", "2", "--hours-per-day", "10", "--days", "10", "--instance", "SMALL", "--provider", "kubernetes"]
    with pytest.raises(CommandError, match="no rates"):
        run("estimate", *scenario)
    source = "https://example.org/pricing, read 2026-11-25"
    assert "0.0006 USD, vCPU-minutes" in run("rate", "add", "kubernetes", "0.0360", "vcpu-hour", "--source", source)
    assert f"{source}: 0.036 USD per vcpu-hour" in run("rate", "list", "--provider", "kubernetes")
    Rate.objects.filter(item="cpu", provider="kubernetes").update(valid_from=NOW)
    assert run("estimate", *scenario).splitlines()[-1] == "no rate: GiB-hours of memory, GB-hours of disk"
    assert json.loads(run("estimate", *scenario, "--json"))["total_usd"] == "7.20"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("nowhere 1 vcpu-hour", "provider"), ("daytona x vcpu-hour", "price"),
        ("daytona Infinity vcpu-hour", "price"), ("daytona 99999999 vcpu-second", "price"),
        ("daytona 1 vcpu-hour --allowance x", "--allowance"), ("runloop 1 vcpu-hour --instance HUGE", "--instance"),
        ("daytona 1 vcpu-hour --from 2020-01-01T00:00Z", "--from"), ("daytona 1 vcpu-hour --from soon", "--from"),
    ],
)  # fmt: skip
def test_invalid_rate_is_named(arguments: str, name: str) -> None:
    with pytest.raises(CommandError, match=f"^{name}: "):
        run("rate", "add", *arguments.split(), "--source", "x")
