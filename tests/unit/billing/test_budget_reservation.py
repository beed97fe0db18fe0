"""Reservation of a hard budget: its sandboxes are stopped, and starts are refused, before the amount is exceeded."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing import budgets
from billing.dates import EPOCH
from billing.errors import BudgetExhausted
from billing.models import Account, Budget, CostRecord, Membership, Watermark
from leases.models import Lease
from sandboxes.models import Sandbox
from tests.conftest import MINUTE, NOW
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    create_budget,
    create_rate,
    expect_refusal,
    get_lease_end,
    list_budget_events,
    run_billing_sweeps,
    run_command,
    start_run,
)

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("stopped_clock"),
    pytest.mark.postgres("budgets: sums and locks"),
]
NO_GRACE = timedelta(0)


@pytest.fixture
def acquire(grant: Callable[..., Lease], memory: Any) -> Callable[..., Lease]:
    return lambda agent=ADA: grant(agent, now=NOW, ttl=20 * HOUR, sleep_after=20 * HOUR)


@pytest.mark.parametrize(
    ("unit", "grace", "reserved"),
    [
        ("usd", NO_GRACE, "0.04"),  # 2 x 1.20 USD / 60: the minute until the next pass
        ("usd", 5 * MINUTE, "0.28"),  # 2 x 1.20 USD x 7 / 60: a pass, the grace period, and the pass after it
        ("hours", NO_GRACE, "0.033333333"),  # 2 / 60
    ],
)
def test_running_sandboxes_reserve_the_time_until_they_can_be_stopped(acquire, unit, grace, reserved) -> None:
    create_rate("time", "1.2", "2021-01-01", provider="memory")
    budget, other = create_budget(5, unit, grace=grace), create_budget(5, unit, hard=False)
    for agent in (ADA, BOB):
        run_command(acquire(agent))
    run_billing_sweeps(NOW)
    assert budgets.compute_reservation(budget, now=NOW) == Decimal(reserved)
    assert budgets.compute_reservation(other, now=NOW) == 0


def test_requested_disk_and_gpus_are_reserved(acquire) -> None:
    """One minute of 10,000 MiB (10.486 GB) at 0.6 USD and of two GPUs at 3 USD an hour: 12.2916 / 60."""
    for item, usd, kind in (("disk", "0.6", ""), ("gpu", "3", "H100")):
        create_rate(item, usd, "2021-01-01", provider="memory", instance_type=kind)
    budget = create_budget(5, "usd", grace=NO_GRACE)
    run_command(acquire())
    Sandbox.objects.update(disk_mib=10_000, gpus=2, gpu_type="H100")
    run_billing_sweeps(NOW)
    assert budgets.compute_reservation(budget, now=NOW) == Decimal("0.204860000")


def test_time_that_is_not_metered_yet_is_reserved_within_the_period_only(acquire) -> None:
    daily, hourly = create_budget(1, grace=NO_GRACE), create_budget(1, period="hour", grace=NO_GRACE)
    run_command(acquire())
    run_billing_sweeps(NOW)
    daily.refresh_from_db(), hourly.refresh_from_db()

    def reserve(budget: Budget, after: timedelta) -> float:
        return round(float(budgets.compute_reservation(budget, now=NOW + after)) * 60, 6)

    assert reserve(daily, 2 * MINUTE) == 4  # minutes: from the last metering, at the latest a minute before the sum at NOW
    assert reserve(hourly, 2 * MINUTE) == 3  # from NOW, the start of the hour
    assert reserve(hourly, HOUR - MINUTE / 2) == 60  # until the end of the hour


def test_a_membership_before_the_first_pricing_pass_reserves_no_past_time(acquire) -> None:
    """The membership locks the watermark of the costs, which no pass has advanced yet."""
    create_rate("time", "1.2", "2021-01-01", provider="memory")
    budget = create_budget(5, "usd", period="month", grace=NO_GRACE)
    Membership.objects.create(agent_did=ADA, account=Account.objects.create(name="team"))
    assert Watermark.objects.get(name="costs").at == EPOCH
    run_command(acquire())
    assert budgets.compute_reservation(budget, now=NOW) == Decimal("0.02")  # the minute until the next pass


def test_small_budget_is_not_exceeded_by_sandbox_time(acquire) -> None:
    """Two sandboxes at 0.1612 USD an hour spent 197 % of 0.03 USD when the grace period began at 100 %."""
    create_rate("time", "0.1612", "2021-01-01", provider="memory")
    create_budget("0.03", "usd", grace=5 * MINUTE)
    leases = [acquire(agent) for agent in (ADA, BOB)]
    refused = 0
    for lease in leases:
        try:
            start_run(lease)
        except BudgetExhausted:
            refused += 1
    for minute in range(20):
        run_billing_sweeps(NOW + minute * MINUTE)
    spent = sum(CostRecord.objects.values_list("usd", flat=True))
    assert (
        round(100 * spent / Decimal("0.03")) == 90
    )  # 10 minutes of the first: 4 until 7 more do not fit, then the grace period
    assert (refused, get_lease_end(leases[0])) == (1, ("expired", "budget"))


def test_sandbox_whose_first_interval_does_not_fit_is_not_started(acquire) -> None:
    create_rate("time", "1.2", "2021-01-01", provider="memory")
    lease = acquire()
    create_budget("0.139", "usd", grace=5 * MINUTE)  # 7 minutes cost 0.14 USD
    with expect_refusal(spent="0", limit="0.139") as caught:
        run_command(lease)
    assert "0.14 needed until this and other running sandboxes can be stopped (7 minutes" in str(caught.value)
    assert not Sandbox.objects.exists()
    assert run_billing_sweeps(NOW).get("leases ended") is None
    Budget.objects.update(amount=Decimal("0.14"))
    assert run_command(lease) == b""


def test_lease_ends_before_its_budget_is_exceeded_and_says_so(acquire) -> None:
    lease = acquire()
    budget = create_budget("0.05", grace=NO_GRACE, warn_percents=[80])  # 3 minutes
    start_run(lease)
    for minute in range(4):
        run_billing_sweeps(NOW + minute * MINUTE)
    budget.refresh_from_db()
    lease.refresh_from_db()
    assert (lease.end_reason, budget.spent) == ("budget", Decimal("0.05"))
    assert list_budget_events() == ["exhausted", "warning"]


def test_end_of_a_lease_names_the_interval_that_does_not_fit(acquire) -> None:
    lease = acquire()
    budget = create_budget("0.058333", grace=NO_GRACE)  # 3.5 minutes: the fourth does not fit
    start_run(lease)
    for minute in range(4):
        run_billing_sweeps(NOW + minute * MINUTE)
    lease.refresh_from_db()
    assert lease.end_detail == f"{budget}: would be exceeded within the next minute"
    assert "budget.exhausted" not in list_budget_events()


def test_reservation_takes_the_same_queries_for_any_number_of_sandboxes(acquire) -> None:
    create_rate("time", "1.2", "2021-01-01", provider="memory")
    budget = create_budget(5, "usd")
    numbers = []
    for agents in (1, 4):
        for number in range(agents):
            run_command(acquire(f"did:plc:n{agents}-{number}"))
        with CaptureQueriesContext(
            connection,
        ) as queries:
            budgets.compute_reservation(budget, now=NOW)
        numbers.append(len(queries))
    assert numbers[0] == numbers[1] <= 3
