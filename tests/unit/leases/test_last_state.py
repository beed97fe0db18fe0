"""Last state of a lease: stored before its sandbox is destroyed, kept for LEASEHOLD_KEEP_STATE, and the source of forks."""

from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import pytest

from billing import metering
from billing.models import UsageRecord
from leases import conditions, execution, leasing, one_shot, sweeps
from leases import fork as forking
from leases.leasing import LeaseRequest
from leases.models import Lease
from sandboxes import agent_shares
from sandboxes.agent_shares import AgentShares
from sandboxes.errors import SandboxBusy, SnapshotNotFound
from sandboxes.models import Pool, Sandbox, Snapshot, Transition
from sandboxes.models.state import DataEvent
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, read, run, write

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
STORE_DOWN = StoreError("memory", "upload", "store down")
ENDS: dict[str, Callable[[Lease], object]] = {
    "released": lambda lease: leasing.release(lease.pk, now=NOW + MINUTE),
    "ttl": lambda lease: sweeps.expire_due_leases(now=NOW + HOUR),
    "max_ttl": lambda lease: sweeps.expire_due_leases(now=NOW + 30 * HOUR),
    "condition:game.finished": lambda lease: conditions.post_condition(
        "game-1", "game.finished", now=NOW + MINUTE, agents=None
    ),
    "operator": lambda lease: leasing.end(lease.pk, reason="operator", now=NOW + MINUTE),
}


@pytest.fixture
def fork(pool: Pool) -> Callable[..., Lease]:
    def make(lease: Lease, *, now=NOW + 31 * HOUR) -> Lease:
        lease.refresh_from_db()
        request = LeaseRequest("did:plc:ada", "fork-1", "catan", pool=pool.name)
        return forking.fork(lease, request, now=now)[0]

    return make


@pytest.mark.parametrize("reason", ENDS)
def test_every_end_of_a_lease_stores_its_workspace_from_which_it_is_forked(reason: str, grant, fork, memory) -> None:
    lease: Lease = grant(ttl=24 * HOUR if reason == "max_ttl" else 30 * MINUTE)
    write(lease)
    ENDS[reason](lease)
    lease.refresh_from_db()
    assert (lease.status, lease.end_reason) == ("expired", reason)
    assert sweeps.reclaim(now=NOW + 31 * HOUR).counts == {"destroyed": 1, "leases closed": 1}
    assert memory.list(str(lease.pool.owner)) == []
    assert read(fork(lease), now=NOW + 31 * HOUR) == "kept"


def test_the_last_state_is_kept_for_its_retention_period_and_metered(grant, fork, settings) -> None:
    settings.KEEP_STATE = timedelta(days=2)
    lease: Lease = grant()
    write(lease)
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    sweeps.destroy_cold(now=NOW + timedelta(days=2) - MINUTE)
    assert Snapshot.objects.get().forgotten_at is None
    sweeps.destroy_cold(now=NOW + timedelta(days=2))
    assert Snapshot.objects.get().forgotten_at
    with pytest.raises(SnapshotNotFound, match="no snapshot"):
        fork(lease, now=NOW + timedelta(days=2))
    metering.meter_usage(now=NOW + timedelta(days=3))
    assert UsageRecord.objects.filter(item="storage", holder=lease.pk, size_bytes__gt=0).exists()


def test_a_failed_store_postpones_the_destroy_and_not_the_end_of_the_lease(grant, fork, memory_store, memory) -> None:
    lease: Lease = grant()
    ref = write(lease).ref
    with memory_store.fail("upload", STORE_DOWN):
        leasing.release(lease.pk, now=NOW + MINUTE)
        assert sweeps.reclaim(now=NOW + MINUTE).failures
        sandbox = Sandbox.objects.get()
        assert (sandbox.state, sandbox.tries, Pool.objects.get(pk=sandbox.pool_id).used) == ("destroying", 1, 1)
        assert "store down" in sandbox.last_error and memory.files(ref)
        with pytest.raises(SandboxBusy, match="being stored"):
            fork(lease, now=NOW + MINUTE)
        assert Lease.objects.get().end_reason == "released"
    assert sweeps.reclaim(now=NOW + 2 * MINUTE).counts == {"destroyed": 1, "leases closed": 1}
    assert read(fork(lease, now=NOW + 2 * MINUTE), now=NOW + 2 * MINUTE) == "kept"


def test_a_failed_store_ends_in_quarantine_after_the_tries_of_a_destroy(grant, memory_store, settings) -> None:
    settings.DESTROY_TRIES = 2
    lease: Lease = grant()
    write(lease)
    leasing.release(lease.pk, now=NOW)
    with memory_store.fail("upload", STORE_DOWN):
        for n in range(4):
            sweeps.reclaim(now=NOW + n * MINUTE)
    sandbox = Sandbox.objects.get()
    assert (sandbox.tries, sandbox.state, bool(sandbox.quarantined_at)) == (2, "destroying", True)


