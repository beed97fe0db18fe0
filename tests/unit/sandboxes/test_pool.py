"""Pools on the memory provider: claim, eviction, wake, capacity, quotas, pre-warming and reconciliation."""

from datetime import datetime, timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction
from sandboxes import pool as pools
from sandboxes import sweeps as pool_sweeps
from sandboxes.errors import CapacityExhausted, PoolDraining, QuotaExceeded, SandboxNotReady, WorkspaceFull
from sandboxes.models import DataEvent, Pool, Quota, Run, Sandbox, Snapshot
from sandboxes.providers.base import Rejected, SandboxSpec, Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import Command
from sandboxes.state import workspace
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db
HOUR = 60 * MINUTE


def sh(script: str) -> Command:
    return Command(argv=["sh", "-c", script], timeout=MINUTE)


def use(lease: Lease, now: datetime = NOW, script: str = "echo kept >f") -> Sandbox:
    execution.exec_command(lease.pk, sh(script), now=now)
    sandbox = pools.find_by_holder(lease.pk)
    assert sandbox
    return sandbox


def read(lease: Lease, now: datetime) -> bytes:
    return execution.exec_command(lease.pk, Command(argv=["cat", "f"], timeout=MINUTE), now=now)[1].stdout


def set_capacity(pool: Pool, capacity: int) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=capacity)


# --- eviction and wake ---------------------------------------------------------------------------------------------------


def test_idle_sandbox_is_evicted_and_the_next_use_wakes_it_with_its_files(grant, pool, memory) -> None:
    lease = grant(sleep_after=5 * MINUTE)
    sandbox = use(lease)
    assert pool_sweeps.evict_idle(now=NOW + 4 * MINUTE).counts == {}
    assert pool_sweeps.evict_idle(now=NOW + 6 * MINUTE).counts == {"put to sleep": 1}
    sandbox.refresh_from_db()
    assert (sandbox.state, memory.list(str(pool.owner))) == ("cold", [])
    assert read(lease, NOW + 7 * MINUTE) == b"kept\n"
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.incarnation, sandbox.source) == ("waiting", 2, "local")


def test_sleep_after_defaults_to_the_environment_type(grant) -> None:
    lease = grant()
    assert lease.sleep_after == 5 * MINUTE  # from its environment type
    assert use(lease).idle_at - NOW >= 5 * MINUTE


def test_unused_sandbox_is_evicted_without_a_snapshot_and_wakes_fresh(grant, memory) -> None:
    lease = grant()
    execution.ensure_sandbox_ready(lease.pk, now=NOW)
    assert pool_sweeps.evict_idle(now=NOW + HOUR).counts == {"put to sleep": 1}
    assert not Snapshot.objects.exists()
    use(lease, NOW + HOUR)
    assert Sandbox.objects.get().source == "fresh"


def test_sandbox_whose_state_cannot_be_stored_stays_alive_with_the_error(grant, memory: MemoryProvider) -> None:
    lease = grant()
    use(lease)
    with memory.fail("get_files", Unavailable("the disk is full")):
        assert pool_sweeps.evict_idle(now=NOW + HOUR).failures
    sandbox = Sandbox.objects.get()
    assert sandbox.state == "waiting" and "the disk is full" in sandbox.last_error
    assert "could not be stored" in sandbox.transitions.first().reason
    assert pool_sweeps.evict_idle(now=NOW + HOUR + timedelta(seconds=30)).counts == {}  # not before its next try
    assert pool_sweeps.evict_idle(now=NOW + HOUR + 2 * MINUTE).counts == {"put to sleep": 1}
    assert read(lease, NOW + 2 * HOUR) == b"kept\n"


def test_store_failure_destroys_nothing(grant, memory: MemoryProvider, monkeypatch) -> None:
    lease = grant()
    use(lease)

    def broken(*args: object) -> None:
        raise StoreError("filesystem", "upload", "bucket away")

    monkeypatch.setattr(get_store(), "upload", broken)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    assert [verb for verb, _ in memory.calls].count("destroy") == 0
    assert Sandbox.objects.get().state == "waiting" and not Snapshot.objects.exists()


