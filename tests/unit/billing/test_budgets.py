"""Budgets: periods, scopes, threshold events and changes by operators."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from billing import budgets, costs, metering
from billing.models import Account, Budget, Membership
from leases import budget_enforcement, leasing
from sandboxes.models import Event
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    create_budget,
    create_llm_call,
    create_rate,
    create_time_usage,
    expect_refusal,
    get_lease_end,
    get_rounded_spending,
    join_account,
    list_budget_events,
    parse_utc,
    run_billing_sweeps,
    run_command,
)

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("stopped_clock"),
    pytest.mark.postgres("budgets: sums and locks"),
]
AnyCallable = Callable[..., Any]
DAY = timedelta(days=1)
MIDNIGHT = datetime(2026, 11, 22, tzinfo=UTC)


# --- periods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "now", "began", "ends"),
    [
        ("hour", "2026-11-21T12:00Z", "2026-11-21T12:00", "2026-11-21T13:00"),
        ("hour", "2026-11-21T23:59:59.999999Z", "2026-11-21T23:00", "2026-11-22T00:00"),
        ("hour", "2026-11-22T00:29+05:30", "2026-11-21T18:00", "2026-11-21T19:00"),
        ("ever", "2026-11-21T12:00Z", "1970-01-01", None), ("day", "2026-11-21T12:00Z", "2026-11-21", "2026-11-22"),
        ("day", "2026-11-21T23:59:59.999999Z", "2026-11-21", "2026-11-22"),
        ("day", "2026-11-22T00:00Z", "2026-11-22", "2026-11-23"), ("day", "2026-11-22T00:30+01:00", "2026-11-21", "2026-11-22"),
        ("day", "2028-02-28T12:00Z", "2028-02-28", "2028-02-29"), ("day", "2027-02-28T12:00Z", "2027-02-28", "2027-03-01"),
        ("month", "2028-02-29T23:59Z", "2028-02-01", "2028-03-01"), ("month", "2026-12-31T23:59Z", "2026-12-01", "2027-01-01"),
        ("month", "2027-01-01T00:30+02:00", "2026-12-01", "2027-01-01"),
        ("month", "2027-01-31T00:00Z", "2027-01-01", "2027-02-01"),
    ],
)  # fmt: skip
def test_periods_are_utc_hours_days_and_months(period: str, now: str, began: str, ends: str | None) -> None:
    def at(text: str) -> datetime:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)

    assert budgets.compute_period_bounds(period, datetime.fromisoformat(now)) == (at(began), at(ends) if ends else None)


def test_hourly_budget_counts_its_own_hour_and_admits_again_in_the_next(grant: AnyCallable) -> None:
    budget = create_budget("0.5", period="hour")
    create_time_usage(NOW - MINUTE * 50, MINUTE * 80)  # 50 minutes in the hour before, 30 in this one
    assert budgets.update_spending(budget.pk, now=NOW + 40 * MINUTE) == ["warned", "exhausted"]
    budget.refresh_from_db()
    assert (budget.spent, budget.period_began, str(budget)) == (Decimal("0.5"), NOW, "0.5 hours an hour for everything")
    with expect_refusal():
        grant(now=NOW + 59 * MINUTE)
    grant(now=NOW + HOUR)
    assert budgets.update_spending(budget.pk, now=NOW + HOUR) == ["reopened"]
    assert budgets.get_spent(Budget.objects.get(), NOW + HOUR) == 0
    create_time_usage(NOW + HOUR, 30 * MINUTE)
    assert budgets.update_spending(budget.pk, now=NOW + HOUR + 40 * MINUTE) == ["warned", "exhausted"]
    assert list_budget_events().count("exhausted") == 2  # each hour has its own


@pytest.mark.parametrize(
    ("scope", "subject", "usd"),
    [("all", "", "3.5"), ("agent", ADA, "2.5"), ("agent", BOB, "1"), ("account", "team", "1"), ("account", "house", "2.5")],
)
def test_hourly_usd_budget_prices_usage_and_calls_of_its_hour(grant: AnyCallable, scope: str, subject: str, usd: str) -> None:
    create_rate("time", "1", allowance=Decimal(100)), create_rate("time", "2", "2026-11-21T12:30")
    join_account("team", "2026-11-01", agent=BOB)
    create_time_usage(NOW - HOUR, 2 * HOUR, ADA, provider="acme")  # in this hour 0.5 x 1 + 0.5 x 2 USD
    create_time_usage(NOW + HOUR / 2, HOUR / 2, BOB, provider="acme")
    lease = grant()
    create_llm_call(lease, cost=Decimal(1), started_at=NOW + MINUTE, ended_at=NOW + 2 * MINUTE)
    create_llm_call(lease, cost=Decimal(8), started_at=NOW - MINUTE, ended_at=NOW + MINUTE)
    budget = create_budget(100, "usd", "hour", scope=scope, subject=subject)
    budgets.update_spending(budget.pk, now=NOW + HOUR - MINUTE)
    assert budgets.get_spent(Budget.objects.get(), NOW + HOUR - MINUTE) == Decimal(usd)


def test_daily_budget_resets_at_midnight_before_the_next_sweep(used_lease: AnyCallable, grant: AnyCallable) -> None:
    lease, budget = used_lease(), create_budget(1)
    run_billing_sweeps(NOW)
    assert get_lease_end(lease) == ("expired", "budget")
    with expect_refusal(resets_at=MIDNIGHT, spent="1", limit="1", unit="hours"):
        grant(now=MIDNIGHT - timedelta(seconds=1))
    again = grant(now=MIDNIGHT)
    run_command(again, now=MIDNIGHT)
    assert run_billing_sweeps(MIDNIGHT + MINUTE) == {"budgets reopened": 1}
    assert get_rounded_spending(budget) == Decimal("0.017")


def test_monthly_and_daily_sums_across_a_leap_day(grant: AnyCallable, memory: Any) -> None:
    began = datetime(2028, 2, 28, 22, tzinfo=UTC)
    lease = grant(now=began, sleep_after=DAY)
    run_command(lease, now=began)
    month, day = create_budget(100, period="month", now=began), create_budget(100, now=began)
    leap = datetime(2028, 2, 29, 1, tzinfo=UTC)
    run_billing_sweeps(leap)
    assert (get_rounded_spending(month), get_rounded_spending(day)) == (3, 1)
    march = datetime(2028, 3, 1, 1, tzinfo=UTC)
    run_command(grant(environment="e2", now=march - 2 * HOUR, sleep_after=DAY), now=march - 2 * HOUR)
    leasing.release(lease.pk, now=leap)
    run_billing_sweeps(march)
    assert (get_rounded_spending(month), get_rounded_spending(day)) == (1, 1)


def test_lifetime_budget_stays_exhausted(used_lease: AnyCallable, grant: AnyCallable) -> None:
    used_lease(), create_budget(1, period="ever")
    run_billing_sweeps(NOW)
    with expect_refusal(resets_at=None):
        grant(environment="e2", now=NOW + 400 * DAY)


# --- scopes -----------------------------------------------------------------------------------------------------------


def test_each_scope_counts_its_own_time(used_lease: AnyCallable, pool: Any) -> None:
    crew = Account.objects.create(name="crew")
    Membership.objects.create(agent_did=BOB, account=crew)
    for number, (agent, kind, key) in enumerate([(ADA, "catan", "7"), (ADA, "rpg", ""), (BOB, "rpg", "8"), (BOB, "catan", "")]):
        used_lease(agent, f"e{number}", hours=2**number, environment_type=kind, key_id=key)
    expected = {
        ("all", ""): 15, ("agent", ADA): 3, ("agent", BOB): 12, ("agent", "did:plc:eve"): 0, ("environment_type", "catan"): 9,
        ("environment_type", "rpg"): 6, ("key", "7"): 1, ("key", "8"): 4, ("key", "9"): 0, ("account", "crew"): 12,
        ("account", "house"): 3,
    }  # fmt: skip
    rows = {key: create_budget(100, scope=key[0], subject=key[1]) for key in expected}
    run_billing_sweeps(NOW)
    assert {key: round(get_rounded_spending(budget)) for key, budget in rows.items()} == expected


@pytest.mark.parametrize("unit", ["hours", "usd"])
def test_usage_before_a_move_counts_for_the_old_account(unit: str) -> None:
    create_rate("time", "1")
    for when in ("2026-10-31", "2026-11-01", "2026-11-10", "2026-11-14", "2026-11-15", "2026-11-20"):
        create_time_usage(f"{when}T10:00", provider="acme")
    create_time_usage("2026-11-14T10:00", agent="", provider="acme")
    create_time_usage("2026-11-15T00:00", 8 * HOUR, BOB, provider="acme")
    join_account("crew", "2026-11-01"), join_account("lab", "2026-11-15"), join_account("crew", "2026-11-20")
    kinds = [(name, period) for name in ("house", "crew", "lab") for period in ("month", "ever")]
    rows = {kind: create_budget(100, unit, kind[1], scope="account", subject=kind[0]) for kind in kinds}
    run_billing_sweeps(NOW)
    assert {kind: get_rounded_spending(each) for kind, each in rows.items()} == {
        ("house", "month"): 9, ("crew", "month"): 4, ("lab", "month"): 1,
        ("house", "ever"): 10, ("crew", "ever"): 4, ("lab", "ever"): 1,
    }  # fmt: skip
    by_day = budgets.sum_spending_by_day(rows["crew", "month"], parse_utc("2026-11-01"), None)
    assert {day.day: sums.total for day, sums in by_day.items()} == {1: 1, 10: 1, 14: 1, 20: 1}


def test_account_budget_refuses_and_ends_leases_of_present_members(used_lease: AnyCallable, grant: AnyCallable) -> None:
    """Ada moves to the lab tomorrow. Until then the crew's budget applies to her, although Bob alone has spent it."""
    lease, other = used_lease(), used_lease(BOB, "e2")
    join_account("crew", agent=BOB), join_account("crew"), join_account("lab", "2026-11-22")
    crew = create_budget(2, scope="account", subject="crew", period="ever")
    lab = create_budget(3, scope="account", subject="lab", period="ever", grace=HOUR)
    late = MIDNIGHT - timedelta(microseconds=1)

    metering.meter_usage(now=NOW)
    assert budgets.update_spending(crew.pk, now=NOW) == ["warned", "exhausted"]
    over_budget = [budget_enforcement.find_leases_over_budget(now=when) for when in (late, MIDNIGHT)]
    assert [{*leases} & {lease.pk, other.pk} for leases in over_budget] == [{lease.pk, other.pk}, {other.pk}]
    with expect_refusal(limit="2"):
        grant(environment="e3", now=late)
    with expect_refusal(limit="2"):
        budgets.require_budget(lease.pk, now=late)
    budgets.require_budget(lease.pk, now=MIDNIGHT)
    grant(environment="e3", now=MIDNIGHT)
    with expect_refusal(limit="2"):
        grant(BOB, "e4", now=MIDNIGHT)
    assert [tab.holder for tab, _ in budgets.find_top_spenders(crew, now=MIDNIGHT, limit=9)] == [other.pk]
    assert {tab.holder for tab, _ in budgets.find_top_spenders(lab, now=MIDNIGHT, limit=9)} >= {lease.pk}


