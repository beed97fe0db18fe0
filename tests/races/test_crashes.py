"""Crashes at each step of each operation. After the sweeps, rows and provider agree, and no state is lost."""

from datetime import datetime, timedelta

import pytest

from leases import fork, leasing, sweeps
from leases.models import Lease
from sandboxes.models import Pool, Run, Sandbox, Snapshot
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, SimulatedCrash, die
from tests.support.leases import assert_converged, read, run, update_pool, write

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("guarded UPDATEs of the state machine")]
LATER = NOW + timedelta(hours=1)  # every deadline has passed, no lease has


def sweep(now: datetime) -> None:
    sweeps.expire_due_leases(now=now)
    sweeps.recover_stalled(now=now)
    sweeps.reclaim(now=now)
    sweeps.reconcile(now=now, grace=timedelta(0))


@pytest.mark.parametrize("step", ["reserved", "created", "prepared", "run opened", "run answered"])
def test_crash_at_any_step_of_an_exec_converges_and_the_lease_goes_on(step: str, grant, pool, memory, crash_at) -> None:
    lease: Lease = grant()
    with crash_at(step):
        run(lease)
    sweep(LATER)
    assert_converged(pool, memory)
    assert run(lease, now=LATER).exit_code == 0
    assert_converged(pool, memory)


@pytest.mark.parametrize("step", ["eviction claimed", "objects stored", "persisted", "process gone"])
def test_crash_at_any_step_of_an_eviction_converges_and_loses_no_file(step: str, grant, pool, memory, crash_at) -> None:
    lease: Lease = grant()
    write(lease)
    with crash_at(step):
        passes.evict_idle(now=NOW + 10 * MINUTE)
    assert Sandbox.objects.get().state == "evicting"
    sweep(LATER)
    assert Sandbox.objects.get().state == "cold"
    assert memory.list(str(pool.owner)) == []
    assert read(lease, now=LATER) == "kept"
    assert_converged(pool, memory)


@pytest.mark.parametrize("step", ["wake claimed", "created", "prepared", "run opened", "run answered"])
def test_crash_at_any_step_of_a_wake_converges_and_loses_no_file(step: str, grant, pool, memory, crash_at) -> None:
    lease: Lease = grant()
    write(lease)
    passes.evict_idle(now=NOW + 10 * MINUTE)
    with crash_at(step):
        read(lease, now=NOW + 11 * MINUTE)
    sweep(LATER)
    assert read(lease, now=LATER) == "kept"
    assert_converged(pool, memory)


@pytest.mark.parametrize("step", ["reserved", "created", "prepared"])
def test_crash_at_any_step_of_a_warm_start_converges(step: str, pool, memory, crash_at) -> None:
    update_pool(pool, warm_target=1)
    with crash_at(step):
        passes.warm_pools(now=NOW)
    sweep(LATER)
    assert_converged(pool, memory)
    assert passes.warm_pools(now=LATER).counts == {"warmed up": 1}


@pytest.mark.parametrize("step", ["eviction claimed", "objects stored", "persisted", "process gone", "reserved", "created"])
def test_crash_at_any_step_of_a_capacity_eviction_converges(step: str, grant, pool, memory, crash_at) -> None:
    update_pool(pool, capacity=1)
    victim, other = grant(agent="did:plc:victim"), grant(agent="did:plc:other")
    write(victim)
    with crash_at(step):
        run(other, now=NOW + MINUTE)
    sweep(LATER)
    assert_converged(pool, memory)
    assert read(victim, now=LATER) == "kept"


@pytest.mark.parametrize("step", ["destroy claimed", "objects stored", "state stored", "destroy answered"])
def test_crash_at_any_step_of_a_destroy_converges_and_stores_the_state_once(step: str, grant, pool, memory, crash_at) -> None:
    lease: Lease = grant()
    write(lease)
    leasing.release(lease.pk, now=NOW + MINUTE)
    with crash_at(step):
        sweep(NOW + MINUTE)
    sweep(LATER)
    assert_converged(pool, memory)
    lease.refresh_from_db()
    assert (lease.status, Pool.objects.get(pk=pool.pk).used) == ("destroyed", 0)
    assert Snapshot.objects.filter(holder=lease.pk, forgotten_at=None).count() == 1
    request = leasing.LeaseRequest(lease.agent_did, "fork-1", "catan", pool=pool.name)
    assert read(fork.fork(lease, request, now=LATER)[0], now=LATER) == "kept"


@pytest.mark.parametrize("verb", ["create", "wait_ready", "write_file", "exec", "destroy"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_crash_around_any_provider_call_converges(when: str, verb: str, grant, pool, memory) -> None:
    def act() -> None:
        lease: Lease = grant()
        run(lease)
        leasing.release(lease.pk, now=NOW + MINUTE)
        sweep(NOW + MINUTE)

    with getattr(memory, when)(verb, die), pytest.raises(SimulatedCrash):
        act()
    sweep(LATER)
    sweep(LATER + timedelta(days=2))
    assert_converged(pool, memory)
    assert memory.list(str(pool.owner)) == []
    assert set(Lease.objects.values_list("status", flat=True)) == {"destroyed"}


def test_command_of_an_abandoned_run_is_killed_before_its_sandbox_is_waiting(grant, memory, crash_at) -> None:
    lease: Lease = grant()
    with crash_at("run opened"):
        run(lease)
    with memory.fail("kill", Unavailable("engine away")):
        assert sweeps.recover_stalled(now=LATER).failures
    assert Sandbox.objects.get().state == "running"
    assert sweeps.recover_stalled(now=LATER + timedelta(hours=1)).counts == {"runs closed": 1}
    closed, sandbox = Run.objects.get(), Sandbox.objects.get()
    assert (closed.outcome, sandbox.state, memory.calls[-1]) == ("lost", "waiting", ("kill", sandbox.ref))


def test_create_that_finishes_after_its_row_was_destroyed_leaves_nothing(
    grant, pool, memory, at_checkpoint, monkeypatch
) -> None:
    monkeypatch.setattr(memory, "agents_join", True)  # its token is not valid any more: a wait would last for minutes
    lease: Lease = grant()

    def release_and_sweep() -> None:
        leasing.release(lease.pk, now=NOW)
        sweeps.reclaim(now=NOW)  # nothing was created yet, so the provider confirms that the sandbox is gone

    at_checkpoint("reserved", release_and_sweep)
    with pytest.raises(Exception, match="ended"):
        run(lease)
    assert_converged(pool, memory)
    assert memory.list(str(pool.owner)) == []
    assert not [ref for verb, ref in memory.calls if verb == "wait_ready"]


def test_orphan_is_destroyed_only_after_its_grace_period(pool: Pool, memory: MemoryProvider) -> None:
    memory.create(SandboxSpec(name="leasehold-stray", owner=str(pool.owner)))
    created_at = memory.inspect("leasehold-stray").created_at
    assert sweeps.reconcile(now=created_at + MINUTE, grace=2 * MINUTE).counts == {}
    assert sweeps.reconcile(now=created_at + 2 * MINUTE, grace=2 * MINUTE).counts == {"orphans destroyed": 1}
    assert memory.list(str(pool.owner)) == []