def test_failed_destroy_after_storing_is_repeated_without_storing_twice(grant, pool, memory) -> None:
    lease = grant()
    use(lease)
    with memory.fail("destroy", Unavailable("later")):
        pool_sweeps.evict_idle(now=NOW + HOUR)
    assert Sandbox.objects.get().state == "evicting"
    pool_sweeps.recover_stalled(now=NOW + HOUR + MINUTE)
    assert Sandbox.objects.get().state == "cold"
    assert Snapshot.objects.count() == 1 and memory.list(str(pool.owner)) == []
    assert read(lease, NOW + 2 * HOUR) == b"kept\n"


def test_failed_wake_releases_the_place_and_loses_nothing(grant, pool, memory) -> None:
    lease = grant()
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    with memory.fail("create", Unavailable("no memory")), pytest.raises(SandboxNotReady):
        use(lease, NOW + HOUR)
    sweeps.reclaim(now=NOW + HOUR + MINUTE)
    assert read(lease, NOW + HOUR) == b"kept\n"
    assert Pool.objects.get(pk=pool.pk).used == 1


def test_newest_snapshots_of_a_holder_are_retained(grant) -> None:
    lease = grant()
    for hour in (0, 1, 2):
        use(lease, NOW + hour * HOUR, f"echo {hour} >f")
        pool_sweeps.evict_idle(now=NOW + hour * HOUR + 30 * MINUTE)
    assert read(lease, NOW + 3 * HOUR) == b"2\n"
    retained = list(workspace.find_by_holder(lease.pk))
    assert len(retained) == 2 and retained[0] == workspace.find_latest(lease.pk)
    assert set(get_store().list(f"snapshots/{lease.pk}/")) == {f"{snapshot.key}/workspace" for snapshot in retained}


def test_wakes_are_counted_by_source_of_the_state(grant, pool) -> None:
    lease = grant()
    use(lease)
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    use(lease, NOW + HOUR)
    sandbox = Sandbox.objects.get()
    assert (sandbox.warm_hits, sandbox.woken_local, sandbox.woken_cloud, sandbox.woken_fresh) == (1, 1, 0, 0)


def test_missing_stored_state_ends_the_lease_as_lost(grant) -> None:
    lease = grant()
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    snapshot = Snapshot.objects.get()
    workspace.forget_local(snapshot)
    get_store().clear(snapshot.key)
    with pytest.raises(LeaseEnded) as ended:
        use(lease, NOW + HOUR)
    assert ended.value.extra["end_reason"] == "lost"


def test_tampered_stored_copy_is_not_used(grant) -> None:
    lease = grant()
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    snapshot = Snapshot.objects.get()
    workspace.forget_local(snapshot)
    get_store().set(f"{snapshot.key}/workspace", b"something else")
    with pytest.raises(SandboxNotReady, match="does not match its digest"):  # an operator may repair it, so the lease goes on
        use(lease, NOW + HOUR)
    assert DataEvent.objects.get(kind="corrupt").holder == lease.pk


def test_tampered_local_copy_is_reported_and_the_stored_one_is_used(grant) -> None:
    lease = grant()
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    (workspace.local_directory(Snapshot.objects.get()) / "workspace").write_bytes(b"something else")
    assert read(lease, NOW + HOUR) == b"kept\n"
    assert Sandbox.objects.get().source == "cloud"
    assert DataEvent.objects.get(kind="corrupt").holder == lease.pk


@pytest.mark.parametrize("bad", [None, b"something else"])
def test_unreadable_newest_copy_falls_back_to_the_one_before_with_events(grant, bad: bytes | None) -> None:
    lease = grant()
    for hour in (0, 1):
        use(lease, NOW + hour * HOUR, f"echo {hour} >f")
        pool_sweeps.evict_idle(now=NOW + hour * HOUR + 30 * MINUTE)
    newest = workspace.find_latest(lease.pk)
    assert newest
    workspace.forget_local(newest)
    get_store().clear(newest.key) if bad is None else get_store().set(f"{newest.key}/workspace", bad)
    assert read(lease, NOW + 2 * HOUR) == b"0\n"
    assert set(DataEvent.objects.values_list("kind", flat=True)) == {"corrupt", "older_copy"}


