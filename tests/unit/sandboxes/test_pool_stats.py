"""Statistics of pools: each event is counted once, before and after its sandbox is destroyed."""

from datetime import datetime

import pytest
from django.db import connection

from leases import execution, leasing, sweeps
from sandboxes import pool_stats
from sandboxes.models import Pool, Sandbox, Transition
from sandboxes.providers.errors import Rejected
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, run, update_pool

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
HOUR = 60 * MINUTE


def stats_of(pool: Pool, now: datetime = NOW) -> pool_stats.PoolStats:
    return next(stats for stats in pool_stats.collect_pool_stats(now=now) if stats.pk == pool.pk)


def counters(pool: Pool) -> dict[str, int]:
    """Cumulative counters of a pool, without zeros."""
    stats = stats_of(pool)
    return {name: number for name in pool_stats.POOL_COUNTER_FIELDS if (number := getattr(stats, name))}


def test_new_pool_has_only_its_capacity(pool) -> None:
    stats = stats_of(pool)
    assert (stats.capacity, stats.used, stats.total, stats.woken) == (100, 0, 0, 0)
    assert counters(pool) == {}


def test_sandboxes_are_counted_by_state(grant, pool, memory) -> None:
    cold, warm, waiting, gone, stuck = (grant(environment=f"e{number}") for number in range(5))
    for lease in (cold, waiting, gone, stuck):
        run(lease)
    execution.ensure_sandbox_ready(warm.pk, now=NOW)
    evict(cold)
    leasing.release(gone.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    leasing.release(stuck.pk, now=NOW)
    running: list[pool_stats.PoolStats] = []
    with memory.before("exec", lambda ref: running.append(stats_of(pool))):
        run(warm)
    stats = running[0]
    assert (stats.cold, stats.running, stats.waiting, stats.destroying) == (1, 1, 1, 1)
    assert (stats.warming, stats.warm, stats.evicting) == (0, 0, 0)
    assert stats.used == stats.total == 4


def test_counters_are_the_same_before_and_after_the_sandbox_is_destroyed(grant, pool) -> None:
    lease = grant(ttl=24 * HOUR)
    run(lease)
    run(lease)
    passes.evict_idle(now=NOW + HOUR)
    run(lease, now=NOW + HOUR)
    expected = {"warm_hits": 1, "woken_local": 1, "slept": 1}
    assert counters(pool) == expected
    leasing.release(lease.pk, now=NOW + HOUR)
    assert counters(pool) == expected
    sweeps.reclaim(now=NOW + HOUR)
    assert (counters(pool), stats_of(pool).total) == (expected, 0)


def test_wake_after_the_place_was_released_counts_as_cloud(grant, pool) -> None:
    lease = grant(ttl=24 * HOUR)
    run(lease)
    passes.evict_idle(now=NOW + HOUR)
    passes.expire_cold(now=NOW + 4 * HOUR)
    run(lease, now=NOW + 4 * HOUR)
    assert counters(pool) == {"woken_cloud": 1, "slept": 1}
    assert stats_of(pool).woken == 1


def test_first_start_is_no_wake_and_a_wake_without_stored_state_is_fresh(grant, pool) -> None:
    lease = grant()
    execution.ensure_sandbox_ready(lease.pk, now=NOW)
    assert counters(pool) == {}
    passes.evict_idle(now=NOW + HOUR)
    execution.ensure_sandbox_ready(lease.pk, now=NOW + HOUR)
    assert counters(pool) == {"woken_fresh": 1, "slept": 1}


def test_counters_survive_a_place_counter_that_drifted_to_zero(grant, pool) -> None:
    lease = grant()
    run(lease)
    run(lease)
    update_pool(pool, used=0)
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    assert (counters(pool), stats_of(pool).used) == ({"warm_hits": 1}, 0)


def test_prewarmed_sandboxes_are_ready_until_claimed(grant, pool) -> None:
    update_pool(pool, warm_target=2)
    passes.warm_pools(now=NOW)
    assert (stats_of(pool).warm_target, stats_of(pool).warm_ready, stats_of(pool).warm) == (2, 2, 2)
    run(grant())
    assert (stats_of(pool).warm_ready, counters(pool)) == (1, {"claimed_warm": 1})
    update_pool(pool, image="another")
    assert (stats_of(pool).warm_ready, stats_of(pool).warm) == (0, 1)


def test_open_circuit_breaker_has_its_end_and_its_error(pool, memory) -> None:
    update_pool(pool, warm_target=1)
    with memory.fail("create", Rejected("no such image"), times=99):
        passes.warm_pools(now=NOW)
    stats = stats_of(pool)
    assert stats.warm_paused_until and stats.warm_paused_until > NOW and "no such image" in stats.warm_error
    assert stats_of(pool, stats.warm_paused_until).warm_paused_until is None


def test_quarantined_stalled_and_lost_sandboxes_are_counted(grant, pool) -> None:
    for number in range(4):
        run(grant(environment=f"e{number}"), now=NOW + number * MINUTE)
    quarantined, stalled, lost, _ = Sandbox.objects.order_by("created_at")
    overdue = {"state": "destroying", "deadline_at": NOW, "idle_at": None}
    Sandbox.objects.filter(pk=quarantined.pk).update(**overdue, quarantined_at=NOW)
    Sandbox.objects.filter(pk=stalled.pk).update(**overdue)
    Sandbox.objects.filter(pk=lost.pk).update(lost_at=NOW)
    stats = stats_of(pool, NOW + HOUR)
    assert (stats.quarantined, stats.stalled, stats.lost) == (1, 1, 1)
    assert stats_of(pool, NOW + MINUTE).stalled == 0  # within STALLED_AFTER
    assert HOUR - 3 * MINUTE < stats.oldest_waiting <= HOUR - 2 * MINUTE
    assert stats_of(pool, NOW - HOUR).oldest_waiting.total_seconds() == 0  # a clock that was set back


def test_abandoned_run_makes_its_sandbox_stalled(grant, pool, crash_at) -> None:
    lease = grant()
    with crash_at("run opened"):
        run(lease)
    assert stats_of(pool, NOW + MINUTE).stalled == 0
    assert stats_of(pool, NOW + HOUR).stalled == 1


def test_sum_adds_up_the_pools(grant, pool) -> None:
    other = Pool.objects.create(name="other", provider="memory", capacity=5, warm_target=1)
    run(grant())
    run(grant(environment="e2", pool=other.name), now=NOW - HOUR)
    all_stats = pool_stats.collect_pool_stats(now=NOW)
    assert [stats.name for stats in all_stats] == sorted(stats.name for stats in all_stats)
    total = pool_stats.sum_stats(all_stats)
    assert total.capacity == sum(stats.capacity for stats in all_stats)
    assert (total.used, total.total, total.waiting, total.warm_target) == (2, 2, 2, 1)
    assert total.oldest_waiting == stats_of(other).oldest_waiting > stats_of(pool).oldest_waiting
    assert pool_stats.sum_stats([]).total == 0


def test_statistics_take_three_statements_and_read_no_history(grant, pool, django_assert_num_queries) -> None:
    history = [
        Sandbox(
            pool=pool, state="destroyed", state_since=NOW, last_used_at=NOW, created_at=NOW, destroyed_at=NOW,
            provider="memory", memory_mib=1, millicpus=1, pids=1,
        ) for _ in range(2000)
    ]  # fmt: skip
    Sandbox.objects.bulk_create(history)
    Transition.objects.bulk_create(Transition(sandbox=old, to="destroyed", code="no_process", at=NOW - HOUR) for old in history)
    run(grant())
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    with django_assert_num_queries(3) as captured:
        pool_stats.collect_pool_stats(now=NOW)
        recent = pool_stats.count_recent_transitions(now=NOW)
    assert recent == {(pool.name, "warming", "requested"): 1, (pool.name, "warm", "ready"): 1}
    for query, index in ((0, "sandbox_live"), (2, "transition_not_of_runs")):
        plan = explain(captured.captured_queries[query]["sql"])
        assert index in plan, plan


def explain(statement: str) -> str:
    verb = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
    with connection.cursor() as cursor:
        cursor.execute(f"{verb} {statement}")
        return "\n".join(str(row) for row in cursor.fetchall())
