"""Budget enforcement: grace periods and the end of leases over budget."""

from collections.abc import Callable
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from billing import budgets, metering
from billing.models import Budget
from leases import budget_enforcement, execution, leasing
from leases import fork as lease_fork
from leases import sweeps as lease_sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction
from sandboxes.db import clock as work_clock
from sandboxes.egress.refusals import CallRefused
from sandboxes.models import LlmCall, Run, Sandbox, Snapshot
from sandboxes.providers.errors import Unavailable
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support import model_calls
from tests.support.billing import (
    ADA,
    BOB,
    HOUR,
    create_budget,
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
AnyCallable = Callable[..., Any]


# --- end of leases ----------------------------------------------------------------------------------------------------


def read_forked_file(lease: Lease) -> bytes:
    """Give the budget room again, fork an ended lease and read the file that used_lease wrote."""
    Budget.objects.update(amount=100)
    lease.refresh_from_db()
    request = leasing.LeaseRequest(ADA, "fork", "catan", pool=lease.pool.name)
    fork, _ = lease_fork.fork(lease, request, now=NOW)
    return run_command(fork, "cat", "f")


def test_waiting_sandbox_is_stored_before_its_lease_ends(used_lease: AnyCallable, memory: Any) -> None:
    lease, asleep, other = used_lease(), used_lease(environment="e2"), used_lease(BOB, "e3")
    eviction.evict(Sandbox.objects.get(holder=asleep.pk).pk, now=NOW, reason="idle")
    empty = leasing.acquire(leasing.LeaseRequest(ADA, "e4", "catan", pool=lease.pool.name), now=NOW)[0]
    create_budget(1, scope="agent", subject=ADA)
    assert run_billing_sweeps(NOW) == {"budgets warned": 1, "budgets exhausted": 1, "leases ended": 3}
    assert [get_lease_end(ended) for ended in (lease, asleep, empty)] == [("expired", "budget")] * 3
    assert (get_lease_end(other)[0], Snapshot.objects.filter(holder=lease.pk, forgotten_at=None).count()) == ("active", 1)
    event = lease.events.get(kind="ended")
    assert (event.actor, event.reason) == ("sweep", f"budget: 1 hours a day for agent {ADA}")
    assert budget_enforcement.enforce_budgets(now=NOW).counts == {}
    lease_sweeps.reclaim(now=NOW + MINUTE)
    assert get_lease_end(lease)[0] == "destroyed"
    with pytest.raises(LeaseEnded, match=r"\(budget\)"):
        run_command(lease)
    assert read_forked_file(lease) == b"kept\n"


def test_run_continues_until_the_end_of_the_grace_period(used_lease: AnyCallable) -> None:
    lease = used_lease()
    create_budget(1, grace=5 * MINUTE)
    run = start_run(lease)
    for minute in (0, 1, 4):
        assert run_billing_sweeps(NOW + minute * MINUTE)["sandboxes in grace period"] == 1
        assert (get_lease_end(lease)[0], Run.objects.get(pk=run.pk).ended_at) == ("active", None)
    assert run_billing_sweeps(NOW + 5 * MINUTE) == {"leases ended": 1}
    run.refresh_from_db()
    assert (get_lease_end(lease)[1], run.outcome, run.note) == (
        "budget", "lost", "Killed: a budget of the lease is exhausted and its grace period is over.",
    )  # fmt: skip
    assert read_forked_file(lease) == b"kept\n"


@pytest.mark.parametrize(
    ("old_fields", "new_fields"),
    [({"hard": False}, {"hard": True}), ({"subject": BOB}, {"subject": ADA}), ({}, {"active": True}), ({}, {})],
)
def test_budget_newly_applied_to_a_run_gives_a_full_grace_period(
    used_lease: AnyCallable, old_fields: dict[str, Any], new_fields: dict[str, Any]
) -> None:
    lease, _ = used_lease(), used_lease(BOB, "e2")
    budget = create_budget(**{"period": "ever", "scope": "agent", "subject": ADA, "grace": 5 * MINUTE} | old_fields)
    run = start_run(lease)
    run_billing_sweeps(NOW)
    if not old_fields:
        budgets.set_active(budget.pk, active=False, now=NOW)
    if new_fields:
        budgets.change_budget(budget.pk, new_fields, now=NOW + HOUR)
    else:
        assert budgets.set_active(budget.pk, active=True, now=NOW + HOUR)
    assert run_billing_sweeps(NOW + HOUR) == {"sandboxes in grace period": 1}
    assert run_billing_sweeps(NOW + HOUR + 4 * MINUTE) == {"sandboxes in grace period": 1}
    assert run_billing_sweeps(NOW + HOUR + 5 * MINUTE) == {"leases ended": 1}
    assert Run.objects.get(pk=run.pk).outcome == "lost"
    assert new_fields or list_budget_events() == ["exhausted", "warning"]


# --- model calls ------------------------------------------------------------------------------------------------------


def open_call(lease: Lease, now: datetime) -> str:
    """Open a model call of a lease's sandbox. Return the code of its refusal, or ""."""
    try:
        model_calls.open_call(lease, now=now)
    except CallRefused as refused:
        return refused.code
    return ""


def test_model_calls_are_refused_from_the_end_of_the_grace_period(used_lease: AnyCallable) -> None:
    lease, other = used_lease(), used_lease(BOB, "e2")
    for each in (lease, other):
        start_run(each)
    create_budget(1, scope="agent", subject=ADA, grace=5 * MINUTE)
    create_budget(1, scope="agent", subject=ADA, grace=9 * MINUTE)
    create_budget(1, scope="agent", subject=BOB, hard=False, grace=5 * MINUTE)
    run_billing_sweeps(NOW)
    calls = [open_call(lease, NOW + minutes * MINUTE) for minutes in (0, 4, 5, 60)]
    assert calls == ["", "", "budget_exhausted", "budget_exhausted"]
    assert open_call(other, NOW + HOUR) == ""
    refused = LlmCall.objects.filter(holder=lease.pk, outcome="refused")
    assert [*refused.values_list("status", "code")] == [(402, "budget_exhausted")] * 2


@pytest.mark.parametrize("change", ["raise", "disable", "next period"])
def test_model_calls_are_admitted_again_with_a_budget_that_has_room(used_lease: AnyCallable, change: str) -> None:
    lease = used_lease()
    start_run(lease, timeout=30 * HOUR)
    budget = create_budget(1, grace=timedelta(0))
    metering.meter_usage(now=NOW)
    budgets.change_budget(budget.pk, {}, now=NOW)
    assert open_call(lease, NOW) == "budget_exhausted"
    later = NOW + MINUTE
    if change == "raise":
        budgets.change_budget(budget.pk, {"amount": 100}, now=later)
    elif change == "disable":
        budgets.set_active(budget.pk, active=False, now=later)
    else:
        later = NOW + 12 * HOUR + MINUTE  # past midnight
        Lease.objects.update(expires_at=later + HOUR)
        run_billing_sweeps(later)
    assert open_call(lease, later) == ""


def test_run_that_ends_within_the_grace_period_keeps_its_result(used_lease: AnyCallable) -> None:
    lease = used_lease()
    create_budget(1)
    run = start_run(lease)
    run_billing_sweeps(NOW)
    operations.close_run(run, now=NOW + MINUTE, outcome=operations.RunOutcome.OK)
    assert run_billing_sweeps(NOW + MINUTE) == {"leases ended": 1}
    assert (get_lease_end(lease)[1], Run.objects.get(pk=run.pk).outcome) == ("budget", "ok")


def test_killed_command_reports_the_end_of_its_lease(used_lease: AnyCallable, memory: Any) -> None:
    lease = used_lease()
    create_budget(1, grace=timedelta(0))

    def rival(ref: str) -> None:
        unhook.close()
        run_billing_sweeps(NOW)

    unhook = memory.before("exec", rival)
    with pytest.raises(LeaseEnded) as caught:
        run_command(lease)
    assert caught.value.extra["end_reason"] == "budget"


def test_failed_kill_is_retried(used_lease: AnyCallable, memory: Any) -> None:
    lease = used_lease()
    create_budget(1, grace=timedelta(0))
    start_run(lease)
    with memory.fail("kill", Unavailable("no answer")):
        assert run_billing_sweeps(NOW)["sandboxes not stored yet"] == 1
    assert (get_lease_end(lease)[0], Sandbox.objects.get().state) == ("active", "running")
    assert run_billing_sweeps(NOW + MINUTE) == {"leases ended": 1}


def test_failed_store_keeps_the_lease_and_is_retried(used_lease: AnyCallable, memory: Any) -> None:
    lease = used_lease()
    create_budget(1, grace=timedelta(0))
    with memory.fail("get_files", Unavailable("no answer")):
        for minute in range(3):
            assert run_billing_sweeps(NOW + minute * MINUTE)["sandboxes not stored yet"] == 1
            assert (get_lease_end(lease)[0], Sandbox.objects.get().state) == ("active", "waiting")
            with expect_refusal():
                run_command(lease)
    assert Sandbox.objects.get().persist_failures == 2  # retried with backoff
    assert run_billing_sweeps(NOW + 20 * MINUTE) == {"leases ended": 1}
    assert read_forked_file(lease) == b"kept\n"


def test_file_access_does_not_postpone_the_retry_of_a_store(used_lease: AnyCallable, memory: Any) -> None:
    lease = used_lease()
    create_budget(1)
    with memory.fail("get_files", Unavailable("no answer")):
        run_billing_sweeps(NOW)
    file = Command(argv=["read"], timeout=MINUTE, kind="file")
    execution.call_in_sandbox(lease.pk, file, lambda provider, sandbox: None, now=NOW + MINUTE)
    assert run_billing_sweeps(NOW + 2 * MINUTE) == {"leases ended": 1}
    assert read_forked_file(lease) == b"kept\n"


def test_lease_past_its_ttl_ends_with_reason_ttl(used_lease: AnyCallable) -> None:
    lease = used_lease()
    create_budget(1)
    assert run_billing_sweeps(lease.expires_at)["leases ended"] == 1
    assert get_lease_end(lease)[1] == "ttl"


def test_lost_sandbox_is_left_to_reconciliation(used_lease: AnyCallable, memory: Any) -> None:
    lease = used_lease()
    create_budget(1)
    memory.vanish(Sandbox.objects.get().ref)
    assert run_billing_sweeps(NOW)["sandboxes not stored yet"] == 1
    assert run_billing_sweeps(NOW + MINUTE) == {"sandboxes lost": 1}
    lease_sweeps.reconcile(now=NOW + MINUTE, grace=MINUTE)
    assert get_lease_end(lease)[1] == "lost"


def test_budget_raised_during_a_store_keeps_the_lease(used_lease: AnyCallable, at_checkpoint: AnyCallable) -> None:
    lease = used_lease()
    create_budget(1)
    at_checkpoint("budget stored", lambda: Budget.objects.update(amount=2))
    assert run_billing_sweeps(NOW)["lost race"] == 1
    assert get_lease_end(lease)[0] == "active"
    assert run_command(lease, "cat", "f") == b"kept\n"


@pytest.mark.parametrize("change", [{"amount": 9}, {"grace": HOUR}])
def test_budget_relaxed_during_a_store_kills_no_other_run(
    used_lease: AnyCallable, at_checkpoint: AnyCallable, change: dict[str, Any]
) -> None:
    used_lease(hours=2)  # opened earlier, so the sweep handles it first
    other = used_lease(BOB, "e2")
    create_budget(1, grace=timedelta(0))
    run = start_run(other)
    at_checkpoint("budget stored", lambda: Budget.objects.update(**change))
    run_billing_sweeps(NOW)
    run.refresh_from_db()
    assert (get_lease_end(other)[0], run.ended_at) == ("active", None)


def test_leases_end_after_a_slow_update_of_spending(
    used_lease: AnyCallable, monkeypatch: pytest.MonkeyPatch, at_checkpoint: AnyCallable
) -> None:
    lease, clock = used_lease(), [0.0]
    create_budget(1)
    monkeypatch.setattr(work_clock, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    at_checkpoint("budget settled", lambda: clock.append(clock.pop() + budget_enforcement.PASS_TIME_LIMIT.total_seconds() + 1))
    assert run_billing_sweeps(NOW)["leases ended"] == 1
    assert get_lease_end(lease) == ("expired", "budget")


def test_failed_row_does_not_stop_the_pass(used_lease: AnyCallable, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = used_lease(), used_lease(environment="e2")
    create_budget(1), create_budget(1, scope="agent", subject=ADA)
    update_spending, end = budgets.update_spending, leasing.end

    def fail_for_first(pk: Any, **options: Any) -> Any:
        if pk in (first.pk, Budget.objects.order_by("pk").values_list("pk", flat=True)[0]):
            raise RuntimeError("a bug")
        return update_spending(pk, **options) if isinstance(pk, int) else end(pk, **options)

    monkeypatch.setattr(budgets, "update_spending", fail_for_first)
    monkeypatch.setattr(leasing, "end", fail_for_first)
    metering.meter_usage(now=NOW)
    result = budget_enforcement.enforce_budgets(now=NOW)
    assert (result.counts["leases ended"], len(result.failures)) == (1, 2)
    assert (get_lease_end(first)[0], get_lease_end(second)[0]) == ("active", "expired")


STEPS = [
    "budget summed", "budget marked", "budget settled", "budget stopped", "eviction claimed", "objects stored", "persisted",
    "process gone", "budget stored", "budget ended",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_crash_at_any_step_is_recovered(step: str, used_lease: AnyCallable, crash_at: AnyCallable, memory: Any) -> None:
    lease = used_lease()
    create_budget(1, grace=timedelta(0), now=NOW - 2 * HOUR)
    run = start_run(lease)
    with crash_at(step):
        run_billing_sweeps(NOW)
    assert step == "budget ended" or get_lease_end(lease)[0] == "active"
    for now in (NOW + MINUTE, NOW + HOUR, NOW + 2 * HOUR):  # an abandoned claim is stalled by the last of these
        lease_sweeps.recover_stalled(now=now)
        run_billing_sweeps(now)
        lease_sweeps.reclaim(now=now)
    assert (get_lease_end(lease), list_budget_events()) == (("destroyed", "budget"), ["exhausted", "warning"])
    assert lease.events.filter(kind="ended").count() == 1
    assert (Run.objects.get(pk=run.pk).outcome, Run.objects.filter(ended_at=None).count()) == ("lost", 0)
    assert memory.list(str(lease.pool.owner)) == []
    assert read_forked_file(lease) == b"kept\n"
