"""What is counted of pools: each thing once, whatever became of the sandbox that counted it."""

from datetime import datetime

import pytest
from django.db import connection

from leases import execution, leasing, sweeps
from leases.models import Lease
from sandboxes import eviction, pool_stats
from sandboxes import pool as pools
from sandboxes import sweeps as below
from sandboxes.models import Pool, Quota, Sandbox
from sandboxes.providers.base import Rejected, Unavailable
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW, SimulatedCrash

pytestmark = pytest.mark.django_db
HOUR = 60 * MINUTE


def use(lease: Lease, now: datetime = NOW) -> None:
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=now)


def of(pool: Pool, now: datetime = NOW) -> pool_stats.PoolStats:
    return next(one for one in pool_stats.collect_pool_stats(now=now) if one.pk == pool.pk)


def kept(pool: Pool) -> dict[str, int]:
    """What is counted since the pool was made, without the zeros."""
    found = of(pool)
    return {name: number for name in pool_stats.POOL_COUNTER_FIELDS if (number := getattr(found, name))}


def size(pool: Pool, capacity: int) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=capacity)


def test_new_pool_has_only_its_capacity(pool) -> None:
    found = of(pool)
    assert (found.capacity, found.used, found.total, found.woken) == (100, 0, 0, 0)
    assert kept(pool) == {}