# --- cold cleanup -----------------------------------------------------------------------------------------------------


def test_cold_ttl_releases_place_and_local_files_and_the_stored_copy_wakes(grant, pool) -> None:
    lease = grant(ttl=24 * HOUR)
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    assert pool_sweeps.expire_cold(now=NOW + 2 * HOUR).counts == {}
    assert pool_sweeps.expire_cold(now=NOW + 4 * HOUR).counts == {"cold dropped": 1, "local copies removed": 1}
    assert Pool.objects.get(pk=pool.pk).used == 0
    assert not workspace.local_directory(Snapshot.objects.get()).exists()
    assert read(lease, NOW + 5 * HOUR) == b"kept\n"
    assert Sandbox.objects.exclude(state="destroyed").get().source == "cloud"


def test_stored_copy_is_deleted_a_week_after_its_lease_ended(grant) -> None:
    lease = grant(ttl=24 * HOUR)
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    leasing.release(lease.pk, now=NOW + 2 * HOUR)
    sweeps.reclaim(now=NOW + 2 * HOUR)
    sweeps.destroy_cold(now=NOW + 3 * HOUR)
    assert list(get_store().list(f"snapshots/{lease.pk}/"))
    assert sweeps.destroy_cold(now=NOW + 8 * 24 * HOUR).counts == {"stored copies removed": 1}
    assert not list(get_store().list(f"snapshots/{lease.pk}/"))


def test_sandbox_that_wakes_during_the_cold_sweep_is_unchanged(grant, pool) -> None:
    lease = grant(ttl=24 * HOUR)
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    sandbox = Sandbox.objects.get()
    use(lease, NOW + 4 * HOUR)
    assert not eviction.release_cold(sandbox.pk, now=NOW + 4 * HOUR, reason="late")
    assert Sandbox.objects.get().state == "waiting"


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_full_pool_evicts_cold_then_warm_then_waiting(grant, pool, memory) -> None:
    set_capacity(pool, 3)
    waiting, warm, cold = (grant(agent=f"did:plc:{name}", ttl=24 * HOUR) for name in ("waiting", "warm", "cold"))
    use(waiting, NOW)
    use(cold, NOW)
    assert eviction.evict(pools.find_by_holder(cold.pk).pk, now=NOW, reason="test")
    execution.ensure_sandbox_ready(warm.pk, now=NOW + 2 * MINUTE)
    evicted = []
    for number, minute in enumerate((3, 4, 5)):
        use(grant(agent=f"did:plc:new{number}"), NOW + minute * MINUTE)
        holders = set(Sandbox.objects.exclude(state__in=["destroyed"]).values_list("holder", flat=True))
        evicted.append([lease.agent_did for lease in (waiting, warm, cold) if lease.pk not in holders])
    assert evicted == [["did:plc:cold"], ["did:plc:warm", "did:plc:cold"], ["did:plc:waiting", "did:plc:warm", "did:plc:cold"]]
    pool.refresh_from_db()
    assert (pool.used, pool.evicted_cold, pool.evicted_warm, pool.evicted_waiting) == (3, 1, 1, 1)
    assert read(waiting, NOW + HOUR) == b"kept\n"


def test_least_recently_used_sandbox_of_a_tier_is_evicted(grant, pool) -> None:
    set_capacity(pool, 2)
    old, new = grant(agent="did:plc:old"), grant(agent="did:plc:new")
    use(new, NOW)
    use(old, NOW + MINUTE)
    use(new, NOW + 2 * MINUTE)
    use(grant(agent="did:plc:third"), NOW + 3 * MINUTE)
    assert pools.find_by_holder(old.pk) is None and pools.find_by_holder(new.pk)


def test_sandbox_used_after_a_failed_eviction_is_a_candidate_again(grant, pool, memory) -> None:
    lease = grant()
    sandbox = use(lease)
    with memory.fail("get_files", Unavailable("no answer")):
        assert not eviction.evict(sandbox.pk, now=NOW + MINUTE, reason="idle")
    assert eviction.find_victim(pool, agent_did="did:plc:b", now=NOW + MINUTE) is None
    use(lease, NOW + 5 * MINUTE)
    assert eviction.find_victim(pool, agent_did="did:plc:b", now=NOW + 6 * MINUTE) == sandbox


