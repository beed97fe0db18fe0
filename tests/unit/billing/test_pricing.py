"""What usage costs: worked tables, allowances, changes of rates, and that all of it can be derived again."""

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

from billing import costs, metering, pricing, totals
from billing.models import Account, CostRecord, Membership, Rate, Unpriced, UsageRecord
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


def total(**only: Any) -> Decimal:
    return sum((usd for (usd,) in list_cost_values("usd", **only)), USD(0))


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
        ([5, 5, 5], [7, 7, 7], [5, 2, 0]),
        ([5, 5], [0, 0], [0, 0]),
        ([5, 5, 5], [7, 7, 12], [5, 2, 5]),  # raised in between: what was added is left
        ([5, 5, 5], [7, 3, 7], [5, 0, 2]),  # and lowered, then raised again
    ],
)
def test_allowances_are_used_up_in_order(used: list[int], allowances: list[int], free: list[int]) -> None:
    assert [*pricing.apply_allowances(zip(used, allowances, strict=True))] == free


# --- worked tables ----------------------------------------------------------------------------------------------------


def test_eight_agents_for_four_hours_a_day() -> None:
    """8 agents x 4 h x 30 d on `basic`, 1/4 vCPU, 1 GiB, 4 GB (the design's own table, by Cloudflare's rates):
    memory 8 x 1 x 120 = 960 GiB-hours, 25 free: 935 x 0.009 = 8.415
    disk   8 x 4 x 120 = 3840 GB-hours, 200 free: 3640 x 0.00025 = 0.91
    cpu    8 x 0.25 x 120 x 60 = 14400 vCPU-minutes, since what is used of them is not measured, 375 free:
           14025 x 0.0012 = 16.83. At a tenth it would be 1065 x 0.0012 = 1.278 (test_estimate has that).
    plan   5"""
    for number in range(8):
        for each in range(30):
            create_time_usage(parse_utc("2026-11-01T09:30") + each * DAY, 4 * HOUR, f"did:plc:a{number}", **BASIC_INSTANCE)
    price()
    sums = {each.key: (each.usd, each.quantities[each.key], each.free.get(each.key, 0)) for each in totals.sum_costs("item")}
    assert sums == {
        "memory": (USD("8.415"), 960, 25),
        "disk": (USD("0.91"), 3840, 200),
        "cpu": (USD("16.83"), 14400, 375),
        "plan": (USD(5), 1, 0),
    }


def test_eight_agents_always_on() -> None:
    """8 x 24 h x 30 d: memory (5760 - 25) x 0.009 = 51.615, disk (23040 - 200) x 0.00025 = 5.71, plan 5."""
    for number in range(8):
        create_time_usage("2026-11-01", 30 * DAY, f"did:plc:a{number}", **BASIC_INSTANCE)
    price()
    sums = {each.key: each.usd for each in totals.sum_costs("item")}
    assert sums == {"memory": USD("51.615"), "cpu": USD("103.23"), "disk": USD("5.71"), "plan": USD(5)}