def test_top_spenders_of_an_account_count_only_its_days(used_lease: AnyCallable) -> None:
    lease = used_lease(hours=3)
    create_llm_call(lease, cost=Decimal("0.25"))
    join_account("crew"), join_account("lab", "2026-11-22")
    metering.meter_usage(now=MIDNIGHT + 2 * HOUR)
    costs.price_usage(now=MIDNIGHT + 2 * HOUR)
    spending = {}
    for account in ("crew", "lab"):
        for unit in ("hours", "usd"):
            budget = create_budget(100, unit, "ever", scope="account", subject=account, now=MIDNIGHT + 2 * HOUR)
            spenders = budgets.find_top_spenders(budget, now=MIDNIGHT + 2 * HOUR, limit=9)
            spending[account, unit] = budget.spent, [(tab.holder, amount) for tab, amount in spenders]
    assert spending == {
        ("crew", "hours"): (15, []), ("crew", "usd"): (Decimal("0.25"), []),
        ("lab", "hours"): (2, [(lease.pk, 2)]), ("lab", "usd"): (0, [(lease.pk, 0)]),
    }  # fmt: skip


def test_agent_that_left_an_account_counts_for_the_house_account(used_lease: AnyCallable) -> None:
    lease = used_lease()
    join_account("crew"), join_account("house", "2026-11-21")
    house, crew = create_budget(9, scope="account", subject="house"), create_budget(9, scope="account", subject="crew")
    run_billing_sweeps(NOW)
    assert (get_rounded_spending(house), get_rounded_spending(crew)) == (1, 0)
    assert [budgets.find_open_tabs(each, now=NOW).count() for each in (house, crew)] == [1, 0]
    assert [budgets.find_open_tabs(each, now=NOW - DAY).count() for each in (house, crew)] == [0, 1]
    assert budgets.find_open_tabs(house, now=NOW).get().holder == lease.pk