def test_lost_sandbox_is_not_evicted(grant) -> None:
    """A cold sandbox would wake without its unsaved state, and its lease would not end as lost."""
    box = use(grant())
    assert eviction.mark_lost(box, "no such sandbox", now=NOW)
    assert not eviction.evict(box.pk, now=NOW + MINUTE)
    assert Sandbox.objects.get().state == "waiting"


def test_sandbox_that_cannot_be_stored_does_not_block_other_evictions(grant, pool, memory) -> None:
    set_capacity(pool, 2)
    stuck, other = grant(agent="did:plc:stuck"), grant(agent="did:plc:other")
    ref = use(stuck, NOW).ref
    use(other, NOW + MINUTE)

    def refuse(requested_ref: str) -> None:
        if requested_ref == ref:
            raise Unavailable("stuck")

    with memory.before("get_files", refuse):
        use(grant(agent="did:plc:third"), NOW + 2 * MINUTE)
    assert pools.find_by_holder(stuck.pk) and pools.find_by_holder(other.pk) is None


def test_refusal_of_a_full_pool_states_a_remedy(grant, pool, memory) -> None:
    set_capacity(pool, 1)
    lease, other = grant(), grant(agent="did:plc:other")

    def use_other(ref: str) -> None:
        with pytest.raises(CapacityExhausted, match="A lease that ends frees one"):
            use(other)

    with memory.after("exec", use_other):
        use(lease)
    assert Sandbox.objects.count() == 1


# --- quotas -----------------------------------------------------------------------------------------------------------


def test_quota_limits_the_sandboxes_of_an_agent(grant, pool) -> None:
    Quota.objects.create(pool=pool, agent_did="did:plc:ada", most=2)
    for number in (1, 2):
        use(grant(environment=f"e{number}"))
    with pytest.raises(QuotaExceeded, match="quota is 2"):
        use(grant(environment="e3"))
    leasing.release(Lease.objects.get(environment_id="e1").pk, now=NOW)
    sweeps.reclaim(now=NOW)
    use(Lease.objects.get(environment_id="e3"))
    assert Quota.objects.get().used == 2


def test_guarantee_protects_against_other_agents(grant, pool) -> None:
    set_capacity(pool, 2)
    Quota.objects.create(pool=pool, agent_did="did:plc:ada", guaranteed=2)
    first, second = grant(environment="e1"), grant(environment="e2")
    use(first)
    use(second)
    with pytest.raises(CapacityExhausted):
        use(grant(agent="did:plc:guest"))
    assert [box.state for lease in (first, second) if (box := pools.find_by_holder(lease.pk))] == ["waiting", "waiting"]


def test_guarantee_raised_during_an_eviction_keeps_the_place(grant, pool, at_checkpoint) -> None:
    set_capacity(pool, 1)
    quota = Quota.objects.create(pool=pool, agent_did="did:plc:ada")
    lease = grant()
    box = use(lease)
    at_checkpoint("persisted", lambda: Quota.objects.filter(pk=quota.pk).update(guaranteed=1))
    with pytest.raises(CapacityExhausted):
        use(grant(agent="did:plc:guest"))
    box.refresh_from_db()
    quota.refresh_from_db()
    assert (box.state, quota.used) == ("cold", 1)


def test_sandboxes_above_the_guarantee_are_evicted(grant, pool) -> None:
    set_capacity(pool, 2)
    Quota.objects.create(pool=pool, agent_did="did:plc:ada", guaranteed=1)
    first, second = grant(environment="e1"), grant(environment="e2")
    use(first, NOW)
    use(second, NOW + MINUTE)
    use(grant(agent="did:plc:guest"), NOW + 2 * MINUTE)
    assert pools.find_by_holder(first.pk) is None and pools.find_by_holder(second.pk)
    assert Quota.objects.get(agent_did="did:plc:ada").used == 1


def test_agent_may_evict_its_own_sandbox_within_its_guarantee(grant, pool) -> None:
    set_capacity(pool, 1)
    Quota.objects.create(pool=pool, agent_did="did:plc:ada", guaranteed=1)
    first = grant(environment="e1")
    use(first)
    use(grant(environment="e2"), NOW + MINUTE)
    assert pools.find_by_holder(first.pk) is None


