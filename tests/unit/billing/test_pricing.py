"""Prices: rounding, worked tables of providers' pages, changes of rates, allowances and plans."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from billing import costs, pricing, totals
from billing.models import CostRecord, UsageRecord
from sandboxes.models import Sandbox, SandboxState
from tests.support.billing import (
    ADA,
    BASIC_INSTANCE,
    BOB,
    HOUR,
    create_rate,
    create_sandbox,
    create_storage_usage,
    create_time_usage,
    create_token_usage,
    derive_lease_id,
    join_account,
    parse_day,
    parse_utc,
    price,
    price_and_list,
    price_and_sum,
)

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)
USD = Decimal


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amount", "places", "shown"),
    [
        (Fraction(8415, 1000), 2, "8.42"), (Fraction(8414999, 10**6), 2, "8.41"), (Fraction(1, 3), 9, "0.333333333"),
        (Fraction(2, 3), 9, "0.666666667"), (Fraction(5, 10**10), 9, "1E-9"), (Fraction(49, 10**11), 9, "0E-9"),
        (Fraction(0), 2, "0.00"), (Fraction(10**12), 2, "1000000000000.00"),
    ],
)  # fmt: skip
def test_amounts_are_rounded_half_up(amount: Fraction, places: int, shown: str) -> None:
    assert str(pricing.round_half_up(amount, places)) == shown


@pytest.mark.parametrize(
    ("used", "allowances", "free"),
    [
        ([5, 5, 5], [7, 7, 7], [5, 2, 0]), ([5, 5], [0, 0], [0, 0]),
        ([5, 5, 5], [7, 7, 12], [5, 2, 5]),  # raised: the difference remains
        ([5, 5, 5], [7, 3, 7], [5, 0, 2]),  # lowered, then raised again
    ],
)  # fmt: skip
def test_allowances_are_used_up_in_order(used: list[int], allowances: list[int], free: list[int]) -> None:
    assert [*pricing.apply_allowances(zip(used, allowances, strict=True))] == free


# --- worked tables ----------------------------------------------------------------------------------------------------


def test_eight_agents_for_four_hours_a_day() -> None:
    """8 agents x 4 h x 30 d on `basic`, 1/4 vCPU, 1 GiB, 4 GB (the table in the design document, by Cloudflare's rates):
    memory 8 x 1 x 120 = 960 GiB-hours, 25 free: 935 x 0.009 = 8.415
    disk   8 x 4 x 120 = 3840 GB-hours, 200 free: 3640 x 0.00025 = 0.91
    cpu    8 x 0.25 x 120 x 60 = 14400 vCPU-minutes allocated (use is not measured), 375 free: 14025 x 0.0012 = 16.83.
           At 10 % utilisation: 1065 x 0.0012 = 1.278 (in test_estimate)
    plan   5"""
    for number in range(8):
        for each in range(30):
            create_time_usage(parse_utc("2026-11-01T09:30") + each * DAY, 4 * HOUR, f"did:plc:a{number}", **BASIC_INSTANCE)
    price()
    sums = {each.key: (each.usd, each.quantities[each.key], each.free.get(each.key, 0)) for each in totals.sum_costs("item")}
    assert sums == {
        "memory": (USD("8.415"), 960, 25), "disk": (USD("0.91"), 3840, 200), "cpu": (USD("16.83"), 14400, 375),
        "plan": (USD(5), 1, 0),
    }  # fmt: skip


def test_eight_agents_always_on() -> None:
    """8 x 24 h x 30 d: memory (5760 - 25) x 0.009 = 51.615, disk (23040 - 200) x 0.00025 = 5.71, plan 5."""
    for number in range(8):
        create_time_usage("2026-11-01", 30 * DAY, f"did:plc:a{number}", **BASIC_INSTANCE)
    price()
    sums = {each.key: each.usd for each in totals.sum_costs("item")}
    assert sums == {"memory": USD("51.615"), "cpu": USD("103.23"), "disk": USD("5.71"), "plan": USD(5)}


def test_requested_disk_and_gpus_of_a_sandbox_are_charged_while_it_is_awake() -> None:
    """Two hours awake with 10,000 MiB (10.48576 GB) and two GPUs, one hour suspended, in which the disk alone counts:
    31.457 GB-hours x 0.001 = 0.031457, 4 GPU-hours x 2.5 = 10."""
    for item, usd, kind in (("disk", "0.001", ""), ("gpu", "2.5", "H100"), ("gpu", "9", "")):
        create_rate(item, usd, instance_type=kind)
    sandbox = create_sandbox(provider="acme")
    Sandbox.objects.filter(pk=sandbox.pk).update(disk_mib=10_000, gpus=2, gpu_type="H100")
    for began, lasts, state in (("2026-11-02T10:00", 2 * HOUR, "running"), ("2026-11-02T12:00", HOUR, "suspended")):
        create_time_usage(began, lasts, provider="acme", sandbox=sandbox, state=state, measured=True)
    price()
    sums = {each.key: (each.usd, each.quantities[each.key]) for each in totals.sum_costs("item")}
    assert sums == {"disk": (USD("0.031458"), USD("31.458")), "gpu": (USD(10), 4)}


def test_cloudflare_example_of_an_hour_of_cpu() -> None:
    """1 vCPU for an hour at 0.00002 USD a vCPU-second: 3600 x 0.00002 = 0.072; at 20 % 0.0144. Example of Cloudflare's
    changelog of 2025-11-21, quoted by
    https://bybowu.com/article/cloudflare-containers-pricing-just-changed-do-this-now. A minute is 60 x 0.00002 = 0.0012."""
    create_rate("cpu", "0.0012")
    create_time_usage("2026-11-02T10:00", HOUR, ADA, provider="acme", millicpus=1000)
    create_time_usage("2026-11-02T10:00", HOUR, BOB, provider="acme", millicpus=200)
    price()
    assert {each.key: each.usd for each in totals.sum_costs("agent")} == {ADA: USD("0.072"), BOB: USD("0.0144")}


def test_fargate_task_for_a_month() -> None:
    """1 vCPU and 4 GB for 30 days: 720 x 0.04048 = 29.1456 and 4 x 720 x 0.004445 = 12.8016, together 41.95 USD.
    https://www.wring.co/blog/aws-fargate-pricing-guide, "Pricing Formula". An hour of CPU is 60 minutes at 0.000674666667."""
    create_rate("cpu", "0.000674666667")
    create_rate("memory", "0.004445")
    create_time_usage("2026-04-01", 30 * DAY, provider="acme", millicpus=1000, memory_mib=4096)
    price()
    sums = {each.key: each.usd for each in totals.sum_costs("item")}
    assert {item: round(usd, 2) for item, usd in sums.items()} == {"cpu": USD("29.15"), "memory": USD("12.80")}
    assert sums == {"cpu": USD("29.1456"), "memory": USD("12.8016")}  # a day of CPU is 0.97152000048, rounded to nine places
    assert round(price_and_sum(), 2) == USD("41.95")


def test_fargate_disk_beyond_the_free_part_of_a_task() -> None:
    """0.000111 USD per GB-hour beyond 20 GB (same page). `standard-4` has 20 GB, which is 14400 GB-hours a month: with an
    allowance of 10000 GB-hours, 4400 x 0.000111 = 0.4884."""
    create_rate("disk", "0.000111", provider="cloudflare", instance_type="standard-4", allowance=USD(10000))
    create_time_usage("2026-04-01", 30 * DAY, provider="cloudflare", millicpus=4000, memory_mib=12288)
    assert price_and_sum(item="disk") == USD("0.4884")


def test_gigabyte_stored_for_thirty_days_is_a_gb_month() -> None:
    """R2: 10 GB-months free, then 0.015 USD each (quoted by https://github.com/halideworks/onelight/wiki/Pricing).
    25 GB for 30 days are 25 GB-months: 15 x 0.015 = 0.225."""
    create_rate("storage", "0.015", allowance=USD(10))
    create_storage_usage("2026-04-01", 30 * DAY, 25 * 10**9, provider="acme")
    assert price_and_sum() == USD("0.225")
    assert price_and_list("quantity") == [(USD("0.833333333"),)] * 30  # rounded here, but not in the price


def test_model_calls_keep_their_cost() -> None:
    create_token_usage("2026-11-02T10:00", "0.123456789", 3)
    create_token_usage("2026-11-02T11:00", "0.000000001", provider="docker")
    create_token_usage("2026-11-02T11:00", "1", 2, agent=BOB)
    assert price_and_list("agent_did", "item", "quantity", "usd", "rate", agent_did=ADA) == [
        (ADA, "llm", 4, USD("0.123456790"), None)
    ]
    assert price_and_sum() == USD("1.123456790")


# --- billable usage ---------------------------------------------------------------------------------------------------


def test_only_ready_states_are_billable() -> None:
    create_rate("time", "1")
    for state in SandboxState.values:
        create_time_usage("2026-11-02T10:00", agent=state, provider="acme", state=state)
    assert {agent for agent, usd in price_and_list("agent_did", "usd") if usd} == {"warm", "running", "waiting"}
    assert totals.sum_sandbox_time("agent") == {"warm": HOUR, "running": HOUR, "waiting": HOUR}


def test_sandbox_without_a_lease_is_billed_to_the_house_account() -> None:
    create_rate("time", "2")
    create_time_usage("2026-11-02T10:00", agent="", provider="acme")
    assert price_and_list("account__name", "agent_did", "holder", "usd") == [("house", "", None, 2)]


def test_provider_without_rates_costs_nothing_and_has_hours() -> None:
    create_time_usage("2026-11-02T10:00", provider="nowhere")
    assert price_and_list("item") == []
    (row,) = totals.sum_costs("agent")
    assert (row.key, row.usd, row.sandbox_time) == (ADA, 0, HOUR)


def test_disk_is_charged_only_for_instance_types() -> None:
    create_time_usage("2026-11-02T10:00", **BASIC_INSTANCE)
    create_time_usage("2026-11-02T10:00", agent=BOB, provider="cloudflare", memory_mib=1000, millicpus=250)
    assert price_and_list("agent_did", "quantity", item="disk") == [(ADA, 4)]


@pytest.mark.parametrize("millicpus", [62, 63])
def test_a_sixteenth_of_a_cpu_is_lite(millicpus: int) -> None:
    create_rate("time", "3", provider="cloudflare", instance_type="lite")
    create_time_usage("2026-11-02T10:00", provider="cloudflare", memory_mib=256, millicpus=millicpus)
    assert price_and_sum(item="time") == 3


def test_rate_for_an_instance_type_precedes_a_general_one() -> None:
    create_rate("time", "1", provider="cloudflare", since="2026-06-01")
    create_rate("time", "7", provider="cloudflare", instance_type="basic")
    create_time_usage("2026-11-02T10:00", **BASIC_INSTANCE)
    create_time_usage("2026-11-02T10:00", agent=BOB, provider="cloudflare", memory_mib=99)
    assert price_and_list("agent_did", "usd", item="time") == sorted(
        [(ADA, USD(7)), (BOB, USD(1))], key=lambda each: str(derive_lease_id(each[0]))
    )


# --- changes of rates -------------------------------------------------------------------------------------------------


def test_rate_that_begins_within_usage_splits_it() -> None:
    """10:00 to 11:00, and a higher rate from 10:45:00.000001: 2700000001 us x 1 and 899999999 us x 4 (1 h = 3600000000 us)."""
    old = create_rate("time", "1")
    new = create_rate("time", "4", since="2026-11-02T10:45:00.000001")
    create_time_usage("2026-11-02T10:00", provider="acme")
    parts = [(old.pk, "2700000001", USD("0.750000000")), (new.pk, "899999999", USD("0.999999999"))]
    assert price_and_list("rate", "whole", "usd") == parts


def test_usage_before_a_rate_keeps_its_price() -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", 30 * HOUR, provider="acme")
    before = price_and_list("day", "usd", "rate")
    create_rate("time", "5", since="2026-11-03T16:00")
    costs.reset_costs()
    assert price_and_list("day", "usd", "rate") == before


def test_allowance_continues_across_a_change_of_rate() -> None:
    """Of 10 free hours 8 are used before the change and 2 after it; 6 hours x 5 USD are billed."""
    create_rate("time", "1", allowance=USD(10))
    create_rate("time", "5", since="2026-11-02T08:00", allowance=USD(10))
    create_time_usage("2026-11-02T00:00", 16 * HOUR, provider="acme")
    assert price_and_list("quantity", "free", "usd") == [(8, 8, 0), (8, 2, 30)]


def test_raised_allowance_adds_to_a_used_up_one() -> None:
    create_rate("time", "1", allowance=USD(10))
    create_rate("time", "1", since="2026-11-05", allowance=USD(20))
    for when, free in (("2026-11-01", 10), ("2026-11-06", 10), ("2026-11-07", 0)):
        create_time_usage(when, 12 * HOUR, provider="acme")
        assert price_and_list("free", "usd", day=parse_day(when)) == [(free, 12 - free)]


def test_allowance_is_used_by_day_before_rate() -> None:
    create_rate("time", "1", provider="cloudflare", since="2026-06-01", allowance=USD(10))
    create_rate("time", "1", provider="cloudflare", instance_type="basic", allowance=USD(10))
    create_time_usage("2026-11-03T00:00", 8 * HOUR, **BASIC_INSTANCE)
    create_time_usage("2026-11-02T00:00", 8 * HOUR, provider="cloudflare")
    assert price_and_list("day", "free", item="time") == [(parse_day("2026-11-02"), 8), (parse_day("2026-11-03"), 2)]


# --- months and allowances --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ten_free")
def test_leases_share_the_allowance_of_their_own_account() -> None:
    join_account("team", agent="did:plc:eve")
    for agent, hours in ((BOB, 7), (ADA, 7), ("did:plc:eve", 12)):
        create_time_usage("2026-11-02T00:00", hours * HOUR, agent, provider="acme")
    house = price_and_list("quantity", "free", "usd", account__name="house")
    assert house == [(7, 7, 0), (7, 3, 4)]  # ordered by lease id, not by the order of writing
    assert price_and_list("quantity", "free", "usd", account__name="team") == [(12, 10, 2)]


@pytest.mark.usefixtures("ten_free")
def test_allowance_resets_at_the_start_of_a_utc_month() -> None:
    create_time_usage("2026-11-30T12:00", 24 * HOUR, provider="acme")
    assert price_and_list("day", "free", "usd") == [(parse_day("2026-11-30"), 10, 2), (parse_day("2026-12-01"), 10, 2)]


@pytest.mark.usefixtures("ten_free")
@pytest.mark.parametrize(("year", "days"), [("2028", 29), ("2027", 28), ("2100", 28)])
def test_february_has_its_number_of_days(year: str, days: int) -> None:
    begin = parse_utc(f"{year}-02-01")
    create_time_usage(begin, datetime(int(year), 3, 1, tzinfo=UTC) - begin, provider="acme")
    assert (price_and_sum(), CostRecord.objects.count()) == (days * 24 - 10, days)


@pytest.mark.usefixtures("ten_free")
@pytest.mark.parametrize("when", ["2026-03-29", "2026-10-25", "2026-11-01", "2026-03-08"])
def test_day_of_a_daylight_saving_change_has_24_hours(when: str, settings: Any) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    create_time_usage(when, DAY, provider="acme")
    assert price_and_list("day", "usd") == [(parse_day(when), 14)]


@pytest.mark.usefixtures("ten_free")
def test_earlier_usage_takes_the_allowance_and_returns_it_when_removed() -> None:
    create_time_usage("2026-11-05T00:00", 8 * HOUR, provider="acme")
    assert price_and_list("day", "free", "usd") == [(parse_day("2026-11-05"), 8, 0)]
    late = create_time_usage("2026-11-02T00:00", 6 * HOUR, BOB, provider="acme")
    assert price_and_list("day", "free", "usd") == [(parse_day("2026-11-02"), 6, 0), (parse_day("2026-11-05"), 4, 4)]
    UsageRecord.objects.filter(pk__in=[row.pk for row in late]).delete()
    assert price_and_list("day", "free", "usd") == [(parse_day("2026-11-05"), 8, 0)]


@pytest.mark.usefixtures("ten_free")
def test_used_up_allowance_changes_only_with_earlier_usage() -> None:
    early = [create_time_usage(f"2026-11-{each:02}T00:00", 6 * HOUR, provider="acme") for each in range(1, 20)]
    price()
    create_time_usage("2026-11-15T00:00", 6 * HOUR, BOB, provider="acme")
    assert (price_and_sum(), price_and_list("free", agent_did=BOB)) == (20 * 6 - 10, [(0,)])
    UsageRecord.objects.filter(pk=early[1][0].pk).delete()
    assert price_and_list("day", "free")[:2] == [(parse_day("2026-11-01"), 6), (parse_day("2026-11-03"), 4)]
    assert price_and_sum() == 19 * 6 - 10


def test_plan_is_charged_once_per_account_and_month_on_the_first_day_of_use() -> None:
    join_account("team", agent=BOB)
    for when in ("2026-11-09T10:00", "2026-11-20T10:00", "2026-12-24T10:00"):
        create_time_usage(when, **BASIC_INSTANCE)
    create_time_usage("2026-11-30T23:00", agent=BOB, **BASIC_INSTANCE)
    paid = [("house", parse_day("2026-11-09")), ("team", parse_day("2026-11-30")), ("house", parse_day("2026-12-24"))]
    assert price_and_list("account__name", "day", "quantity", "usd", item="plan") == [(*each, 1, 5) for each in paid]
    create_time_usage("2026-11-04T10:00", **BASIC_INSTANCE)
    december = (parse_day("2026-12-24"), 5)
    assert price_and_list("day", "usd", item="plan", account__name="house") == [(parse_day("2026-11-04"), 5), december]
    UsageRecord.objects.filter(day__lt=parse_day("2026-11-19")).delete()
    assert price_and_list("day", "usd", item="plan", account__name="house") == [(parse_day("2026-11-20"), 5), december]


def test_plan_that_begins_later_is_charged_from_then_on() -> None:
    create_rate("plan", "30", since="2026-11-10")
    create_rate("time", "0")
    for when in ("2026-11-09T10:00", "2026-11-12T10:00", "2026-11-13T10:00"):
        create_time_usage(when, provider="acme")
    assert price_and_list("day", "usd", item="plan") == [(parse_day("2026-11-12"), 30)]