def test_sandboxes_are_counted_by_state(grant, pool, memory) -> None:
    cold, warm, waiting, gone, stuck = (grant(environment=f"e{number}") for number in range(5))
    for lease in (cold, waiting, gone, stuck):
        use(lease)
    execution.ensure_sandbox_ready(warm.pk, now=NOW)
    eviction.evict(pools.find_by_holder(cold.pk).pk, now=NOW, reason="test")
    leasing.release(gone.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    leasing.release(stuck.pk, now=NOW)
    running: list[pool_stats.PoolStats] = []
    with memory.before("exec", lambda ref: running.append(of(pool))):
        use(warm)
    found = running[0]
    assert (found.cold, found.running, found.waiting, found.destroying) == (1, 1, 1, 1)
    assert (found.warming, found.warm, found.evicting) == (0, 0, 0)
    assert found.used == found.total == 4


def test_counters_are_the_same_before_and_after_the_sandbox_is_destroyed(grant, pool) -> None:
    lease = grant(ttl=24 * HOUR)
    use(lease)
    use(lease)
    below.evict_idle(now=NOW + HOUR)
    use(lease, NOW + HOUR)
    counted = {"warm_hits": 1, "woken_local": 1, "slept": 1}
    assert kept(pool) == counted
    leasing.release(lease.pk, now=NOW + HOUR)
    assert kept(pool) == counted
    sweeps.reclaim(now=NOW + HOUR)
    assert (kept(pool), of(pool).total) == (counted, 0)


def test_wake_after_the_place_was_released_counts_as_cloud(grant, pool) -> None:
    lease = grant(ttl=24 * HOUR)
    use(lease)
    below.evict_idle(now=NOW + HOUR)
    below.expire_cold(now=NOW + 4 * HOUR)
    use(lease, NOW + 4 * HOUR)
    assert kept(pool) == {"woken_cloud": 1, "slept": 1}
    assert of(pool).woken == 1


def test_first_start_is_no_wake_and_a_wake_without_stored_state_is_fresh(grant, pool) -> None:
    lease = grant()
    execution.ensure_sandbox_ready(lease.pk, now=NOW)
    assert kept(pool) == {}
    below.evict_idle(now=NOW + HOUR)
    execution.ensure_sandbox_ready(lease.pk, now=NOW + HOUR)
    assert kept(pool) == {"woken_fresh": 1, "slept": 1}


def test_idle_eviction_is_not_counted_as_evicted_for_capacity(grant, pool) -> None:
    use(grant())
    below.evict_idle(now=NOW + HOUR)
    below.expire_cold(now=NOW + 9 * HOUR)
    assert kept(pool) == {"slept": 1}


def test_eviction_resumed_after_a_failed_destroy_is_counted_once(grant, pool, memory) -> None:
    use(grant())
    with memory.fail("destroy", Unavailable("later")):
        below.evict_idle(now=NOW + HOUR)
    assert kept(pool) == {}
    below.recover_stalled(now=NOW + HOUR + MINUTE)
    assert kept(pool) == {"slept": 1}


def test_capacity_eviction_of_a_waiting_sandbox_is_counted_once(grant, pool) -> None:
    size(pool, 1)
    use(grant())
    use(grant(agent="did:plc:b"), NOW + MINUTE)
    assert kept(pool) == {"evicted_waiting": 1, "slept": 1}


def test_eviction_whose_place_becomes_guaranteed_is_not_counted(grant, pool, memory, at_checkpoint) -> None:
    size(pool, 1)
    Quota.objects.create(pool=pool, agent_did="did:plc:ada")
    lease = grant()
    use(lease)

    def guaranteed() -> None:
        Quota.objects.filter(agent_did="did:plc:ada").update(guaranteed=1)

    at_checkpoint("process gone", guaranteed)
    assert eviction.free_place(pool, agent_did="did:plc:b", now=NOW + MINUTE)
    assert pools.find_by_holder(lease.pk).state == "cold"
    assert kept(pool) == {"slept": 1}


def test_cold_and_warm_evictions_are_counted_by_tier(grant, pool) -> None:
    size(pool, 1)
    first, second = grant(), grant(agent="did:plc:b")
    use(first)
    below.evict_idle(now=NOW + HOUR)
    execution.ensure_sandbox_ready(second.pk, now=NOW + HOUR)
    assert kept(pool) == {"evicted_cold": 1, "slept": 1}
    use(grant(agent="did:plc:c"), NOW + HOUR)
    assert kept(pool) == {"evicted_cold": 1, "evicted_warm": 1, "slept": 2}


def test_counters_survive_a_place_counter_that_drifted_to_zero(grant, pool) -> None:
    lease = grant()
    use(lease)
    use(lease)
    Pool.objects.filter(pk=pool.pk).update(used=0)
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    assert (kept(pool), of(pool).used) == ({"warm_hits": 1}, 0)


def test_prewarmed_sandboxes_are_ready_until_claimed(grant, pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=2)
    below.warm_pools(now=NOW)
    assert (of(pool).warm_target, of(pool).warm_ready, of(pool).warm) == (2, 2, 2)
    use(grant())
    assert (of(pool).warm_ready, kept(pool)) == (1, {"claimed_warm": 1})
    Pool.objects.filter(pk=pool.pk).update(image="another")
    assert (of(pool).warm_ready, of(pool).warm) == (0, 1)


def test_open_circuit_breaker_has_its_end_and_its_error(pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    with memory.fail("create", Rejected("no such image"), times=99):
        below.warm_pools(now=NOW)
    found = of(pool)
    assert found.warm_paused_until and found.warm_paused_until > NOW and "no such image" in found.warm_error
    assert of(pool, found.warm_paused_until).warm_paused_until is None


def test_quarantined_stalled_and_lost_sandboxes_are_counted(grant, pool) -> None:
    for number in range(4):
        use(grant(environment=f"e{number}"), NOW + number * MINUTE)
    quarantined, stalled, lost, _ = Sandbox.objects.order_by("created_at")
    past = {"state": "destroying", "deadline_at": NOW, "idle_at": None}
    Sandbox.objects.filter(pk=quarantined.pk).update(**past, quarantined_at=NOW)
    Sandbox.objects.filter(pk=stalled.pk).update(**past)
    Sandbox.objects.filter(pk=lost.pk).update(lost_at=NOW)
    found = of(pool, NOW + HOUR)
    assert (found.quarantined, found.stalled, found.lost) == (1, 1, 1)
    assert of(pool, NOW + MINUTE).stalled == 0  # the next sweep has not been late yet
    assert HOUR - 3 * MINUTE < found.oldest_waiting <= HOUR - 2 * MINUTE
    assert of(pool, NOW - HOUR).oldest_waiting.total_seconds() == 0  # a clock that was set back


def test_abandoned_run_makes_its_sandbox_stalled(grant, pool, at_checkpoint) -> None:
    def die() -> None:
        raise SimulatedCrash

    lease = grant()
    at_checkpoint("run opened", die)
    with pytest.raises(SimulatedCrash):
        use(lease)
    assert of(pool, NOW + MINUTE).stalled == 0
    assert of(pool, NOW + HOUR).stalled == 1


def test_sum_adds_up_the_pools(grant, pool) -> None:
    other = Pool.objects.create(name="other", provider="memory", capacity=5, warm_target=1)
    use(grant())
    use(grant(environment="e2", pool=other.name), NOW - HOUR)
    every = pool_stats.collect_pool_stats(now=NOW)
    assert [one.name for one in every] == sorted(one.name for one in every)
    summed = pool_stats.sum_stats(every)
    assert summed.capacity == sum(one.capacity for one in every)
    assert (summed.used, summed.total, summed.waiting, summed.warm_target) == (2, 2, 2, 1)
    assert summed.oldest_waiting == of(other).oldest_waiting > of(pool).oldest_waiting
    assert pool_stats.sum_stats([]).total == 0


def test_statistics_take_two_statements_and_read_no_history(grant, pool, django_assert_num_queries) -> None:
    history = [
        Sandbox(
            pool=pool, state="destroyed", state_since=NOW, last_used_at=NOW, created_at=NOW, destroyed_at=NOW,
            provider="memory", memory_mib=1, millicpus=1, pids=1,
        ) for _ in range(2000)
    ]  # fmt: skip
    Sandbox.objects.bulk_create(history)
    use(grant())
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    with django_assert_num_queries(2) as asked:
        pool_stats.collect_pool_stats(now=NOW)
    explain = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
    with connection.cursor() as cursor:
        cursor.execute(f"{explain} {asked.captured_queries[0]['sql']}")
        plan = "\n".join(str(row) for row in cursor.fetchall())
    assert "sandbox_live" in plan, plan