# --- pre-warming ------------------------------------------------------------------------------------------------------


def set_warm_target(pool: Pool, target: int) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=target)
    pool.refresh_from_db()


def test_claim_takes_a_prewarmed_sandbox_and_writes_its_own_files(grant, pool, memory) -> None:
    set_warm_target(pool, 2)
    assert pool_sweeps.warm_pools(now=NOW).counts == {"warmed up": 2}
    lease = grant()
    execution.exec_command(lease.pk, Command(argv=["cat", "config.json"], timeout=MINUTE, env={"SECRET": "s"}), now=NOW)
    sandbox = pools.find_by_holder(lease.pk)
    assert sandbox and sandbox.agent_did == "did:plc:ada" and sandbox.idle_at
    assert b"did:plc:ada" in bytes(Run.objects.get().stdout)
    assert [verb for verb, _ in memory.calls].count("create") == 2
    assert pool_sweeps.warm_pools(now=NOW).counts == {"warmed up": 1}


def test_holder_with_stored_state_gets_no_prewarmed_sandbox(grant, pool) -> None:
    lease = grant(ttl=24 * HOUR)
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    pool_sweeps.expire_cold(now=NOW + 4 * HOUR)
    set_warm_target(pool, 1)
    pool_sweeps.warm_pools(now=NOW + 4 * HOUR)
    assert read(Lease.objects.get(pk=lease.pk), NOW + 5 * HOUR) == b"kept\n"


def test_circuit_breaker_opens_after_three_failed_starts(pool, memory) -> None:
    set_warm_target(pool, 1)
    with memory.fail("create", Rejected("no such image"), times=99):
        result = pool_sweeps.warm_pools(now=NOW)
        assert len(result.failures) == 4 and "paused until" in result.failures[-1]
        calls = len(memory.calls)
        pool_sweeps.warm_pools(now=NOW + timedelta(seconds=30))
        assert len(memory.calls) == calls
    sweeps.reclaim(now=NOW + HOUR)
    assert pool_sweeps.warm_pools(now=NOW + HOUR).counts == {"warmed up": 1}
    pool.refresh_from_db()
    assert (pool.warm_failures, pool.warm_paused_until, pool.used) == (0, None, 1)


def test_surplus_sandboxes_are_destroyed(pool) -> None:
    set_warm_target(pool, 3)
    pool_sweeps.warm_pools(now=NOW)
    set_warm_target(pool, 1)
    assert pool_sweeps.warm_pools(now=NOW).counts == {"surplus destroyed": 2}
    Pool.objects.filter(pk=pool.pk).update(image="newer:1")
    assert pool_sweeps.warm_pools(now=NOW).counts == {"surplus destroyed": 1, "warmed up": 1}


def test_draining_pool_grants_no_prewarmed_sandbox_and_destroys_it(grant, pool) -> None:
    set_warm_target(pool, 1)
    pool_sweeps.warm_pools(now=NOW)
    pools.set_draining(pool, draining=True)
    with pytest.raises(PoolDraining):
        use(grant())
    assert pool_sweeps.warm_pools(now=NOW).counts == {"surplus destroyed": 1}


def test_prewarmed_sandbox_is_destroyed_for_capacity(grant, pool) -> None:
    set_capacity(pool, 1)
    set_warm_target(pool, 1)
    pool_sweeps.warm_pools(now=NOW)
    set_warm_target(pool, 0)
    use(grant())
    assert Pool.objects.get(pk=pool.pk).used == 1


# --- reconcile --------------------------------------------------------------------------------------------------------


def reconcile(now: datetime) -> dict[str, int]:
    return sweeps.reconcile(now=now, grace=2 * MINUTE).counts


def test_listed_sandbox_with_a_row_is_unchanged(grant, pool) -> None:
    lease = grant()
    use(lease)
    assert reconcile(NOW) == {"kept": 1}
    assert read(lease, NOW) == b"kept\n"


