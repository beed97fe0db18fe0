"""Pools on the memory provider: claim, eviction, wake, capacity, quotas, pre-warming and reconciliation."""

from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from leases import execution, leasing, sweeps
from leases.models import EnvironmentType, Lease
from sandboxes import eviction
from sandboxes.errors import CapacityExhausted, PoolDraining, QuotaExceeded, SandboxNotReady, WorkspaceFull
from sandboxes.models import DataEvent, Pool, Quota, Run, Sandbox, Snapshot
from sandboxes.pool import allocation
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.runs.operations import Command
from sandboxes.state import workspace
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import measurements, passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, get_sandbox, read, run, update_pool, write

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
HOUR = 60 * MINUTE


@pytest.fixture
def lease(grant) -> Lease:
    granted: Lease = grant(ttl=24 * HOUR)
    write(granted)
    return granted


@pytest.fixture
def asleep(lease) -> Lease:
    """A lease whose sandbox was evicted an hour later."""
    assert passes.evict_idle(now=NOW + HOUR).counts == {"put to sleep": 1}
    return lease


def sleep_hourly(lease: Lease, *hours: int) -> None:
    """At each of these hours write its number, then evict the sandbox."""
    for hour in hours:
        write(lease, str(hour), now=NOW + hour * HOUR)
        passes.evict_idle(now=NOW + hour * HOUR + 30 * MINUTE)


# --- eviction and wake ---------------------------------------------------------------------------------------------------


def test_idle_sandbox_is_evicted_and_the_next_use_wakes_it_with_its_files(grant, pool, memory) -> None:
    lease = grant(sleep_after=7 * MINUTE)
    sandbox = write(lease)
    assert passes.evict_idle(now=NOW + 6 * MINUTE).counts == {}
    assert passes.evict_idle(now=NOW + 8 * MINUTE).counts == {"put to sleep": 1}
    sandbox.refresh_from_db()
    assert (sandbox.state, memory.list(str(pool.owner))) == ("cold", [])
    assert read(lease, now=NOW + 9 * MINUTE) == "kept"
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.incarnation, sandbox.source) == ("waiting", 2, "local")


def test_sleep_after_is_the_environment_types_else_of_the_settings(lease, grant, settings) -> None:
    assert lease.sleep_after == 5 * MINUTE
    settings.IDLE_TIMEOUT = 40 * MINUTE
    assert grant(environment="e2").sleep_after == 40 * MINUTE
    settings.SANDBOX_SLEEP_AFTER = 8 * MINUTE
    assert grant(environment="e3").sleep_after == 8 * MINUTE
    EnvironmentType.objects.filter(name="catan").update(sleep_after="7m")
    assert grant(environment="e4").sleep_after == 7 * MINUTE
    assert grant(environment="e5", sleep_after=6 * MINUTE).sleep_after == 6 * MINUTE
    assert get_sandbox(lease).idle_at - NOW >= 5 * MINUTE


def test_unused_sandbox_is_evicted_without_a_snapshot_and_wakes_fresh(grant) -> None:
    lease = grant()
    execution.ensure_sandbox_ready(lease.pk, now=NOW)
    assert passes.evict_idle(now=NOW + HOUR).counts == {"put to sleep": 1}
    assert not Snapshot.objects.exists()
    assert write(lease, now=NOW + HOUR).source == "fresh"


def test_sandbox_whose_state_cannot_be_stored_stays_alive_with_the_error(lease, memory) -> None:
    with memory.fail("get_files", Unavailable("the disk is full")):
        assert passes.evict_idle(now=NOW + HOUR).failures
    sandbox = Sandbox.objects.get()
    assert sandbox.state == "waiting" and "the disk is full" in sandbox.last_error
    assert "could not be stored" in sandbox.transitions.first().reason
    assert passes.evict_idle(now=NOW + HOUR + timedelta(seconds=30)).counts == {}  # not before its next try
    assert passes.evict_idle(now=NOW + HOUR + 2 * MINUTE).counts == {"put to sleep": 1}
    assert read(lease, now=NOW + 2 * HOUR) == "kept"


def test_store_failure_destroys_nothing(lease, memory, monkeypatch) -> None:
    def broken(*args: object) -> None:
        raise StoreError("filesystem", "upload", "bucket away")

    monkeypatch.setattr(get_store(), "upload", broken)
    passes.evict_idle(now=NOW + HOUR)
    assert [verb for verb, _ in memory.calls].count("destroy") == 0
    assert Sandbox.objects.get().state == "waiting" and not Snapshot.objects.exists()


