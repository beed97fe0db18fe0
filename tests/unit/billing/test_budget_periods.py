"""Periods of budgets in time zones: bounds, clock changes, and sums across the edges of UTC days."""

import random
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ValidationError

from billing import budgets, costs, metering
from billing.budgets import call_admission
from billing.models import Budget
from sandboxes.models import LlmCall
from tests.conftest import MINUTE, NOW
from tests.support.billing import ADA, HOUR, create_budget, create_rate, create_time_usage
from tests.support.search import budget as search_budget

SEEDS = search_budget(fast=1, full=6)
STEP = timedelta(seconds=36)  # a hundredth of an hour, so that amounts are exact
DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("period", "zone", "now", "began", "ends"),
    [
        ("week", "UTC", "2026-11-21T12:00Z", "2026-11-16T00:00Z", "2026-11-23T00:00Z"),
        ("week", "UTC", "2026-11-22T23:59:59.999999Z", "2026-11-16T00:00Z", "2026-11-23T00:00Z"),
        ("week", "UTC", "2027-01-01T00:00Z", "2026-12-28T00:00Z", "2027-01-04T00:00Z"),
        ("hour", "Asia/Kolkata", "2026-11-21T12:40Z", "2026-11-21T12:00Z", "2026-11-21T13:00Z"),
        ("ever", "Asia/Kolkata", "2026-11-21T12:40Z", "1970-01-01T00:00Z", None),
        ("day", "Europe/Berlin", "2026-11-21T22:59Z", "2026-11-20T23:00Z", "2026-11-21T23:00Z"),
        ("day", "Europe/Berlin", "2026-11-21T23:00Z", "2026-11-21T23:00Z", "2026-11-22T23:00Z"),
        ("day", "Europe/Berlin", "2026-03-29T12:00Z", "2026-03-28T23:00Z", "2026-03-29T22:00Z"),  # 23 hours
        ("day", "Europe/Berlin", "2026-10-25T12:00Z", "2026-10-24T22:00Z", "2026-10-25T23:00Z"),  # 25 hours
        ("week", "Europe/Berlin", "2026-10-25T12:00Z", "2026-10-18T22:00Z", "2026-10-25T23:00Z"),
        ("month", "America/New_York", "2026-03-01T04:59Z", "2026-02-01T05:00Z", "2026-03-01T05:00Z"),
        ("month", "America/New_York", "2026-03-01T05:00Z", "2026-03-01T05:00Z", "2026-04-01T04:00Z"),
        # Offsets of 5:30 and 5:45 hours: the full UTC hour in which local midnight falls.
        ("day", "Asia/Kolkata", "2026-11-21T17:59Z", "2026-11-20T18:00Z", "2026-11-21T18:00Z"),
        ("day", "Asia/Kolkata", "2026-11-21T18:10Z", "2026-11-21T18:00Z", "2026-11-22T18:00Z"),  # 23:40 local time
        ("day", "Asia/Kathmandu", "2026-11-21T18:00Z", "2026-11-21T18:00Z", "2026-11-22T18:00Z"),
        ("week", "Asia/Kolkata", "2026-11-22T18:10Z", "2026-11-22T18:00Z", "2026-11-29T18:00Z"),
        ("month", "Asia/Kolkata", "2026-11-30T18:10Z", "2026-11-30T18:00Z", "2026-12-31T18:00Z"),
        # Midnight does not exist, occurs twice, and a whole day was skipped.
        ("day", "Africa/Cairo", "2026-04-24T12:00Z", "2026-04-23T22:00Z", "2026-04-24T21:00Z"),
        ("day", "America/Havana", "2026-11-01T05:30Z", "2026-11-01T04:00Z", "2026-11-02T05:00Z"),
        ("day", "Pacific/Apia", "2011-12-30T10:30Z", "2011-12-30T10:00Z", "2011-12-31T10:00Z"),
    ],
)  # fmt: skip
def test_period_begins_with_the_hour_of_local_midnight(period: str, zone: str, now: str, began: str, ends: str | None) -> None:
    bounds = (datetime.fromisoformat(began), datetime.fromisoformat(ends) if ends else None)
    assert budgets.compute_period_bounds(period, datetime.fromisoformat(now), zone) == bounds


def name_period(period: str, hour: datetime, zone: str) -> Any:
    """Return the period that a full UTC hour belongs to: that of the local date at its end."""
    day: date = (hour + HOUR - timedelta(microseconds=1)).astimezone(ZoneInfo(zone)).date()
    return {"day": day, "week": day.isocalendar()[:2], "month": (day.year, day.month)}[period]