def test_a_sandbox_without_unsaved_state_is_destroyed_at_once(grant, memory_store) -> None:
    stored, unused = grant(environment="game-1"), grant(environment="game-2")
    write(stored)
    evict(stored)
    for lease in (stored, unused):
        execution.ensure_sandbox_ready(lease.pk, now=NOW)
        leasing.release(lease.pk, now=NOW)
    with memory_store.fail("upload", STORE_DOWN):
        assert sweeps.reclaim(now=NOW).counts == {"destroyed": 2, "leases closed": 2}
    assert Snapshot.objects.count() == 1


def test_a_missing_sandbox_is_destroyed_at_once(grant, memory: MemoryProvider) -> None:
    lease: Lease = grant()
    memory.vanish(write(lease).ref)
    leasing.release(lease.pk, now=NOW)
    assert sweeps.reclaim(now=NOW).counts == {"destroyed": 1, "leases closed": 1}
    assert not Snapshot.objects.exists()
    assert [(event.holder, event.kind) for event in DataEvent.objects.all()] == [(lease.pk, "dropped")]


def test_a_sandbox_that_is_lost_after_a_command_ends_its_lease_as_lost(grant, memory: MemoryProvider) -> None:
    lease: Lease = grant()
    with memory.after("exec", memory.vanish):
        run = execution.exec_command(lease.pk, Command(["true"], MINUTE), now=NOW)[0]
    assert "sandbox was lost" in run.note
    assert sweeps.end_lost_leases(now=NOW) == 1


def test_a_one_shot_run_stores_no_workspace(pool, memory) -> None:
    one_shot.run_once(one_shot.OneShotRequest("did:plc:ada", ["touch", "f"], MINUTE, pool=pool.name), now=NOW)
    assert Sandbox.objects.get().state == "destroyed"
    assert not Snapshot.objects.exists()


def test_a_surplus_warm_sandbox_stores_nothing(pool: Pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    passes.warm_pools(now=NOW)
    Pool.objects.filter(pk=pool.pk).update(warm_target=0)
    passes.warm_pools(now=NOW)
    sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get().state == "destroyed"
    assert not Snapshot.objects.exists()


def test_discarding_ends_the_lease_and_stores_neither_workspace_nor_data(grant, memory_store) -> None:
    lease: Lease = grant()
    write(lease)
    with memory_store.fail("upload", STORE_DOWN):
        run(lease, "sh", "-c", "echo x >/data/note")
    assert leasing.discard(lease.pk, now=NOW, actor="root", detail="agreed with its owner")
    assert not leasing.discard(lease.pk, now=NOW, actor="root", detail="again")
    with memory_store.fail("upload", STORE_DOWN):
        assert sweeps.reclaim(now=NOW).counts == {"destroyed": 1, "leases closed": 1}
    lease.refresh_from_db()
    recorded = Transition.objects.get(to="destroying")
    assert (lease.end_reason, recorded.code, recorded.actor) == ("operator", "discarded", "root")
    assert DataEvent.objects.filter(holder=lease.pk, kind="dropped").count() == 1
    assert not Snapshot.objects.exists()


def test_discarding_releases_a_sandbox_from_quarantine(grant, memory_store, settings) -> None:
    settings.DESTROY_TRIES = 1
    lease: Lease = grant()
    write(lease)
    leasing.release(lease.pk, now=NOW)
    with memory_store.fail("upload", STORE_DOWN):
        sweeps.reclaim(now=NOW)
        assert Sandbox.objects.get().quarantined_at
        assert leasing.discard(lease.pk, now=NOW + MINUTE, actor="root", detail="the store is gone")
        assert sweeps.reclaim(now=NOW + MINUTE).counts == {"destroyed": 1, "leases closed": 1}
    lease.refresh_from_db()
    recorded = Transition.objects.get(code="discarded")
    assert (lease.end_reason, recorded.was, recorded.to) == ("released", "destroying", "destroying")
    assert Pool.objects.get(pk=lease.pool_id).used == 0


def test_the_last_state_of_an_elapsed_lease_is_not_forked_before_it_is_stored(grant, fork) -> None:
    lease: Lease = grant(ttl=30 * MINUTE)
    write(lease, "old")
    evict(lease)
    write(lease, "new")
    with pytest.raises(SandboxBusy, match="being stored"):
        fork(lease, now=NOW + HOUR)
    sweeps.expire_due_leases(now=NOW + HOUR)
    sweeps.reclaim(now=NOW + HOUR)
    assert read(fork(lease, now=NOW + HOUR), now=NOW + HOUR) == "new"


def test_state_stored_by_an_overtaken_worker_is_not_recorded_a_second_time(grant, at_checkpoint) -> None:
    """A worker stores longer than its deadline, and a worker of another process takes over."""
    lease: Lease = grant()
    write(lease)
    leasing.release(lease.pk, now=NOW)

    def take_over() -> None:
        with patch.object(agent_shares, "DESTROYS", AgentShares(1)):
            sweeps.reclaim(now=NOW + HOUR)

    at_checkpoint("objects stored", take_over)
    assert sweeps.reclaim(now=NOW).counts == {"lost race": 1}
    assert (Snapshot.objects.count(), get_state_and_use(lease)) == (1, ("destroyed", 0))


def get_state_and_use(lease: Lease) -> tuple[str, int]:
    return Sandbox.objects.get(holder=lease.pk).state, Pool.objects.get(pk=lease.pool_id).used