def test_vanished_sandbox_with_unsaved_state_ends_its_lease_as_lost(grant, pool, memory) -> None:
    lost, other = grant(), grant(agent="did:plc:b")
    memory.vanish(use(lost).ref)
    use(other)
    assert reconcile(NOW) == {"kept": 1, "lost": 1, "leases ended as lost": 1}
    lost.refresh_from_db()
    assert (lost.status, lost.end_reason) == ("expired", "lost")


def test_vanished_sandbox_without_unsaved_state_is_cold(grant, pool, memory) -> None:
    lease = grant()
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    woken = execution.ensure_sandbox_ready(lease.pk, now=NOW + HOUR)
    use(grant(agent="did:plc:b"), NOW + HOUR)
    memory.vanish(woken.ref)
    assert reconcile(NOW + HOUR) == {"kept": 1, "found cold": 1}
    assert read(lease, NOW + HOUR) == b"kept\n"


def test_empty_listing_changes_nothing(grant, pool, memory) -> None:
    lease = grant()
    memory.vanish(use(lease).ref)
    result = sweeps.reconcile(now=NOW, grace=2 * MINUTE)
    assert result.counts == {} and "lists nothing" in result.failures[0]
    lease.refresh_from_db()
    assert lease.status == "active"


def test_failed_listing_changes_nothing(grant, pool, memory) -> None:
    lease = grant()
    use(lease)
    with memory.fail("list", Unavailable("timeout")):
        assert sweeps.reconcile(now=NOW, grace=2 * MINUTE).failures
    assert pools.find_by_holder(lease.pk)


def test_sandbox_of_an_earlier_incarnation_is_destroyed_as_an_orphan(grant, pool, memory) -> None:
    lease = grant()
    old = use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    use(lease, NOW + HOUR)
    memory.create(SandboxSpec(name=old.name, owner=str(pool.owner)))  # a zombie of the first incarnation
    created_at = memory.inspect(old.name).created_at
    assert reconcile(created_at + HOUR)["orphans destroyed"] == 1
    assert [listed.name for listed in memory.list(str(pool.owner))] == [pools.find_by_holder(lease.pk).name]


# --- counting, measuring, draining ------------------------------------------------------------------------------------


def test_drifted_counters_are_corrected_and_reported(grant, pool) -> None:
    use(grant())
    Pool.objects.filter(pk=pool.pk).update(used=7)
    Quota.objects.filter(pool=pool).update(used=5)
    result = pool_sweeps.recount(now=NOW)
    assert len(result.failures) == 2 and "counter was 7, but it has 1 rows" in result.failures[0]
    assert pool_sweeps.recount(now=NOW).failures == []
    assert Pool.objects.get(pk=pool.pk).used == Quota.objects.get(pool=pool).used == 1


def test_workspace_over_its_limit_refuses_execs_until_files_are_deleted(grant, pool) -> None:
    Pool.objects.filter(pk=pool.pk).update(workspace_limit_mib=1)
    lease = grant()
    use(lease, script="head -c 3000000 /dev/zero >big")
    assert pool_sweeps.measure_workspaces(now=NOW + MINUTE).counts == {"over the limit": 1}
    with pytest.raises(WorkspaceFull):
        use(lease, NOW + MINUTE)
    sandbox = pools.find_by_holder(lease.pk)
    remove = Command(argv=["delete", "big"], timeout=MINUTE, kind="file")
    execution.call_in_sandbox(lease.pk, remove, lambda p, s: p.remove_file(s.ref, "/workspace/big"), now=NOW + MINUTE)
    use(lease, NOW + MINUTE)
    sandbox.refresh_from_db()
    assert sandbox.workspace_bytes < 1 << 20


def test_draining_pool_refuses_new_sandboxes_and_existing_leases_go_on(grant, pool) -> None:
    lease = grant()
    use(lease)
    pool_sweeps.evict_idle(now=NOW + HOUR)
    newcomer = grant(agent="did:plc:new")
    assert pools.set_draining(pool, draining=True)
    with pytest.raises(PoolDraining):
        use(newcomer, NOW + HOUR)
    assert read(lease, NOW + HOUR) == b"kept\n"
    assert pools.set_draining(pool, draining=False)
    use(newcomer, NOW + HOUR)