def truncate(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)


CASES = [
    ("day", "Europe/Berlin", "2026-10-25T12:34Z"), ("week", "Asia/Kathmandu", "2026-11-18T17:20Z"),
    ("month", "America/New_York", "2026-03-31T23:50Z"), ("day", "Australia/Lord_Howe", "2026-04-05T01:10Z"),
    ("week", "America/Havana", "2026-11-02T03:40Z"), ("month", "Asia/Kolkata", "2026-11-21T12:10Z"),
]  # fmt: skip


@pytest.mark.django_db
@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.postgres("budgets: sums and locks")
@pytest.mark.parametrize(("period", "zone", "at"), CASES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_sum_in_a_zone_is_the_sum_of_its_hours(period: str, zone: str, at: str, seed: int) -> None:
    """Sandbox time, and model calls in every stage, at random times around the bounds of the period."""
    rng, now = random.Random(f"{period} {zone} {seed}"), datetime.fromisoformat(at)
    create_rate("time", "1")
    by_hours = create_budget(1000, "hours", period, time_zone=zone, now=now)
    by_usd = create_budget(1000, "usd", period, time_zone=zone, now=now)
    bounds = [bound for bound in budgets.get_period_bounds(by_usd, now) if bound and bound < now]
    current = name_period(period, truncate(now), zone)
    hours, calls = 0, Decimal(0)
    for _ in range(30):
        began = truncate(rng.choice([*bounds, now, now - DAY])) + rng.randrange(-3000, 3000) * STEP
        lasts = rng.randrange(1, 3000)
        if began + lasts * STEP > now:
            continue
        create_time_usage(began, lasts * STEP, provider="acme")
        steps = (began + number * STEP for number in range(lasts))
        hours += sum(name_period(period, truncate(step), zone) == current for step in steps)
        cost = Decimal(rng.randrange(10**6)).scaleb(-6)
        counts = name_period(period, truncate(began), zone) == current
        create_call(began, cost)
        calls += cost if counts else 0
    metering.meter_usage(now=now)
    costs.price_usage(now=now)
    for budget in (by_hours, by_usd):
        budgets.update_spending(budget.pk, now=now)
        budget.refresh_from_db()
    assert by_hours.spent == Decimal(hours) / 100
    assert by_usd.spent == Decimal(hours) / 100 + calls
    create_call(bounds[0] - MINUTE, Decimal(5))  # of the period before
    for number in range(10):  # calls since the last update, of which some are metered
        began = max(bounds[0], now - rng.randrange(1, 20) * HOUR) if number else now - STEP
        if to_day(began) == to_day(now):  # an earlier day counts from the next update on
            create_call(began, Decimal("0.25"))
            calls += Decimal("0.25")
        if number == 5:
            metering.meter_usage(now=now)
    assert call_admission.sum_spent_now(by_usd, now=now) == Decimal(hours) / 100 + calls


def to_day(at: datetime) -> date:
    return at.astimezone(UTC).date()


def create_call(started_at: datetime, cost: Decimal) -> None:
    LlmCall.objects.create(
        call_id=uuid.uuid4().hex, holder=uuid.UUID(int=7), agent_did=ADA, model="m", started_at=started_at, cost=cost,
        priced="upstream", outcome="ok", deadline_at=started_at, ended_at=started_at,
    )  # fmt: skip


@pytest.mark.django_db
@pytest.mark.usefixtures("stopped_clock")
def test_budget_resets_at_midnight_of_its_zone(grant: Callable[..., Any]) -> None:
    budget = create_budget(1, "hours", time_zone="America/New_York", scope="agent", subject=ADA)
    create_time_usage(NOW - 2 * HOUR, 2 * HOUR)
    assert budgets.update_spending(budget.pk, now=NOW) == ["warned", "exhausted"]
    midnight = datetime(2026, 11, 22, 5, tzinfo=UTC)
    assert len(budgets.find_exhausted(now=midnight - MINUTE)) == 1
    assert Budget.objects.filter(budgets.build_marked_filter("exhausted_for", midnight - MINUTE)).count() == 1
    assert not budgets.find_exhausted(now=midnight)
    assert not Budget.objects.filter(budgets.build_marked_filter("exhausted_for", midnight)).exists()


@pytest.mark.django_db
@pytest.mark.parametrize("zone", ["", "Berlin", "europe/berlin", "../etc/passwd", "UTC\0"])
def test_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(ValidationError) as caught:
        create_budget(1, time_zone=zone)
    assert "time_zone" in caught.value.message_dict