def test_failed_destroy_after_storing_is_repeated_without_storing_twice(lease, pool, memory) -> None:
    with memory.fail("destroy", Unavailable("later")):
        passes.evict_idle(now=NOW + HOUR)
    assert (get_sandbox(lease).state, get_sandbox(lease).slept) == ("evicting", 0)
    passes.recover_stalled(now=NOW + HOUR + MINUTE)
    assert (get_sandbox(lease).state, get_sandbox(lease).slept) == ("cold", 1)
    assert Snapshot.objects.count() == 1 and memory.list(str(pool.owner)) == []
    assert read(lease, now=NOW + 2 * HOUR) == "kept"


def test_failed_wake_releases_the_place_and_loses_nothing(asleep, pool, memory) -> None:
    with memory.fail("create", Unavailable("no memory")), pytest.raises(SandboxNotReady):
        run(asleep, now=NOW + HOUR)
    sweeps.reclaim(now=NOW + HOUR + MINUTE)
    assert read(asleep, now=NOW + HOUR) == "kept"
    assert Pool.objects.get(pk=pool.pk).used == 1


def test_newest_snapshots_of_a_holder_are_retained(lease) -> None:
    sleep_hourly(lease, 0, 1, 2)
    assert read(lease, now=NOW + 3 * HOUR) == "2"
    retained = list(workspace.find_by_holder(lease.pk))
    assert len(retained) == 2 and retained[0] == workspace.find_latest(lease.pk)
    assert set(get_store().list(f"snapshots/{lease.pk}/")) == {f"{snapshot.key}/workspace" for snapshot in retained}


def test_tampered_stored_copy_is_not_used(asleep) -> None:
    snapshot = Snapshot.objects.get()
    workspace.forget_local(snapshot)
    get_store().set(f"{snapshot.key}/workspace", b"something else")
    with pytest.raises(SandboxNotReady, match="does not match its digest"):  # an operator may repair it, so the lease goes on
        run(asleep, now=NOW + HOUR)
    assert DataEvent.objects.get(kind="corrupt").holder == asleep.pk


def test_tampered_local_copy_is_reported_and_the_stored_one_is_used(asleep) -> None:
    (workspace.local_directory(Snapshot.objects.get()) / "workspace").write_bytes(b"something else")
    assert read(asleep, now=NOW + HOUR) == "kept"
    assert Sandbox.objects.get().source == "cloud"
    assert DataEvent.objects.get(kind="corrupt").holder == asleep.pk


def test_corrupt_newest_copy_falls_back_to_the_one_before_with_events(lease) -> None:
    sleep_hourly(lease, 0, 1)
    newest = workspace.find_latest(lease.pk)
    workspace.forget_local(newest)
    get_store().set(f"{newest.key}/workspace", b"something else")
    assert read(lease, now=NOW + 2 * HOUR) == "0"
    assert set(DataEvent.objects.values_list("kind", flat=True)) == {"corrupt", "older_copy"}


# --- cold cleanup -----------------------------------------------------------------------------------------------------


def test_cold_ttl_releases_place_and_local_files_and_the_stored_copy_wakes(asleep, pool) -> None:
    assert passes.expire_cold(now=NOW + 2 * HOUR).counts == {}
    assert passes.expire_cold(now=NOW + 4 * HOUR).counts == {"cold dropped": 1, "local copies removed": 1}
    assert Pool.objects.get(pk=pool.pk).used == 0
    assert not workspace.local_directory(Snapshot.objects.get()).exists()
    assert read(asleep, now=NOW + 5 * HOUR) == "kept"
    assert Sandbox.objects.exclude(state="destroyed").get().source == "cloud"


def test_stored_copy_is_deleted_a_week_after_its_lease_ended(asleep) -> None:
    leasing.release(asleep.pk, now=NOW + 2 * HOUR)
    sweeps.reclaim(now=NOW + 2 * HOUR)
    sweeps.destroy_cold(now=NOW + 3 * HOUR)
    assert list(get_store().list(f"snapshots/{asleep.pk}/"))
    assert sweeps.destroy_cold(now=NOW + 8 * 24 * HOUR).counts == {"stored copies removed": 1}
    assert not list(get_store().list(f"snapshots/{asleep.pk}/"))


