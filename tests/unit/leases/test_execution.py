"""Leases and budgets that end while a sandbox is being started, and leases renewed by long commands."""

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection

from billing.errors import BudgetExhausted
from billing.models import Budget
from leases import execution, leasing
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction
from sandboxes.db import clock
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import Pool, Run, Sandbox, Transition
from sandboxes.providers.errors import Unavailable
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.billing import create_budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
SECOND = timedelta(seconds=1)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Return a function that advances the clocks of running operations."""
    passed = timedelta(0)

    def advance(length: timedelta) -> None:
        nonlocal passed
        passed += length

    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed.total_seconds()))
    return advance


def run(lease: Lease, timeout: timedelta = MINUTE, now=NOW) -> Run:
    return execution.exec_command(lease.pk, Command(argv=["true"], timeout=timeout), now=now)[0]


def test_lease_that_ends_while_it_waits_for_a_place_gets_none(grant, pool, memory, pass_time) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=1)
    run(grant(agent="did:plc:first"))
    late = grant(ttl=MINUTE)
    with memory.before("get_files", lambda ref: pass_time(3 * MINUTE)), pytest.raises(LeaseEnded):  # of the evicted sandbox
        run(late, timeout=10 * SECOND)
    assert not Sandbox.objects.filter(holder=late.pk).exists()


@pytest.mark.parametrize("woken", [False, True])
def test_lease_that_ends_while_its_sandbox_starts_runs_nothing(grant, memory, pass_time, woken: bool) -> None:
    lease = grant(ttl=2 * MINUTE)
    if woken:
        run(lease)
        assert eviction.evict(Sandbox.objects.get(holder=lease.pk).pk, now=NOW)
        leasing.renew(lease, now=NOW)
    runs = Run.objects.count()
    with memory.after("wait_ready", lambda ref: pass_time(3 * MINUTE)), pytest.raises(LeaseEnded):
        run(lease, timeout=10 * SECOND)
    assert Run.objects.count() == runs


def test_lease_that_ends_while_its_run_waits_for_a_lock_runs_nothing(grant, memory, pass_time, monkeypatch) -> None:
    monkeypatch.setattr(operations.sql, "lock_key", lambda key: pass_time(3 * MINUTE))
    with pytest.raises(LeaseEnded):
        run(grant(ttl=2 * MINUTE), timeout=10 * SECOND)
    assert not Run.objects.exists()


@pytest.mark.parametrize("is_used", [False, True])
def test_lease_that_ends_while_its_process_is_suspended_runs_nothing(
    grant, memory, pass_time, at_checkpoint, is_used: bool
) -> None:
    lease = grant(ttl=2 * MINUTE)

    def suspend() -> None:
        if is_used:  # by another command, which is in progress
            assert operations.open_run(Sandbox.objects.get(), Command(argv=["sleep"], timeout=MINUTE), now=NOW)
        pass_time(3 * MINUTE)

    at_checkpoint("sandbox ready", suspend)
    with pytest.raises(LeaseEnded):
        run(lease, timeout=10 * SECOND)
    assert Run.objects.count() == is_used


def test_budget_spent_while_a_sandbox_starts_runs_nothing(grant, memory) -> None:
    lease = grant()

    def spend(ref: str) -> None:
        budget = create_budget(1)
        began = budget.period_began or NOW.replace(hour=0)
        Budget.objects.update(spent=1, spent_at=NOW, period_began=began, exhausted_at=NOW, exhausted_for=began)

    with memory.after("wait_ready", spend), pytest.raises(BudgetExhausted):
        run(lease)
    assert not Run.objects.exists()


def test_run_and_its_sandbox_begin_after_the_checks_before_them(grant, memory, pass_time) -> None:
    lease, slow = grant(), [MINUTE]

    def execute_slowly(execute, *args):
        while slow:
            pass_time(slow.pop())  # the first statement waits for a lock
        return execute(*args)

    with connection.execute_wrapper(execute_slowly):
        run_row = run(lease)
    assert run_row.started_at >= NOW + MINUTE
    assert min(Transition.objects.values_list("at", flat=True)) >= NOW + MINUTE


def test_prewarmed_sandbox_is_ready_after_its_start(pool, memory, pass_time, at_checkpoint) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    at_checkpoint("reserved", lambda: pass_time(MINUTE))
    passes.warm_pools(now=NOW)
    assert Transition.objects.get(to="warm").at >= NOW + MINUTE


def test_command_longer_than_the_ttl_does_not_outlive_its_lease(grant, memory, pass_time) -> None:
    lease = grant(ttl=MINUTE)
    seen = []

    def look(ref: str) -> None:
        pass_time(5 * MINUTE)
        seen.append(leasing.require_active(lease.pk, now=NOW + 5 * MINUTE).expires_at)

    with memory.before("exec", look):
        assert run(lease, timeout=10 * MINUTE).outcome == "ok"
    until = NOW + 10 * MINUTE + 30 * SECOND
    assert until <= seen[0] < until + MINUTE  # renewed at the time after the checks of the lease


def test_renewal_for_a_command_stops_at_the_max_ttl(grant, memory) -> None:
    lease = grant(ttl=MINUTE, max_ttl=5 * MINUTE)
    run(lease, timeout=10 * MINUTE)
    lease.refresh_from_db()
    assert lease.expires_at == NOW + 5 * MINUTE


def test_run_whose_command_cannot_be_killed_stays_open_until_it_is(grant, memory) -> None:
    lease = grant()
    memory.fail("exec", Unavailable("no answer"), times=1)
    memory.fail("kill", Unavailable("no answer"), times=2)
    with pytest.raises(ProviderCallFailed):
        run(lease)
    assert not eviction.evict(Sandbox.objects.get().pk, now=NOW)
    assert passes.recover_stalled(now=NOW).failures
    assert (Sandbox.objects.get().state, Run.objects.get().ended_at) == ("running", None)
    assert passes.recover_stalled(now=NOW).counts == {}  # postponed: a failure must not delay the rows of others
    assert passes.recover_stalled(now=NOW + MINUTE).counts == {"runs closed": 1}
    assert (Sandbox.objects.get().state, Run.objects.get().outcome) == ("waiting", "lost")
    assert "The provider stopped responding" in Run.objects.get().note