def test_cloudflare_example_of_an_hour_of_cpu() -> None:
    """1 vCPU for an hour at 0.00002 USD a vCPU-second: 3600 x 0.00002 = 0.072; at 20 % of it 0.0144. The example of
    Cloudflare's changelog of 2025-11-21, as told by
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
    assert sums == {"cpu": USD("29.1456"), "memory": USD("12.8016")}  # a day of CPU is 0.97152000048, to nine places
    assert round(total(), 2) == USD("41.95")


def test_fargate_disk_beyond_the_free_part_of_a_task() -> None:
    """0.000111 USD a GB-hour past 20 GB, of the same page. `standard-4` has 20 GB, so a month of it has 14400 GB-hours: with
    an allowance of as many it is free, and with 10000 it is 4400 x 0.000111 = 0.4884."""
    create_rate("disk", "0.000111", provider="cloudflare", instance_type="standard-4", allowance=USD(10000))
    create_time_usage("2026-04-01", 30 * DAY, provider="cloudflare", millicpus=4000, memory_mib=12288)
    price()
    assert total(item="disk") == USD("0.4884")


def test_gigabyte_stored_for_thirty_days_is_a_gb_month() -> None:
    """R2: 10 GB-months free, then 0.015 USD each (as told by https://github.com/halideworks/onelight/wiki/Pricing).
    25 GB for 30 days are 25 GB-months: 15 x 0.015 = 0.225."""
    create_rate("storage", "0.015", allowance=USD(10))
    create_storage_usage("2026-04-01", 30 * DAY, 25 * 10**9, provider="acme")
    price()
    assert total() == USD("0.225")
    assert list_cost_values("quantity") == [(USD("0.833333333"),)] * 30  # of which each line says nine places


def test_model_calls_keep_their_cost() -> None:
    create_token_usage("2026-11-02T10:00", "0.123456789", 3)
    create_token_usage("2026-11-02T11:00", "0.000000001", provider="docker")
    create_token_usage("2026-11-02T11:00", "1", 2, agent=BOB)
    price()
    assert list_cost_values("agent_did", "item", "quantity", "usd", "rate", agent_did=ADA) == [
        (ADA, "llm", 4, USD("0.123456790"), None)
    ]
    assert total() == USD("1.123456790")


# --- what is paid for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "paid"),
    [
        ("warming", False), ("warm", True), ("running", True), ("waiting", True), ("evicting", False), ("cold", False),
        ("destroying", False),
    ],
)  # fmt: skip
def test_only_ready_states_are_billable(state: str, paid: bool) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", provider="acme", state=state)
    price()
    assert total() == paid
    assert totals.sum_sandbox_time("agent") == ({ADA: HOUR} if paid else {})


def test_sandbox_without_a_lease_is_billed_to_the_house_account() -> None:
    create_rate("time", "2")
    create_time_usage("2026-11-02T10:00", agent="", provider="acme")
    price()
    assert list_cost_values("account__name", "agent_did", "holder", "usd") == [("house", "", None, 2)]


def test_provider_without_rates_costs_nothing_and_has_hours() -> None:
    create_time_usage("2026-11-02T10:00", provider="nowhere")
    price()
    assert list_cost_values("item") == []
    (one,) = totals.sum_costs("agent")
    assert (one.key, one.usd, one.lasted) == (ADA, 0, HOUR)


def test_disk_is_charged_only_for_instance_types() -> None:
    create_time_usage("2026-11-02T10:00", **BASIC_INSTANCE)
    create_time_usage("2026-11-02T10:00", agent=BOB, provider="cloudflare", memory_mib=1000, millicpus=250)
    price()
    assert list_cost_values("agent_did", "quantity", item="disk") == [(ADA, 4)]


@pytest.mark.parametrize("millicpus", [62, 63])
def test_a_sixteenth_of_a_cpu_is_lite(millicpus: int) -> None:
    create_rate("time", "3", provider="cloudflare", instance_type="lite")
    create_time_usage("2026-11-02T10:00", provider="cloudflare", memory_mib=256, millicpus=millicpus)
    price()
    assert total(item="time") == 3


def test_rate_for_an_instance_type_precedes_a_general_one() -> None:
    create_rate("time", "1", provider="cloudflare", since="2026-06-01")
    create_rate("time", "7", provider="cloudflare", instance_type="basic")
    create_time_usage("2026-11-02T10:00", **BASIC_INSTANCE)
    create_time_usage("2026-11-02T10:00", agent=BOB, provider="cloudflare", memory_mib=99)
    price()
    assert list_cost_values("agent_did", "usd", item="time") == sorted(
        [(ADA, USD(7)), (BOB, USD(1))], key=lambda each: str(derive_lease_id(each[0]))
    )


# --- a rate that changes ----------------------------------------------------------------------------------------------


def test_rate_that_begins_within_usage_splits_it() -> None:
    """10:00 to 11:00, dearer from 10:45:00.000001 on: 2700000001 us x 1 and 899999999 us x 4, an hour being 3600000000."""
    old = create_rate("time", "1")
    new = create_rate("time", "4", since="2026-11-02T10:45:00.000001")
    create_time_usage("2026-11-02T10:00", provider="acme")
    price()
    assert list_cost_values("rate", "whole", "usd") == [
        (old.pk, "2700000001", USD("0.750000000")),
        (new.pk, "899999999", USD("0.999999999")),
    ]


def test_usage_before_a_rate_keeps_its_price() -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", 30 * HOUR, provider="acme")
    price()
    before = list_cost_values("day", "usd", "rate")
    create_rate("time", "5", since="2026-11-03T16:00")
    costs.reset_costs()
    price()
    assert list_cost_values("day", "usd", "rate") == before


def test_allowance_continues_across_a_change_of_rate() -> None:
    """10 free, 8 of them before the change: 2 free after it, and 6 x 5 are paid."""
    create_rate("time", "1", allowance=USD(10))
    create_rate("time", "5", since="2026-11-02T08:00", allowance=USD(10))
    create_time_usage("2026-11-02T00:00", 16 * HOUR, provider="acme")
    price()
    assert list_cost_values("quantity", "free", "usd") == [(8, 8, 0), (8, 2, 30)]


def test_raised_allowance_adds_to_a_used_up_one() -> None:
    create_rate("time", "1", allowance=USD(10))
    create_rate("time", "1", since="2026-11-05", allowance=USD(20))
    for when, free in (("2026-11-01", 10), ("2026-11-06", 10), ("2026-11-07", 0)):
        create_time_usage(when, 12 * HOUR, provider="acme")
        price()
        assert list_cost_values("free", "usd", day=parse_day(when)) == [(free, 12 - free)]


def test_allowance_is_used_by_day_before_rate() -> None:
    create_rate("time", "1", provider="cloudflare", since="2026-06-01", allowance=USD(10))
    create_rate("time", "1", provider="cloudflare", instance_type="basic", allowance=USD(10))
    create_time_usage("2026-11-03T00:00", 8 * HOUR, **BASIC_INSTANCE)
    create_time_usage("2026-11-02T00:00", 8 * HOUR, provider="cloudflare")
    price()
    assert list_cost_values("day", "free", item="time") == [(parse_day("2026-11-02"), 8), (parse_day("2026-11-03"), 2)]


# --- months and allowances --------------------------------------------------------------------------------------------


@pytest.fixture
def ten_free(db: None) -> Rate:
    return create_rate("time", "1", allowance=USD(10))


@pytest.mark.usefixtures("ten_free")
def test_leases_of_an_account_share_its_allowance() -> None:
    for agent in (BOB, ADA):
        create_time_usage("2026-11-02T00:00", 7 * HOUR, agent, provider="acme")
    price()
    first, second = list_cost_values("quantity", "free", "usd")
    assert (first, second) == ((7, 7, 0), (7, 3, 4))  # in the order of lease ids, whatever order they were written in


@pytest.mark.usefixtures("ten_free")
def test_each_account_has_its_own_allowance() -> None:
    team = Account.objects.create(name="team")
    Membership.objects.create(agent_did=BOB, account=team)
    for agent in (ADA, BOB):
        create_time_usage("2026-11-02T00:00", 12 * HOUR, agent, provider="acme")
    price()
    assert {each.key: each.usd for each in totals.sum_costs("account")} == {"house": 2, "team": 2}


@pytest.mark.usefixtures("ten_free")
def test_allowance_resets_at_the_start_of_a_utc_month() -> None:
    create_time_usage("2026-11-30T12:00", 24 * HOUR, provider="acme")
    price()
    assert list_cost_values("day", "free", "usd") == [(parse_day("2026-11-30"), 10, 2), (parse_day("2026-12-01"), 10, 2)]


@pytest.mark.usefixtures("ten_free")
@pytest.mark.parametrize(("year", "days"), [("2028", 29), ("2027", 28), ("2100", 28)])
def test_february_has_its_number_of_days(year: str, days: int) -> None:
    begin = parse_utc(f"{year}-02-01")
    create_time_usage(begin, datetime(int(year), 3, 1, tzinfo=UTC) - begin, provider="acme")
    price()
    assert (total(), CostRecord.objects.count()) == (days * 24 - 10, days)


@pytest.mark.usefixtures("ten_free")
@pytest.mark.parametrize("when", ["2026-03-29", "2026-10-25", "2026-11-01", "2026-03-08"])
def test_day_of_a_daylight_saving_change_has_24_hours(when: str, settings: Any) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    create_time_usage(when, DAY, provider="acme")
    price()
    assert list_cost_values("day", "usd") == [(parse_day(when), 14)]


@pytest.mark.usefixtures("ten_free")
def test_late_usage_of_an_earlier_day_takes_the_allowance() -> None:
    create_time_usage("2026-11-05T00:00", 8 * HOUR, provider="acme")
    price()
    assert list_cost_values("day", "free") == [(parse_day("2026-11-05"), 8)]
    create_time_usage("2026-11-02T00:00", 6 * HOUR, BOB, provider="acme")
    price()
    assert list_cost_values("day", "free", "usd") == [(parse_day("2026-11-02"), 6, 0), (parse_day("2026-11-05"), 4, 4)]


@pytest.mark.usefixtures("ten_free")
def test_used_up_allowance_changes_only_with_earlier_usage() -> None:
    early = [create_time_usage(f"2026-11-{each:02}T00:00", 6 * HOUR, provider="acme") for each in range(1, 20)]
    price()
    create_time_usage("2026-11-15T00:00", 6 * HOUR, BOB, provider="acme")
    price()
    assert (total(), list_cost_values("free", agent_did=BOB)) == (20 * 6 - 10, [(0,)])
    UsageRecord.objects.filter(pk=early[1][0].pk).delete()
    price()
    assert list_cost_values("day", "free")[:2] == [(parse_day("2026-11-01"), 6), (parse_day("2026-11-03"), 4)]
    assert total() == 19 * 6 - 10


@pytest.mark.usefixtures("ten_free")
def test_removed_usage_returns_its_allowance() -> None:
    early = create_time_usage("2026-11-02T00:00", 6 * HOUR, BOB, provider="acme")
    create_time_usage("2026-11-05T00:00", 8 * HOUR, provider="acme")
    price()
    UsageRecord.objects.filter(pk__in=[row.pk for row in early]).delete()
    price()
    assert list_cost_values("day", "free", "usd") == [(parse_day("2026-11-05"), 8, 0)]


def test_plan_is_charged_once_per_account_and_month_on_the_first_day_of_use() -> None:
    team = Account.objects.create(name="team")
    Membership.objects.create(agent_did=BOB, account=team)
    for when in ("2026-11-09T10:00", "2026-11-20T10:00", "2026-12-24T10:00"):
        create_time_usage(when, **BASIC_INSTANCE)
    create_time_usage("2026-11-30T23:00", agent=BOB, **BASIC_INSTANCE)
    price()
    paid = [("house", parse_day("2026-11-09")), ("team", parse_day("2026-11-30")), ("house", parse_day("2026-12-24"))]
    assert list_cost_values("account__name", "day", "quantity", "usd", item="plan") == [(*each, 1, 5) for each in paid]
    create_time_usage("2026-11-04T10:00", **BASIC_INSTANCE)
    price()
    assert list_cost_values("day", "usd", item="plan", account__name="house") == [
        (parse_day("2026-11-04"), 5),
        (parse_day("2026-12-24"), 5),
    ]
    UsageRecord.objects.filter(day__lt=parse_day("2026-11-19")).delete()
    price()
    assert list_cost_values("day", "usd", item="plan", account__name="house") == [
        (parse_day("2026-11-20"), 5),
        (parse_day("2026-12-24"), 5),
    ]


def test_plan_that_begins_later_is_charged_from_then_on() -> None:
    create_rate("plan", "30", since="2026-11-10")
    create_rate("time", "0")
    for when in ("2026-11-09T10:00", "2026-11-12T10:00", "2026-11-13T10:00"):
        create_time_usage(when, provider="acme")
    price()
    assert list_cost_values("day", "usd", item="plan") == [(parse_day("2026-11-12"), 30)]


# --- agents that move -------------------------------------------------------------------------------------------------


def by_account() -> dict[str, tuple[Decimal, timedelta]]:
    """USD and time, by costs and by usage: each names its accounts by itself."""
    found = {each.key: (each.usd, each.lasted or timedelta(0)) for each in totals.sum_costs("account")}
    assert {name: lasted for name, (_, lasted) in found.items() if lasted} == totals.sum_sandbox_time("account")
    for name, (_, lasted) in found.items():
        assert sum(totals.sum_sandbox_time("day", account=name).values(), timedelta(0)) == lasted
    return found


@pytest.mark.usefixtures("ten_free")
def test_first_account_of_an_agent_pays_all_earlier_usage() -> None:
    create_time_usage("2025-01-31T12:00", 12 * HOUR, provider="acme")
    price()
    join_account("team")
    price()
    assert list_cost_values("account__name", "free", "usd") == [("team", 10, 2)]


@pytest.mark.usefixtures("ten_free")
def test_move_within_a_month_splits_costs_and_gives_each_account_its_allowance() -> None:
    for number in range(1, 7):
        create_time_usage(f"2026-10-{number:02}T00:00", 4 * HOUR, provider="acme")
    create_time_usage("2026-10-02T00:00", 7 * HOUR, BOB, provider="acme")
    join_account("team")
    price()
    join_account("lab", "2026-10-04")
    price()
    assert list_cost_values("day", "account__name", "free", "usd", agent_did=ADA) == [
        *((parse_day(f"2026-10-0{number}"), "team", free, 4 - free) for number, free in ((1, 4), (2, 4), (3, 2))),
        *((parse_day(f"2026-10-0{number}"), "lab", free, 4 - free) for number, free in ((4, 4), (5, 4), (6, 2))),
    ]
    assert by_account() == {"team": (2, 12 * HOUR), "lab": (2, 12 * HOUR), "house": (0, 7 * HOUR)}


@pytest.mark.usefixtures("ten_free")
def test_move_takes_effect_at_midnight_utc() -> None:
    join_account("team", "2026-11-01")
    join_account("lab", "2026-11-15")
    create_time_usage("2026-10-31T12:00", 24 * HOUR, provider="acme")
    create_time_usage("2026-11-14T22:00", 4 * HOUR, provider="acme")
    create_storage_usage("2026-11-14T23:00", 2 * HOUR, 10**9, provider="acme")
    create_token_usage("2026-11-14T23:59:58", "0.5", provider="acme")
    create_token_usage("2026-11-15T00:00", "0.25", provider="acme")
    price()
    assert by_account() == {
        "house": (2, 12 * HOUR), "team": (USD("4.5"), 14 * HOUR), "lab": (USD("0.25"), 2 * HOUR),
    }  # fmt: skip


def test_plan_is_charged_to_both_accounts_in_the_month_of_a_move() -> None:
    create_time_usage("2026-11-02T10:00", **BASIC_INSTANCE)
    create_time_usage("2026-11-20T10:00", **BASIC_INSTANCE)
    join_account("team")
    price()
    assert list_cost_values("account__name", "day", item="plan") == [("team", parse_day("2026-11-02"))]
    move = join_account("lab", "2026-11-10")
    price()
    assert list_cost_values("account__name", "day", item="plan") == [
        ("team", parse_day("2026-11-02")),
        ("lab", parse_day("2026-11-20")),
    ]
    move.delete()
    price()
    assert list_cost_values("account__name", "day", item="plan") == [("team", parse_day("2026-11-02"))]


@pytest.mark.usefixtures("ten_free")
def test_changed_or_deleted_move_leaves_no_trace_in_costs() -> None:
    for number in range(1, 7):
        create_time_usage(f"2026-10-{number:02}T00:00", 4 * HOUR, provider="acme")
    join_account("team")
    move = join_account("lab", "2026-10-04")
    price()
    move.since = parse_day("2026-10-06")
    move.save()
    price()
    assert by_account() == {"team": (10, 20 * HOUR), "lab": (0, 4 * HOUR)}
    move.delete()
    price()
    assert by_account() == {"team": (14, 24 * HOUR)}


@pytest.mark.usefixtures("ten_free")
def test_agent_that_leaves_an_account_is_in_the_house_account_from_that_day() -> None:
    create_time_usage("2026-10-31T00:00", 48 * HOUR, provider="acme")
    join_account("team"), join_account("house", "2026-11-01")
    price()
    assert by_account() == {"team": (14, 24 * HOUR), "house": (14, 24 * HOUR)}


def test_future_membership_changes_nothing_until_its_day() -> None:
    create_rate("time", "1")
    today = timezone.now().date()
    join_account("team"), join_account("lab", str(today + DAY))
    create_time_usage(datetime.combine(today, time(), UTC), provider="acme")
    price()
    assert [*by_account()] == ["team"]
    create_time_usage(datetime.combine(today + DAY, time(), UTC), provider="acme")
    price()
    assert {*by_account()} == {"team", "lab"}


def test_later_membership_begins_today_by_default() -> None:
    assert join_account("team").since == parse_day("1970-01-01")
    before = timezone.now().astimezone(UTC).date()
    assert before <= join_account("lab").since <= timezone.now().astimezone(UTC).date()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="has one writer at a time")
@pytest.mark.django_db(transaction=True)
def test_move_waits_for_a_pricing_pass_in_progress(at_checkpoint: Callable[..., None]) -> None:
    create_rate("time", "1")
    create_time_usage("2026-11-02T10:00", provider="acme")
    found: list[Any] = []

    def act(_: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '50ms'")
        join_account("team")

    def rival() -> None:
        with run_in_threads(1) as run:
            found.extend(run(act))

    at_checkpoint("repriced", rival)
    price()
    assert "lock timeout" in str(found)
    join_account("team")
    price()
    assert list_cost_values("account__name", "usd") == [("team", 1)]


# --- again, and beside itself -----------------------------------------------------------------------------------------


@pytest.fixture
def a_quarter(db: None) -> None:
    """Some of everything, over three months."""
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


@pytest.mark.usefixtures("a_quarter")
def test_pricing_is_idempotent() -> None:
    assert costs.price_usage(now=NOW)["written"] > 100
    before = [*CostRecord.objects.order_by("pk").values_list("pk", "usd")]
    assert not costs.price_usage(now=NOW + DAY)
    assert [*CostRecord.objects.order_by("pk").values_list("pk", "usd")] == before


@pytest.mark.usefixtures("a_quarter")
def test_rebuilt_costs_are_identical() -> None:
    price()
    before = list_cost_records()
    costs.reset_costs()
    assert not CostRecord.objects.exists()
    price()
    assert list_cost_records() == before


@pytest.mark.usefixtures("a_quarter")
def test_order_of_days_does_not_change_costs() -> None:
    price()
    before, days = list_cost_records(), [*UsageRecord.objects.order_by().values_list("day", flat=True).distinct()]
    costs.reset_costs()
    Unpriced.objects.all().delete()
    for each in random.Random(1).sample(days, len(days)):
        Unpriced.note([each])
        price()
    assert list_cost_records() == before


@pytest.mark.usefixtures("a_quarter")
@pytest.mark.parametrize("step", ["priced", "repriced"])
def test_crashed_pass_is_completed_by_the_next(step: str, at_checkpoint: Callable[..., None]) -> None:
    price()
    before = list_cost_records()
    for again in range(3):  # in the first month, the second, the third
        costs.reset_costs()
        if again:
            Unpriced.objects.filter(day__lt=parse_day(f"2026-{9 + again:02}-01")).delete()

        def die() -> None:
            raise SimulatedCrash

        at_checkpoint(step, die)
        with pytest.raises(SimulatedCrash):
            price()
        Unpriced.note(UsageRecord.objects.values_list("day", flat=True))
        price()
        assert list_cost_records() == before


@pytest.mark.usefixtures("a_quarter")
def test_only_changed_records_are_written() -> None:
    price()
    known = {*CostRecord.objects.values_list("pk", flat=True)}
    create_time_usage("2026-11-20T10:00", agent="did:plc:new", provider="docker")
    assert costs.price_usage(now=NOW) == {"written": 1}
    assert known < {*CostRecord.objects.values_list("pk", flat=True)}


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("a_quarter")
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
    """From the facts: a sandbox that waits for half an hour after its exec, at 2 USD an hour."""
    create_rate("time", "2", provider="memory", since="2026-01-01")
    held = grant()
    execution.exec_command(held.pk, Command(["true"], timedelta(seconds=5)), now=NOW)
    metering.meter_usage(now=NOW + HOUR / 2)
    price()
    (lasted,) = totals.sum_sandbox_time("lease").values()
    assert timedelta(minutes=29) < lasted <= HOUR / 2
    assert total(holder=held.pk) == pricing.round_half_up(Fraction(lasted // timedelta(microseconds=1), 3600 * 10**6) * 2)


# --- against an independent computation -------------------------------------------------------------------------------

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
    known = {parse_utc("2020-01-01"): first} | {begin + timedelta(microseconds=when): change for when, change in changes}
    for when, (usd, allowance) in known.items():
        create_rate("memory", str(usd), valid_from=when, allowance=allowance)
    for start, lasts, agent, (millicpus, memory) in spans:
        create_time_usage(
            begin + timedelta(microseconds=start), timedelta(microseconds=lasts), agent, provider="acme", millicpus=millicpus,
            memory_mib=memory,
        )  # fmt: skip
        price()  # each time, as it comes
    moves = {(agent, begin.date() + number * DAY): account for number, agent, account in moved}
    for (agent, since), account in moves.items():
        join_account(account, str(since), agent)
        price()
    expected = plainly(begin, spans, known, moves)
    found: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for when, account, usd in list_cost_values("day", "account__name", "usd"):
        found[f"{when:%Y-%m}", account] += Fraction(usd)
    lines_in = CostRecord.objects.count()
    for month in {*expected, *found}:
        assert abs(expected[month] - found[month]) <= Fraction(lines_in, 2 * 10**9)  # each line is rounded once
    for first in (None, begin.date(), begin.date() + 30 * DAY):
        by_hand: dict[str, timedelta] = defaultdict(timedelta)
        for row in UsageRecord.objects.filter(day__gte=first or date.min):
            by_hand[whose(moves, row.agent_did, row.day)] += row.ended_at - row.began_at
        assert totals.sum_sandbox_time("account", since=first) == by_hand
        for account in ("house", "team", "lab"):
            its = {"account": account, "since": first}
            assert sum(totals.sum_sandbox_time("day", **its).values(), timedelta(0)) == by_hand.get(account, timedelta(0))
            assert totals.sum_sandbox_time("account", **its) == {
                name: time_ for name, time_ in by_hand.items() if name == account
            }


def whose(moves: dict[tuple[str, date], str], agent: str, day: date) -> str:
    begun = [since for who, since in moves if who == agent and since <= day]
    return moves[agent, max(begun)] if begun else "house"


def plainly(
    begin: datetime, spans: list[Any], prices: dict[datetime, tuple[Decimal, Decimal]], moves: dict[tuple[str, date], str]
) -> dict[tuple[str, str], Fraction]:
    """GiB-hours in pieces that no midnight and no change of price is in, each at its price, in the order of days, rates and
    leases, until the allowance of its account is used up. By month and account."""
    cuts = sorted({*prices, *(datetime.combine(begin.date(), time(), UTC) + timedelta(days=n) for n in range(80))})
    pieces: dict[tuple[Any, ...], Fraction] = defaultdict(Fraction)
    for start, lasts, agent, (_, memory) in spans:
        began = begin + timedelta(microseconds=start)
        ended = began + timedelta(microseconds=lasts)
        edges = [began, *(cut for cut in cuts if began < cut < ended), ended]
        for a, b in pairwise(edges):
            since = max(when for when in prices if when <= a)
            hours = Fraction((b - a) // timedelta(microseconds=1), 3600 * 10**6)
            account = whose(moves, agent, a.date())
            pieces[a.date(), since, str(derive_lease_id(agent)) if agent else "", account] += hours * memory / 1024
    taken: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    paid: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for (when, since, _, account), used in sorted(pieces.items()):
        group, (usd, allowance) = (f"{when:%Y-%m}", account), prices[since]
        free = min(max(Fraction(allowance) - taken[group], Fraction(0)), used)
        taken[group] += free
        paid[group] += (used - free) * Fraction(usd)
    return paid