def test_sandbox_that_wakes_during_the_cold_sweep_is_unchanged(asleep) -> None:
    sandbox = write(asleep, now=NOW + 4 * HOUR)
    assert not eviction.release_cold(sandbox.pk, now=NOW + 4 * HOUR, reason="late")
    assert Sandbox.objects.get().state == "waiting"


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_full_pool_evicts_cold_then_warm_then_waiting(grant, pool) -> None:
    update_pool(pool, capacity=3)
    waiting, warm, cold = (grant(agent=f"did:plc:{name}", ttl=24 * HOUR) for name in ("waiting", "warm", "cold"))
    write(waiting)
    write(cold)
    evict(cold)
    execution.ensure_sandbox_ready(warm.pk, now=NOW + 2 * MINUTE)
    evicted = []
    for number, minute in enumerate((3, 4, 5)):
        run(grant(agent=f"did:plc:new{number}"), now=NOW + minute * MINUTE)
        holders = set(Sandbox.objects.exclude(state="destroyed").values_list("holder", flat=True))
        evicted.append([lease.agent_did for lease in (waiting, warm, cold) if lease.pk not in holders])
    assert evicted == [["did:plc:cold"], ["did:plc:warm", "did:plc:cold"], ["did:plc:waiting", "did:plc:warm", "did:plc:cold"]]
    pool.refresh_from_db()
    assert (pool.used, pool.evicted_cold, pool.evicted_warm, pool.evicted_waiting) == (3, 1, 1, 1)
    assert read(waiting, now=NOW + HOUR) == "kept"


def test_least_recently_used_sandbox_of_a_tier_is_evicted(grant, pool) -> None:
    update_pool(pool, capacity=2)
    old, new = grant(agent="did:plc:old"), grant(agent="did:plc:new")
    for minute, lease in enumerate((new, old, new, grant(agent="did:plc:third"))):
        run(lease, now=NOW + minute * MINUTE)
    assert allocation.find_by_holder(old.pk) is None and allocation.find_by_holder(new.pk)


def test_sandbox_used_after_a_failed_eviction_is_a_candidate_again(lease, pool, memory) -> None:
    sandbox = get_sandbox(lease)
    with memory.fail("get_files", Unavailable("no answer")):
        assert not eviction.evict(sandbox.pk, now=NOW + MINUTE, reason="idle")
    assert eviction.find_victim(pool, agent_did="did:plc:b", now=NOW + MINUTE) is None
    run(lease, now=NOW + 5 * MINUTE)
    assert eviction.find_victim(pool, agent_did="did:plc:b", now=NOW + 6 * MINUTE) == sandbox


def test_lost_sandbox_is_not_evicted(lease) -> None:
    """A cold sandbox would wake without its unsaved state, and its lease would not end as lost."""
    box = get_sandbox(lease)
    assert eviction.mark_lost(box, "no such sandbox", now=NOW)
    assert not eviction.evict(box.pk, now=NOW + MINUTE)
    assert Sandbox.objects.get().state == "waiting"


def test_sandbox_that_cannot_be_stored_does_not_block_other_evictions(lease, grant, pool, memory) -> None:
    update_pool(pool, capacity=2)
    other, ref = grant(agent="did:plc:other"), get_sandbox(lease).ref
    write(other, now=NOW + MINUTE)

    def refuse(requested_ref: str) -> None:
        if requested_ref == ref:
            raise Unavailable("stuck")

    with memory.before("get_files", refuse):
        run(grant(agent="did:plc:third"), now=NOW + 2 * MINUTE)
    assert allocation.find_by_holder(lease.pk) and allocation.find_by_holder(other.pk) is None


def test_refusal_of_a_full_pool_states_a_remedy(grant, pool, memory) -> None:
    update_pool(pool, capacity=1)
    lease, other = grant(), grant(agent="did:plc:other")

    def use_other(ref: str) -> None:
        with pytest.raises(CapacityExhausted, match="A lease that ends frees a place"):
            run(other)

    with memory.after("exec", use_other):
        run(lease)
    assert Sandbox.objects.count() == 1


