"""Costs of agents that move between accounts."""

from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from billing import costs, totals
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
    join_account,
    list_cost_values,
    parse_day,
)

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)
USD = Decimal


def price() -> None:
    costs.price_usage(now=NOW)


def sum_by_account() -> dict[str, tuple[Decimal, timedelta]]:
    """Return (USD, time) by account, after a check that totals by cost and by usage agree on the accounts."""
    sums = {each.key: (each.usd, each.sandbox_time or timedelta(0)) for each in totals.sum_costs("account")}
    assert {name: duration for name, (_, duration) in sums.items() if duration} == totals.sum_sandbox_time("account")
    for name, (_, duration) in sums.items():
        assert sum(totals.sum_sandbox_time("day", account=name).values(), timedelta(0)) == duration
    return sums


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
    assert sum_by_account() == {"team": (2, 12 * HOUR), "lab": (2, 12 * HOUR), "house": (0, 7 * HOUR)}


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
    assert sum_by_account() == {
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
    assert sum_by_account() == {"team": (10, 20 * HOUR), "lab": (0, 4 * HOUR)}
    move.delete()
    price()
    assert sum_by_account() == {"team": (14, 24 * HOUR)}


@pytest.mark.usefixtures("ten_free")
def test_agent_that_leaves_an_account_is_in_the_house_account_from_that_day() -> None:
    create_time_usage("2026-10-31T00:00", 48 * HOUR, provider="acme")
    join_account("team"), join_account("house", "2026-11-01")
    price()
    assert sum_by_account() == {"team": (14, 24 * HOUR), "house": (14, 24 * HOUR)}


def test_future_membership_changes_nothing_until_its_day() -> None:
    create_rate("time", "1")
    today = timezone.now().date()
    join_account("team"), join_account("lab", str(today + DAY))
    create_time_usage(datetime.combine(today, time(), UTC), provider="acme")
    price()
    assert [*sum_by_account()] == ["team"]
    create_time_usage(datetime.combine(today + DAY, time(), UTC), provider="acme")
    price()
    assert {*sum_by_account()} == {"team", "lab"}


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
    price()
    assert list_cost_values("account__name", "usd") == [("team", 1)]