@pytest.mark.parametrize("period", ["hour", "day", "month", "ever"])
def test_usd_budget_names_the_estimated_part_and_the_unpriced_calls(grant: AnyCallable, period: str) -> None:
    lease, at = grant(), {"started_at": NOW + MINUTE, "ended_at": NOW + 2 * MINUTE}
    create_llm_call(lease, cost=Decimal(1), **at)
    create_llm_call(lease, cost=Decimal("0.25"), priced="estimate", **at)
    for _ in range(5):
        create_llm_call(lease, cost=None, priced="", **at)
    create_llm_call(lease, cost=None, priced="", outcome="refused", **at)
    hours = create_budget(100, "hours", period)
    usd = create_budget(100, "usd", period)
    run_billing_sweeps(NOW + 3 * MINUTE)
    usd.refresh_from_db(), hours.refresh_from_db()
    assert (usd.spent, budgets.get_uncertainty(usd, NOW + 3 * MINUTE)) == (Decimal("1.25"), (5, Decimal("0.25"), 0))
    assert budgets.get_uncertainty(hours, NOW + 3 * MINUTE) == (0, 0, 0)
    later = NOW + timedelta(days=40)
    assert budgets.get_uncertainty(usd, later) == ((5, Decimal("0.25"), 0) if period == "ever" else (0, 0, 0))