def test_a_first_start_a_wake_and_a_confirmed_destroy_are_logged(grant) -> None:
    lease = grant()
    with capture_logs() as lines:
        write(lease)
        evict(lease)
        read(lease)
        leasing.release(lease.pk, now=NOW)
        sweeps.reclaim(now=NOW)
    logged = [line for line in lines if line["event"] in ("sandbox created", "sleep", "wake", "sandbox destroyed")]
    assert [line["event"] for line in logged] == ["sandbox created", "sleep", "wake", "sandbox destroyed"]
    assert {line["sandbox"] for line in logged} == {str(Sandbox.objects.get().pk)}
    assert {line.get("provider", "memory") for line in logged} == {"memory"}


# --- quotas -----------------------------------------------------------------------------------------------------------


def test_quota_limits_the_sandboxes_of_an_agent(grant, pool) -> None:
    Quota.objects.create(pool=pool, agent_did="did:plc:ada", most=2)
    first, second, third = (grant(environment=f"e{number}") for number in (1, 2, 3))
    run(first)
    run(second)
    with pytest.raises(QuotaExceeded, match="quota is 2"):
        run(third)
    leasing.release(first.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    run(third)
    assert Quota.objects.get().used == 2


@pytest.mark.parametrize("warm_target", [0, 1])
def test_reached_quota_releases_the_coldest_own_sandbox_and_no_other(grant, pool, warm_target: int) -> None:
    Quota.objects.create(pool=pool, agent_did="did:plc:ada", most=2)
    others, first, second, third = grant(agent="did:plc:other"), *(grant(environment=f"e{number}") for number in (1, 2, 3))
    for minute, lease in enumerate((others, first, second)):
        write(lease, str(minute), now=NOW + minute * MINUTE)
        evict(lease, now=NOW + minute * MINUTE)
    update_pool(pool, warm_target=warm_target)
    passes.warm_pools(now=NOW)
    run(third, now=NOW + 3 * MINUTE)
    assert [bool(allocation.find_by_holder(lease.pk)) for lease in (others, first, second, third)] == [True, False, True, True]
    assert Quota.objects.get(agent_did="did:plc:ada").used == 2
    assert read(first, now=NOW + 4 * MINUTE) == "1"  # in place of the second, from its stored state
    assert allocation.find_by_holder(second.pk) is None
    with pytest.raises(QuotaExceeded, match="None of them is cold"):
        run(second, now=NOW + 5 * MINUTE)
    pool.refresh_from_db()
    assert pool.evicted_cold == 2


@pytest.mark.parametrize(("guaranteed", "evicted"), [(2, 0), (1, 1)])
def test_guarantee_protects_against_other_agents(grant, pool, guaranteed: int, evicted: int) -> None:
    update_pool(pool, capacity=2)
    Quota.objects.create(pool=pool, agent_did="did:plc:ada", guaranteed=guaranteed)
    leases, guest = [grant(environment="e1"), grant(environment="e2")], grant(agent="did:plc:guest")
    for minute, lease in enumerate(leases):
        run(lease, now=NOW + minute * MINUTE)
    if evicted:  # the least recently used of those above the guarantee
        run(guest, now=NOW + 2 * MINUTE)
    else:
        with pytest.raises(CapacityExhausted):
            run(guest, now=NOW + 2 * MINUTE)
    assert [bool(allocation.find_by_holder(lease.pk)) for lease in leases] == [not evicted, True]
    assert set(Sandbox.objects.exclude(state="destroyed").values_list("state", flat=True)) == {"waiting"}
    assert Quota.objects.get(agent_did="did:plc:ada").used == 2 - evicted


def test_guarantee_raised_during_an_eviction_keeps_the_place(lease, grant, pool, at_checkpoint) -> None:
    update_pool(pool, capacity=1)
    quota = Quota.objects.get(agent_did="did:plc:ada")
    at_checkpoint("persisted", lambda: Quota.objects.filter(pk=quota.pk).update(guaranteed=1))
    with pytest.raises(CapacityExhausted):
        run(grant(agent="did:plc:guest"))
    quota.refresh_from_db()
    pool.refresh_from_db()
    assert (get_sandbox(lease).state, quota.used, pool.evicted_waiting) == ("cold", 1, 0)


def test_agent_may_evict_its_own_sandbox_within_its_guarantee(lease, grant, pool) -> None:
    update_pool(pool, capacity=1)
    Quota.objects.filter(agent_did="did:plc:ada").update(guaranteed=1)
    run(grant(environment="e2"), now=NOW + MINUTE)
    assert allocation.find_by_holder(lease.pk) is None


# --- pre-warming ------------------------------------------------------------------------------------------------------


def test_claim_takes_a_prewarmed_sandbox_and_writes_its_own_files(grant, pool, memory) -> None:
    update_pool(pool, warm_target=2)
    assert passes.warm_pools(now=NOW).counts == {"warmed up": 2}
    lease = grant()
    run(lease, "cat", "config.json", env={"SECRET": "s"})
    assert get_sandbox(lease).agent_did == "did:plc:ada" and get_sandbox(lease).idle_at
    assert b"did:plc:ada" in bytes(Run.objects.get().stdout)
    assert [verb for verb, _ in memory.calls].count("create") == 2
    assert passes.warm_pools(now=NOW).counts == {"warmed up": 1}


def test_holder_with_stored_state_gets_no_prewarmed_sandbox(asleep, pool) -> None:
    passes.expire_cold(now=NOW + 4 * HOUR)
    update_pool(pool, warm_target=1)
    passes.warm_pools(now=NOW + 4 * HOUR)
    assert read(asleep, now=NOW + 5 * HOUR) == "kept"


def test_circuit_breaker_opens_after_three_failed_starts(pool, memory) -> None:
    update_pool(pool, warm_target=1)
    with memory.fail("create", Rejected("no such image"), times=99):
        result = passes.warm_pools(now=NOW)
        assert len(result.failures) == 4 and "paused until" in result.failures[-1]
        calls = len(memory.calls)
        passes.warm_pools(now=NOW + timedelta(seconds=30))
        assert len(memory.calls) == calls
    sweeps.reclaim(now=NOW + HOUR)
    assert passes.warm_pools(now=NOW + HOUR).counts == {"warmed up": 1}
    pool.refresh_from_db()
    assert (pool.warm_failures, pool.warm_paused_until, pool.used) == (0, None, 1)


def test_surplus_sandboxes_are_destroyed(pool) -> None:
    update_pool(pool, warm_target=3)
    passes.warm_pools(now=NOW)
    update_pool(pool, warm_target=1)
    assert passes.warm_pools(now=NOW).counts == {"surplus destroyed": 2}
    update_pool(pool, image="newer:1")
    assert passes.warm_pools(now=NOW).counts == {"surplus destroyed": 1, "warmed up": 1}


def test_draining_pool_grants_no_prewarmed_sandbox_and_destroys_it(grant, pool) -> None:
    update_pool(pool, warm_target=1)
    passes.warm_pools(now=NOW)
    allocation.set_draining(pool, draining=True)
    with pytest.raises(PoolDraining):
        run(grant())
    assert passes.warm_pools(now=NOW).counts == {"surplus destroyed": 1}


def test_prewarmed_sandbox_is_destroyed_for_capacity(grant, pool) -> None:
    update_pool(pool, capacity=1, warm_target=1)
    passes.warm_pools(now=NOW)
    update_pool(pool, warm_target=0)
    run(grant())
    assert Pool.objects.get(pk=pool.pk).used == 1


# --- reconcile --------------------------------------------------------------------------------------------------------


def reconcile(now=NOW) -> dict[str, int]:
    return sweeps.reconcile(now=now, grace=2 * MINUTE).counts


def test_vanished_sandbox_with_unsaved_state_ends_its_lease_as_lost(lease, grant, memory) -> None:
    memory.vanish(get_sandbox(lease).ref)
    run(grant(agent="did:plc:b"))
    assert reconcile() == {"kept": 1, "lost": 1, "leases ended as lost": 1}
    lease.refresh_from_db()
    assert (lease.status, lease.end_reason) == ("expired", "lost")


def test_vanished_sandbox_without_unsaved_state_is_cold(asleep, grant, memory) -> None:
    woken = execution.ensure_sandbox_ready(asleep.pk, now=NOW + HOUR)
    run(grant(agent="did:plc:b"), now=NOW + HOUR)
    memory.vanish(woken.ref)
    assert reconcile(NOW + HOUR) == {"kept": 1, "found cold": 1}
    assert read(asleep, now=NOW + HOUR) == "kept"


def test_empty_listing_changes_nothing(lease, memory) -> None:
    memory.vanish(get_sandbox(lease).ref)
    result = sweeps.reconcile(now=NOW, grace=2 * MINUTE)
    assert result.counts == {} and "lists nothing" in result.failures[0]
    lease.refresh_from_db()
    assert lease.status == "active"


def test_failed_listing_changes_nothing(lease, memory) -> None:
    with memory.fail("list", Unavailable("timeout")):
        assert sweeps.reconcile(now=NOW, grace=2 * MINUTE).failures
    assert allocation.find_by_holder(lease.pk)


def test_sandbox_of_an_earlier_incarnation_is_destroyed_as_an_orphan(lease, pool, memory) -> None:
    old = get_sandbox(lease)
    evict(lease)
    run(lease, now=NOW + HOUR)
    memory.create(SandboxSpec(name=old.name, owner=str(pool.owner)))  # a zombie of the first incarnation
    created_at = memory.inspect(old.name).created_at
    assert reconcile(created_at + HOUR)["orphans destroyed"] == 1
    assert [listed.name for listed in memory.list(str(pool.owner))] == [get_sandbox(lease).name]


# --- counting, measuring, draining ------------------------------------------------------------------------------------


def test_drifted_counters_are_corrected_and_reported(lease, pool) -> None:
    update_pool(pool, used=7)
    Quota.objects.filter(pool=pool).update(used=5)
    result = passes.recount(now=NOW)
    assert len(result.failures) == 2 and "counter was 7, but it has 1 rows" in result.failures[0]
    assert passes.recount(now=NOW).failures == []
    assert Pool.objects.get(pk=pool.pk).used == Quota.objects.get(pool=pool).used == 1


def test_workspace_over_its_limit_refuses_execs_until_files_are_deleted(lease, pool) -> None:
    update_pool(pool, workspace_limit_mib=1)
    run(lease, "sh", "-c", "head -c 3000000 /dev/zero >big")
    assert measurements.measure_workspaces(now=NOW + MINUTE).counts == {"over the limit": 1}
    with pytest.raises(WorkspaceFull):
        run(lease, now=NOW + MINUTE)
    remove = Command(argv=["delete", "big"], timeout=MINUTE, kind="file")
    execution.call_in_sandbox(lease.pk, remove, lambda p, s: p.remove_file(s.ref, "/workspace/big"), now=NOW + MINUTE)
    run(lease, now=NOW + MINUTE)
    assert get_sandbox(lease).workspace_bytes < 1 << 20


def test_run_that_fills_the_workspace_is_noticed_at_its_end(lease, pool, memory) -> None:
    update_pool(pool, workspace_limit_mib=1)
    run(lease, "sh", "-c", "head -c 3000000 /dev/zero >big", now=NOW + MINUTE)
    assert Run.objects.latest("started_at").note == (
        "/workspace holds 2 MiB, and its limit is 1 MiB: the next command is refused."
    )
    with pytest.raises(WorkspaceFull):
        run(lease, now=NOW + MINUTE)


def test_run_too_short_to_fill_the_workspace_is_not_measured(lease, pool, memory) -> None:
    run(lease, now=NOW + MINUTE)  # measures
    memory.calls.clear()
    run(lease, now=NOW + MINUTE)
    assert ("size", get_sandbox(lease).ref) not in memory.calls


def test_workspace_that_takes_long_to_measure_is_measured_less_often(lease, pool, memory) -> None:
    run(lease, now=NOW + MINUTE)  # measures
    Sandbox.objects.update(measure_seconds=4.0)
    memory.calls.clear()
    run(lease, now=NOW + 2 * MINUTE)
    assert ("size", get_sandbox(lease).ref) not in memory.calls
    run(lease, now=NOW + 3 * MINUTE)
    assert ("size", get_sandbox(lease).ref) in memory.calls


def test_failed_measurement_does_not_fail_the_run(lease, memory) -> None:
    with memory.fail("size", Unavailable("engine down")):
        assert run(lease, now=NOW + MINUTE).exit_code == 0


def test_draining_pool_refuses_new_sandboxes_and_existing_leases_go_on(asleep, grant, pool) -> None:
    newcomer = grant(agent="did:plc:new")
    assert allocation.set_draining(pool, draining=True)
    with pytest.raises(PoolDraining):
        run(newcomer, now=NOW + HOUR)
    assert read(asleep, now=NOW + HOUR) == "kept"
    assert allocation.set_draining(pool, draining=False)
    run(newcomer, now=NOW + HOUR)
