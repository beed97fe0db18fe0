"""Joins that fail: no active lease remains that no client knows."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from billing.errors import BudgetExhausted
from leases import leasing, sweeps, turns
from leases.leasing import LeaseRequest
from leases.models import Lease, LeaseEvent
from sandboxes.errors import CapacityExhausted, ProviderCallFailed, QuotaExceeded, SandboxNotReady
from sandboxes.models import Pool, Quota, Run, Sandbox
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.billing import create_budget, start_run
from tests.support.leases import run, update_pool

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
BOB = "did:plc:bob"
WAITS = [None, timedelta(0)]


def claim_silent_sandbox(pool: Pool, memory: MemoryProvider) -> None:
    """Let the next join claim a pre-warmed sandbox that does not respond, which the join finds out by an operation."""
    update_pool(pool, warm_target=1)
    passes.warm_pools(now=NOW)
    memory.silent.add(Sandbox.objects.get().ref)


@pytest.fixture
def join(pool: Pool) -> Callable[..., Lease]:
    def call(*, wait: timedelta | None = None, now: datetime = NOW, **fields: object) -> Lease:
        request = LeaseRequest(BOB, "game", "catan", pool=pool.name, **fields)  # type: ignore[arg-type]
        return turns.join_environment(request, wait=wait, now=now)[0]

    return call


def get_end() -> tuple[str, str]:
    lease = Lease.objects.get(agent_did=BOB)
    return lease.status, lease.end_reason


@pytest.mark.parametrize("wait", WAITS)
def test_join_without_a_place_or_a_quota_grants_nothing(join, grant, pool: Pool, wait: timedelta | None) -> None:
    update_pool(pool, capacity=1)
    busy = grant("did:plc:busy")
    start_run(busy)
    admitted: list[bool] = []
    for now in (NOW, NOW + MINUTE):
        with pytest.raises(CapacityExhausted):
            turns.join_environment(
                LeaseRequest(BOB, "game", "catan", pool=pool.name), wait=wait, now=now, admit=lambda: admitted.append(True)
            )
    Quota.objects.create(pool=pool, agent_did=BOB, most=0)
    with pytest.raises(QuotaExceeded):
        join(wait=wait)
    assert [*Lease.objects.all()] == [busy]


@pytest.mark.parametrize("wait", WAITS)
def test_join_that_its_budget_cannot_pay_grants_and_starts_nothing(
    join, memory: MemoryProvider, wait: timedelta | None
) -> None:
    create_budget("0.03", grace=timedelta(0))  # 1.8 minutes: enough for a lease, less than a start needs
    with pytest.raises(BudgetExhausted):
        join(wait=wait)
    assert not Lease.objects.exists()
    assert not Sandbox.objects.exists()


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("method", "warm", "error"), [("create", False, SandboxNotReady), ("write_file", True, ProviderCallFailed)]
)
def test_join_that_fails_after_the_grant_ends_its_lease(
    join, pool: Pool, memory: MemoryProvider, wait: timedelta | None, method: str, warm: bool, error: type[Exception]
) -> None:
    if warm:
        claim_silent_sandbox(pool, memory)
    memory.fail(method, Unavailable("no engine"), times=1)
    with pytest.raises(error):
        join(wait=wait)
    assert get_end() == ("expired", "failed")
    assert LeaseEvent.objects.get(kind="ended").reason.startswith("failed: The ")
    sweeps.reclaim(now=NOW + MINUTE)
    assert get_end() == ("destroyed", "failed")
    assert Pool.objects.get(pk=pool.pk).used == 0
    assert run(join(wait=wait, now=NOW + 2 * MINUTE), now=NOW + 2 * MINUTE).exit_code == 0


def test_join_that_fails_keeps_a_lease_that_it_did_not_grant(join, grant, memory: MemoryProvider) -> None:
    held = grant(BOB, "game")
    memory.fail("create", Unavailable("no engine"), times=1)
    with pytest.raises(SandboxNotReady):
        join()
    assert get_end() == ("active", "")
    assert join(now=NOW + MINUTE) == held


def test_join_that_fails_keeps_a_lease_that_another_call_uses(join, pool: Pool, memory: MemoryProvider, at_checkpoint) -> None:
    claim_silent_sandbox(pool, memory)

    def use() -> None:
        run(Lease.objects.get(agent_did=BOB))
        raise OSError

    at_checkpoint("run opened", use)
    with pytest.raises(OSError):
        join()
    assert get_end() == ("active", "")


def test_claim_of_a_responding_sandbox_runs_nothing_and_writes_its_files_with_the_first_command(
    join, pool: Pool, memory: MemoryProvider
) -> None:
    update_pool(pool, warm_target=1)
    passes.warm_pools(now=NOW)
    lease = join()
    sandbox = Sandbox.objects.get()
    assert (sandbox.holder, sandbox.state, Run.objects.count()) == (lease.pk, "warm", 0)
    assert "/workspace/config.json" not in memory.files(sandbox.ref)
    run(lease)
    assert "/workspace/config.json" in memory.files(sandbox.ref)


def test_start_may_take_longer_than_the_ttl_of_the_lease(join) -> None:
    second = timedelta(seconds=1)
    lease = join(ttl=second)
    assert lease.expires_at > NOW + 20 * second


@pytest.mark.django_db(transaction=True)
def test_lease_of_a_failed_join_is_ended_after_a_failover(join, memory: MemoryProvider, failover) -> None:
    failover(leasing, "end")
    memory.fail("create", Unavailable("no engine"), times=1)
    with pytest.raises(SandboxNotReady):
        join()
    assert get_end() == ("expired", "failed")
