"""Budget admission: reservations at a grant, and refusal of work while a budget is exhausted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from billing import budgets, costs, derivation, horizon, metering
from billing.models import Budget, Tab, UsageRecord
from leases import execution, leasing, turns
from leases.models import Lease
from leases.projects import registry
from sandboxes import eviction
from sandboxes.models import Run, Sandbox
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    create_budget,
    expect_refusal,
    get_lease_end,
    get_rounded_spending,
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
AnyCallable = Callable[..., Any]
MIDNIGHT = datetime(2026, 11, 22, tzinfo=UTC)


# --- reservations at a grant ------------------------------------------------------------------------------------------


def test_grant_reserves_the_minimum_until_its_lease_ends(grant: AnyCallable, settings: Any) -> None:
    settings.MINIMUM_TIME = 6 * MINUTE
    create_budget(1)
    leases = [grant(environment=f"e{number}") for number in range(10)]
    with expect_refusal(spent="0", limit="1") as caught:
        grant(environment="e10")
    assert "1 reserved by active leases" in str(caught.value)
    assert (Lease.objects.count(), Tab.objects.count(), Sandbox.objects.count()) == (10, 10, 0)
    leasing.release(leases[0].pk, now=NOW)
    grant(environment="e10")
    assert Tab.objects.filter(closed_at=NOW).get().holder == leases[0].pk
    assert Tab.objects.filter(closed_at__isnull=True).count() == 10


def test_expired_lease_releases_its_reservation_for_the_next(grant: AnyCallable, settings: Any) -> None:
    settings.MINIMUM_TIME = HOUR
    create_budget(1)
    old = grant(ttl=MINUTE)
    with expect_refusal():
        grant(environment="e2", now=NOW + HOUR)
    new = grant(now=NOW + HOUR)
    assert (new != old, Tab.objects.get(holder=old.pk).closed_at) == (True, NOW + HOUR)


def test_refusal_names_only_the_strictest_budget(used_lease: AnyCallable, grant: AnyCallable) -> None:
    used_lease(BOB)
    create_budget(1), create_budget(1, period="month"), create_budget(1, hard=False)
    create_budget(1, period="ever", scope="agent", subject=BOB)
    run_billing_sweeps(NOW)
    with expect_refusal(resets_at=datetime(2026, 12, 1, tzinfo=UTC)) as caught:
        grant(ADA, "e2")
    assert str(caught.value) == (
        "No room in the budget of 1 hours a month for everything: 1 spent. Resets at 2026-12-01 00:00 UTC."
    )


def test_budget_out_of_scope_refuses_nothing(used_lease: AnyCallable, grant: AnyCallable) -> None:
    used_lease(BOB)
    for scope, subject in [("agent", BOB), ("key", "3"), ("environment_type", "rpg"), ("account", "crew"), ("project", "acme")]:
        create_budget("0.001", scope=scope, subject=subject)
    run_billing_sweeps(NOW)
    grant(ADA, key_id="4")
    for field in ({"key_id": "3"}, {"environment_type": "rpg"}, {"agent": BOB}):
        with expect_refusal():
            grant(**{"agent": ADA, "environment": "e2"} | field)


def test_budget_of_a_project_counts_the_leases_of_its_agents_only(used_lease: AnyCallable, grant: AnyCallable) -> None:
    acme, _ = registry.create("acme", now=NOW)
    registry.register_agents(acme.pk, [BOB, "did:plc:eve"], field="agents", now=NOW)
    create_budget(1, scope="project", subject="acme"), create_budget(2, scope="project", subject="default")
    used_lease(ADA, "e1"), used_lease(BOB, "e2")
    run_billing_sweeps(NOW)
    with expect_refusal():
        grant("did:plc:eve", "e3")
    assert Tab.objects.get(agent_did=BOB).project == "acme"
    assert grant("did:plc:carol", "e4")


def test_a_soft_budget_only_warns(used_lease: AnyCallable, grant: AnyCallable) -> None:
    lease, budget = used_lease(), create_budget("0.5", hard=False)
    assert run_billing_sweeps(NOW) == {"budgets warned": 1, "budgets exhausted": 1}
    assert (get_lease_end(lease)[0], list_budget_events()) == ("active", ["exhausted", "warning"])
    run_command(lease), grant(environment="e2")
    run_billing_sweeps(NOW + HOUR)
    assert (get_lease_end(lease)[0], get_rounded_spending(budget)) == ("active", 2)


@contextmanager
def capture_billing_sql() -> Iterator[list[str]]:
    """Collect the SQL statements on billing tables."""
    statements: list[str] = []
    with CaptureQueriesContext(connection) as caught:
        yield statements
    statements += [query["sql"] for query in caught if "billing_" in query["sql"]]


def test_query_counts_without_budgets(used_lease: AnyCallable, grant: AnyCallable) -> None:
    lease = used_lease()
    with capture_billing_sql() as captured:
        grant(environment="e2")
    assert [("billing_budget" in sql, "INSERT INTO billing_tab" in sql) for sql in captured] == [(True, False), (False, True)]
    with capture_billing_sql() as captured:
        run_command(lease)
    assert len(captured) == 1 and "LIMIT 1" in captured[0]
    with capture_billing_sql() as captured:
        leasing.renew(lease, now=NOW)
    assert captured == []
    with capture_billing_sql() as captured:
        leasing.release(lease.pk, now=NOW)
    assert [sql[:6] for sql in captured] == ["UPDATE"]


# --- refusal while exhausted ------------------------------------------------------------------------------------------


@pytest.fixture
def exhausted_lease(used_lease: AnyCallable) -> Lease:
    """A lease with an open run, within the grace period of its exhausted budget."""
    lease: Lease = used_lease()
    start_run(lease)
    create_budget(1, grace=HOUR, scope="agent", subject=ADA)
    assert run_billing_sweeps(NOW)["sandboxes in grace period"] == 1
    return lease


def test_new_work_is_refused_and_uses_no_turn_number(exhausted_lease: Lease, grant: AnyCallable) -> None:
    with expect_refusal(spent="1", limit="1", unit="hours", resets_at=MIDNIGHT) as caught:
        run_command(exhausted_lease)
    assert str(caught.value).startswith(f"No room in the budget of 1 hours a day for agent {ADA}: 1 spent. Resets at ")
    with expect_refusal():
        turns.take_turn(exhausted_lease.pk, 1, {}, now=NOW)
    with expect_refusal():
        execution.ensure_sandbox_ready(exhausted_lease.pk, now=NOW)
    assert exhausted_lease.turns.count() == 0
    leasing.renew(exhausted_lease, now=NOW)
    assert grant() == exhausted_lease
    run_command(grant(BOB, "e2"))


def test_files_are_writable_while_a_run_is_open_but_wake_no_sandbox(exhausted_lease: Lease, at_checkpoint: AnyCallable) -> None:
    file = Command(argv=["write"], timeout=MINUTE, kind="file")
    execution.call_in_sandbox(
        exhausted_lease.pk, file, lambda provider, sandbox: provider.write_file(sandbox.ref, "/workspace/g", b"1"), now=NOW
    )
    sandbox = Sandbox.objects.get()
    operations.close_run(Run.objects.get(ended_at=None), now=NOW, outcome=operations.RunOutcome.OK)
    eviction.evict(sandbox.pk, now=NOW, reason="idle")
    with expect_refusal():
        execution.call_in_sandbox(exhausted_lease.pk, file, lambda provider, sandbox: None, now=NOW)
    sandbox.refresh_from_db()
    assert sandbox.state == "cold"


def test_file_access_is_refused_after_the_grace_period(exhausted_lease: Lease, at_checkpoint: AnyCallable) -> None:
    touched: list[datetime] = []

    def read_file(now: datetime) -> None:
        file = Command(argv=["read"], timeout=MINUTE, kind="file")
        execution.call_in_sandbox(exhausted_lease.pk, file, lambda provider, sandbox: touched.append(now), now=now)

    def rival() -> None:
        with expect_refusal():
            read_file(NOW + HOUR)

    read_file(NOW + HOUR - MINUTE)
    at_checkpoint("budget stopped", rival)
    assert run_billing_sweeps(NOW + HOUR) == {"leases ended": 1}
    assert touched == [NOW + HOUR - MINUTE]


def test_raised_budget_reopens_at_once(exhausted_lease: Lease) -> None:
    budget = budgets.change_budget(Budget.objects.get().pk, {"amount": Decimal(3)}, now=NOW)
    assert (budget.exhausted_at, budget.exhausted_for, budget.spent) == (None, None, 1)
    run_command(exhausted_lease)
    assert list_budget_events() == ["exhausted", "warning"]
    assert run_billing_sweeps(NOW + 2 * HOUR)["budgets exhausted"] == 1  # a new event, because the amount changed
    assert list_budget_events() == ["exhausted", "warning"] * 2


def test_budget_raised_in_the_database_reopens_before_the_next_sweep(exhausted_lease: Lease) -> None:
    Budget.objects.update(amount=3)
    run_command(exhausted_lease)
    assert run_billing_sweeps(NOW) == {"budgets reopened": 1}


def test_corrected_usage_reopens_a_budget(exhausted_lease: Lease) -> None:
    UsageRecord.objects.all().delete()
    Budget.objects.update(grace=30 * MINUTE)  # fits into the amount
    budget = Budget.objects.get()
    assert budgets.update_spending(budget.pk, now=NOW) == ["reopened"]
    run_command(exhausted_lease)
    metering.reset_usage()
    assert run_billing_sweeps(NOW)["budgets exhausted"] == 1
    assert list_budget_events() == ["exhausted", "warning"]  # once per period


def test_incomplete_rebuild_reopens_no_budget(exhausted_lease: Lease) -> None:
    budget = Budget.objects.get()
    derivation.reset_usage_and_costs()
    assert budgets.update_spending(budget.pk, now=NOW) == []
    with expect_refusal(spent="1", limit="1"):
        run_command(exhausted_lease)
    metering.meter_usage(now=NOW)
    assert budgets.update_spending(budget.pk, now=NOW) == []
    derivation.derive_usage_and_costs(now=NOW)
    assert (budgets.update_spending(budget.pk, now=NOW), get_rounded_spending(budget)) == ([], 1)
    assert not horizon.is_rebuilding()


def test_reset_during_the_sum_discards_the_sum(exhausted_lease: Lease, at_checkpoint: AnyCallable) -> None:
    budget = Budget.objects.get()
    UsageRecord.objects.all().delete()  # a sum of these rows would reopen the budget
    at_checkpoint("budget summed", derivation.reset_usage_and_costs)
    assert (budgets.update_spending(budget.pk, now=NOW), get_rounded_spending(budget)) == ([], 1)


def test_reset_during_a_derivation_keeps_the_rebuild_mark(exhausted_lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    def price(*, now: datetime, price: AnyCallable = costs.price_usage) -> Any:
        counts = price(now=now)
        derivation.reset_usage_and_costs()
        return counts

    derivation.reset_usage_and_costs()
    with monkeypatch.context() as patched:
        patched.setattr(costs, "price_usage", price)
        derivation.derive_usage_and_costs(now=NOW)
    assert horizon.is_rebuilding()
    derivation.derive_usage_and_costs(now=NOW)
    assert not horizon.is_rebuilding()


def test_budget_lowered_below_its_spending_refuses_and_ends_leases(used_lease: AnyCallable, grant: AnyCallable) -> None:
    lease, budget = used_lease(), create_budget(9)
    run_billing_sweeps(NOW)
    Budget.objects.update(amount=Decimal("0.5"))
    with expect_refusal(spent="1", limit="0.5"):
        grant(environment="e2")
    assert run_billing_sweeps(NOW)["leases ended"] == 1
    assert (get_lease_end(lease), get_rounded_spending(budget)) == (("expired", "budget"), 1)
