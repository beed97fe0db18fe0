"""Races and crashes of a placement in several pools: one sandbox of a lease, all of them in their pool's capacity."""

from datetime import timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.models import AlternativePool, EnvironmentType, Lease
from sandboxes.errors import CapacityExhausted, NoPoolAvailable
from sandboxes.models import GONE_STATES, Host, Pool, Sandbox
from sandboxes.pool import start_breaker
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.leases import evict, read, run, write

LATER = NOW + timedelta(hours=1)


@pytest.fixture
def second(pool: Pool) -> Pool:
    second = Pool.objects.create(name="second", provider=pool.provider, capacity=4)
    duo = EnvironmentType.objects.create(name="duo", pool=pool)
    AlternativePool.objects.create(environment_type=duo, pool=second)
    return second


@pytest.fixture
def lease(second: Pool, grant) -> Lease:
    granted: Lease = grant(environment_type="duo", pool="")
    return granted


def fail_in(pool: Pool, memory: MemoryProvider) -> None:
    """Make creates fail in one pool, although the sandbox then exists."""

    def raise_in_pool(ref: str) -> None:
        if Sandbox.objects.filter(ref=ref, pool=pool).exists():
            raise Unavailable("timed out")

    memory.after("create", raise_in_pool)


def assert_converged(memory: MemoryProvider) -> None:
    for pool in Pool.objects.all():
        live = Sandbox.objects.filter(pool=pool).exclude(state__in=(*GONE_STATES, "cold"))
        assert {each.name for each in memory.list(str(pool.owner))} == {sandbox.name for sandbox in live}
        assert pool.used == Sandbox.objects.filter(pool=pool).exclude(state="destroyed").count()


@pytest.mark.django_db(transaction=True)
def test_concurrent_execs_of_a_lease_whose_first_pool_fails_create_one_sandbox(lease, pool, second, memory) -> None:
    fail_in(pool, memory)
    Pool.objects.filter(pk=second.pk).update(provider="process")  # the circuit breaker may open at the first provider
    with run_in_threads(8) as together:
        results = together(lambda i: execution.ensure_sandbox_ready(lease.pk, now=NOW))
    assert {getattr(result, "pool_id", result) for result in results} == {second.pk}
    live = Sandbox.objects.filter(holder=lease.pk).exclude(state__in=GONE_STATES)
    assert (live.count(), Lease.objects.get(pk=lease.pk).pool) == (1, second)
    skips = [(event.pool, event.skip_reason) for event in lease.events.filter(kind="pool_skipped")]
    assert len(skips) == 1 and skips[0][0] == pool
    assert len(memory.list(str(pool.owner))) == Sandbox.objects.filter(pool=pool, state="destroying").count() >= 1
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW + MINUTE)
    assert not Sandbox.objects.exclude(state="destroyed").exists()
    assert not Pool.objects.filter(used__gt=0).exists()


@pytest.mark.django_db(transaction=True)
def test_concurrent_starts_of_more_leases_than_places_fill_both_pools_and_exceed_neither(grant, pool, second, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=2)
    for each in (pool, second):
        each.quotas.bulk_create(
            [each.quotas.model(pool=each, agent_did=f"did:plc:a{number}", guaranteed=1) for number in range(12)]
        )
    leases = [grant(agent=f"did:plc:a{number}", environment_type="duo", pool="") for number in range(12)]
    with run_in_threads(12) as together:
        results = together(lambda i: execution.ensure_sandbox_ready(leases[i].pk, now=NOW))
    assert sum(isinstance(each, Sandbox) for each in results) == 6
    assert all(isinstance(each, Sandbox | CapacityExhausted) for each in results), results
    assert [*Pool.objects.filter(pk__in=(pool.pk, second.pk)).order_by("used").values_list("used", flat=True)] == [2, 4]
    assert_converged(memory)


@pytest.mark.django_db
@pytest.mark.parametrize("step", ["reserved", "created", "start given up", "prepared"])
def test_crash_at_any_step_of_a_failover_leaves_one_sandbox(step: str, lease, pool, second, memory, crash_at) -> None:
    fail_in(pool, memory)
    with crash_at(step):
        run(lease)
    sweeps.recover_stalled(now=LATER)
    sweeps.reclaim(now=LATER)
    sweeps.reconcile(now=LATER, grace=timedelta(0))
    assert_converged(memory)
    assert run(lease, now=LATER).exit_code == 0
    sweeps.reclaim(now=LATER + MINUTE)
    assert_converged(memory)
    assert Sandbox.objects.exclude(state="destroyed").get().pool == second


@pytest.mark.django_db
def test_crash_between_the_release_of_a_cold_sandbox_and_its_start_elsewhere_loses_no_file(
    lease, pool, second, memory, crash_at
) -> None:
    write(lease)
    evict(lease)
    Pool.objects.filter(pk=second.pk).update(provider="process")
    Host.objects.filter(provider=pool.provider).update(
        start_failures=start_breaker.MAX_START_FAILURES, starts_paused_until=LATER + MINUTE
    )
    with crash_at("moved"):
        read(lease)
    assert (Sandbox.objects.get().state, Pool.objects.get(pk=pool.pk).used) == ("destroyed", 0)
    Pool.objects.filter(pk=second.pk).update(draining=True)
    with pytest.raises(NoPoolAvailable):
        read(lease)
    assert read(lease, now=LATER + 2 * MINUTE) == "kept"
    assert Sandbox.objects.exclude(state="destroyed").get().pool == pool