def test_hourly_usd_budget_counts_the_reservation_of_an_open_call_as_estimated(grant: AnyCallable) -> None:
    create_llm_call(grant(), cost=None, priced="", reserved=Decimal(2), outcome="open", ended_at=None)
    budget = create_budget(100, "usd", "hour")
    assert (budget.spent, budgets.get_uncertainty(budget, NOW)) == (2, (0, 2, 0))


def test_usd_budget_counts_costs_exactly(grant: AnyCallable) -> None:
    lease = grant()
    create_llm_call(lease, cost=Decimal("1.250000001"))
    create_llm_call(grant("did:plc:bob", "e2"), cost=Decimal("0.5"))
    every, ada = create_budget("1.76", "usd", "month"), create_budget("1.25", "usd", "ever", scope="agent", subject=ADA)
    run_billing_sweeps(NOW)
    assert (get_rounded_spending(every), ada.spent) == (Decimal("1.750"), 0)
    ada.refresh_from_db()
    assert (ada.spent, ada.exhausted_at) == (Decimal("1.250000001"), NOW)
    with expect_refusal(spent="1.250000001", limit="1.25", unit="usd"):
        grant(environment="e3")
    assert get_lease_end(lease)[0] == "expired"
    with expect_refusal(limit="1.76"):  # Bob's lease and this one reserve a cent each
        grant("did:plc:bob", "e3")


def test_cold_and_warming_time_is_not_counted(grant: AnyCallable, memory: Any) -> None:
    lease = grant(now=NOW - 3 * HOUR, ttl=20 * HOUR, sleep_after=HOUR)
    run_command(lease, now=NOW - 3 * HOUR)
    passes.evict_idle(now=NOW - 2 * HOUR)
    budget = create_budget(9)
    run_billing_sweeps(NOW)
    assert get_rounded_spending(budget) == 1


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_fields", [{"subject": BOB}, {"scope": "all", "subject": ""}, {"period": "month"}])
def test_budget_with_a_changed_scope_or_period_sends_new_events(new_fields: dict[str, str]) -> None:
    now = datetime(2026, 11, 1, 12, tzinfo=UTC)  # the first day of a month
    create_time_usage(now - HOUR, agent=ADA), create_time_usage(now - HOUR, agent=BOB)
    budget = create_budget(1, scope="agent", subject=ADA, now=now)
    for minutes in (1, 2):
        budgets.change_budget(budget.pk, new_fields, now=now + minutes * MINUTE)
    events = Event.objects.filter(kind="budget.exhausted").order_by("at")
    names = ["subject", "period", "scope"]
    old_fields = {"subject": ADA, "period": "day", "scope": "agent"}
    assert [{name: each.payload[name] for name in names} for each in events] == [old_fields, old_fields | new_fields]


def test_late_sum_does_not_reopen_an_exhausted_budget(used_lease: AnyCallable, at_checkpoint: AnyCallable) -> None:
    used_lease()
    budget = create_budget(1, period="ever")

    def rival() -> None:
        metering.meter_usage(now=NOW)
        assert budgets.update_spending(budget.pk, now=NOW + MINUTE) == ["warned", "exhausted"]

    at_checkpoint("budget summed", rival)
    assert budgets.update_spending(budget.pk, now=NOW) == []
    budget.refresh_from_db()
    assert (budget.spent, budget.exhausted_at) == (1, NOW + MINUTE)


# --- operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"amount": 0}, "amount"), ({"amount": -1}, "amount"), ({"scope": "agent"}, "__all__"), ({"subject": ADA}, "__all__"),
        ({"scope": "key", "subject": "ab"}, "subject"), ({"warn_percents": [0]}, "warn_percents"),
        ({"warn_percents": [101]}, "warn_percents"), ({"unit": "eur"}, "unit"), ({"period": "year"}, "period"),
        ({"scope": "team"}, "scope"), ({"grace": timedelta(seconds=-1)}, "__all__"),
    ],
)  # fmt: skip
def test_invalid_budget_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        create_budget(**fields)
    assert field in caught.value.message_dict
    assert not Budget.objects.exists()


def test_inactive_budget_has_no_effect(used_lease: AnyCallable, grant: AnyCallable) -> None:
    lease, budget = used_lease(), create_budget(1)
    counts = run_billing_sweeps(NOW)
    assert counts["leases ended"] == 1
    budgets.change_budget(budget.pk, {"active": False}, now=NOW)
    run_command(grant(environment="e2"))
    assert run_billing_sweeps(NOW + HOUR) == {}
    assert get_lease_end(lease)[0] == "expired"
