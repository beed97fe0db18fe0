"""Forks: leases whose workspace starts as a copy of another lease's workspace."""

import json
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connections, transaction

from leases import execution, leasing, snapshots
from leases import fork as forking
from leases.errors import Conflict, RateLimited
from leases.leasing import LeaseRequest
from leases.models import Lease, LeaseEvent
from sandboxes import eviction
from sandboxes import pool as pools
from sandboxes.errors import SnapshotNotFound
from sandboxes.models import Pool, Sandbox, Snapshot
from sandboxes.models.state import SnapshotKind
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import Command
from sandboxes.state import workspace
from sandboxes.storage import get_store
from tests.conftest import MINUTE, NOW, SimulatedCrash, run_in_threads
from tests.support.waiting import wait_until_blocked

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"


def read_output(lease: Lease, *argv: str, now=NOW) -> str:
    _, result = execution.exec_command(lease.pk, Command(argv=argv, timeout=MINUTE), now=now)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


def write(lease: Lease, text: str, *, now=NOW) -> None:
    read_output(lease, "sh", "-c", f"echo {text} >f", now=now)


def evict(lease: Lease, *, now=NOW) -> None:
    sandbox = pools.find_by_holder(lease.pk)
    assert sandbox
    assert eviction.evict(sandbox.pk, now=now, reason="test")


def read_config_lease_id(lease: Lease, *, now=NOW) -> str:
    lease_id: str = json.loads(read_output(lease, "cat", "config.json", now=now))["leaseId"]
    return lease_id


@pytest.fixture
def make_request(pool: Pool) -> Callable[..., LeaseRequest]:
    def make(environment: str = "fork-1", agent: str = ADA, **fields) -> LeaseRequest:
        return LeaseRequest(agent_did=agent, environment_id=environment, environment_type="catan", pool=pool.name, **fields)

    return make


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    granted: Lease = grant()
    write(granted, "one")
    return granted


def test_a_fork_starts_with_the_current_workspace_and_is_independent(lease: Lease, make_request) -> None:
    fork, is_new = forking.fork(lease, make_request(), now=NOW, actor="key x")
    assert (is_new, fork.environment_id, read_output(fork, "cat", "f")) == (True, "fork-1", "one")
    write(fork, "two")
    assert (read_output(lease, "cat", "f"), read_output(fork, "cat", "f")) == ("one", "two")


def test_a_fork_has_its_own_config_from_its_first_use(lease: Lease, make_request) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    assert read_config_lease_id(fork) == str(fork.pk)
    evict(fork)
    assert read_config_lease_id(fork, now=NOW + MINUTE) == str(fork.pk)
    assert read_config_lease_id(lease) == str(lease.pk)


def test_a_fork_keeps_its_own_config_after_a_restore_of_its_first_snapshot(lease: Lease, make_request) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    first = Snapshot.objects.get(holder=fork.pk)
    write(fork, "two")
    snapshots.restore_snapshot(fork.pk, first.pk, now=NOW + MINUTE)
    assert (read_output(fork, "cat", "f", now=NOW + 2 * MINUTE), read_config_lease_id(fork, now=NOW + 2 * MINUTE)) == (
        "one",
        str(fork.pk),
    )


def test_a_fork_evicted_before_its_first_use_wakes_with_its_own_config(
    lease: Lease, make_request, memory: MemoryProvider
) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    execution.ensure_sandbox_ready(fork.pk, now=NOW)
    evict(fork)
    assert read_config_lease_id(fork, now=NOW + MINUTE) == str(fork.pk)


def test_a_cold_lease_is_forked_without_a_wake(lease: Lease, make_request, memory: MemoryProvider) -> None:
    evict(lease)
    calls = len(memory.calls)
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    assert len(memory.calls) == calls
    assert Snapshot.objects.get(holder=fork.pk).key == Snapshot.objects.get(holder=lease.pk).key
    assert read_output(fork, "cat", "f") == "one"


def test_a_fork_starts_with_the_named_snapshot(lease: Lease, make_request) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    fork, _ = forking.fork(lease, make_request(), snapshot=taken.pk, now=NOW + MINUTE)
    assert read_output(fork, "cat", "f", now=NOW + MINUTE) == "one"


def test_an_ended_lease_is_forked_from_its_latest_snapshot(lease: Lease, make_request) -> None:
    evict(lease)
    leasing.release(lease.pk, now=NOW)
    lease.refresh_from_db()
    fork, _ = forking.fork(lease, make_request(lease.environment_id), now=NOW)
    assert (fork.environment_id, read_output(fork, "cat", "f")) == (lease.environment_id, "one")


def test_an_ended_lease_without_a_snapshot_cannot_be_forked(lease: Lease, make_request) -> None:
    leasing.release(lease.pk, now=NOW)
    lease.refresh_from_db()
    with pytest.raises(SnapshotNotFound, match="no snapshot"):
        forking.fork(lease, make_request(), now=NOW)
    assert Lease.objects.count() == 1


def test_the_snapshots_of_a_fork_outlive_those_of_its_origin(lease: Lease, make_request) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    for n in range(1, 4):
        snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE)
    for row in workspace.find_by_holder(lease.pk):
        workspace.forget(row, now=NOW + 5 * MINUTE)
    assert read_output(fork, "cat", "f", now=NOW + 6 * MINUTE) == "one"


def test_a_fork_neither_removes_nor_leaves_a_snapshot_of_its_origin(lease: Lease, make_request) -> None:
    taken = [snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE) for n in range(2)]
    for n in range(3):
        forking.fork(lease, make_request(f"fork-{n}"), now=NOW + 3 * MINUTE)
    assert {*workspace.find_by_holder(lease.pk)} == {*taken}


def test_a_refused_fork_leaves_no_object(lease: Lease, make_request) -> None:
    def refuse() -> None:
        raise RateLimited()

    with pytest.raises(RateLimited):
        forking.fork(lease, make_request(), now=NOW, admit=refuse)
    assert not workspace.find_by_holder(lease.pk).exists()
    assert get_store().is_empty(f"snapshots/{lease.pk}/")


@pytest.mark.django_db(transaction=True)
def test_a_snapshot_deleted_during_a_fork_is_kept_by_the_fork(pool: Pool, memory: MemoryProvider, grant) -> None:
    lease, other = grant(), grant(environment="game-2")
    write(lease, "one")
    taken, started = snapshots.take_snapshot(lease.pk, now=NOW), threading.Event()

    def forget() -> None:
        started.set()
        workspace.forget(taken, now=NOW)
        connections.close_all()

    rival = threading.Thread(target=forget)
    with transaction.atomic():
        workspace.copy_snapshot(taken, holder=other.pk, kind=SnapshotKind.FORKED, now=NOW)
        rival.start()
        started.wait()
        wait_until_blocked(rival)
    rival.join()
    taken.refresh_from_db()
    assert (bool(taken.forgotten_at), get_store().has(f"{taken.key}/workspace")) == (True, True)


def test_a_fork_can_belong_to_another_agent(lease: Lease, make_request) -> None:
    read_output(lease, "sh", "-c", "echo secret >/data/diary")
    fork, _ = forking.fork(lease, make_request(agent=BOB), now=NOW)
    assert (fork.agent_did, read_output(fork, "cat", "f")) == (BOB, "one")
    _, result = execution.exec_command(fork.pk, Command(argv=["cat", "/data/diary"], timeout=MINUTE), now=NOW)
    assert result.exit_code == 1


def test_both_leases_record_the_fork_in_their_timeline(lease: Lease, make_request) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW, actor="key x")
    source = Snapshot.objects.get(holder=lease.pk)
    source_event, fork_event = (
        LeaseEvent.objects.get(lease=lease, kind="forked"),
        LeaseEvent.objects.get(lease=fork, kind="forked"),
    )
    assert (source_event.reason, source_event.actor) == (f"into lease {fork.pk} of {ADA}::fork-1", "key x")
    assert fork_event.reason == f"from lease {lease.pk}, snapshot {source.pk}"


# --- repeats and refusals ----------------------------------------------------------------------------------------


def test_a_repeat_returns_the_same_lease_and_takes_no_snapshot(lease: Lease, make_request) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    copies = Snapshot.objects.count()
    again, is_new = forking.fork(lease, make_request(), now=NOW + MINUTE)
    assert (again, is_new, Snapshot.objects.count()) == (fork, False, copies)


def test_a_repeat_returns_the_same_lease_after_the_named_snapshot_was_deleted(lease: Lease, make_request, settings) -> None:
    settings.KEEP_ASKED_SNAPSHOTS = 2
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    fork, _ = forking.fork(lease, make_request(), snapshot=taken.pk, now=NOW)
    for n in range(1, 4):
        snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE)
    taken.refresh_from_db()
    assert taken.forgotten_at
    assert forking.fork(lease, make_request(), snapshot=taken.pk, now=NOW + 4 * MINUTE) == (fork, False)


def test_an_environment_held_by_an_unrelated_lease_is_a_conflict(lease: Lease, make_request, grant) -> None:
    grant(environment="fork-1")
    with pytest.raises(Conflict) as refused:
        forking.fork(lease, make_request(), now=NOW)
    assert refused.value.extra == {"field": "environment_id"}
    assert not Snapshot.objects.exists()


def test_forking_into_the_origins_own_environment_is_a_conflict_while_it_is_active(lease: Lease, make_request) -> None:
    with pytest.raises(Conflict):
        forking.fork(lease, make_request(lease.environment_id), now=NOW)


def test_a_repeat_with_another_origin_or_snapshot_is_a_conflict(lease: Lease, make_request, grant) -> None:
    first = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two")
    second = snapshots.take_snapshot(lease.pk, now=NOW + MINUTE)
    other = grant(environment="game-2")
    write(other, "other")
    forking.fork(lease, make_request(), snapshot=first.pk, now=NOW + MINUTE)
    with pytest.raises(Conflict):
        forking.fork(lease, make_request(), snapshot=second.pk, now=NOW + MINUTE)
    with pytest.raises(Conflict):
        forking.fork(other, make_request(), now=NOW + MINUTE)


def test_the_fork_of_a_fork_is_not_a_fork_of_the_first_lease(lease: Lease, make_request) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    second, _ = forking.fork(fork, make_request("fork-2"), now=NOW)
    assert read_output(second, "cat", "f") == "one"
    with pytest.raises(Conflict):
        forking.fork(lease, make_request("fork-2"), now=NOW)


def test_only_snapshots_of_the_lease_itself_can_be_forked(lease: Lease, make_request, grant) -> None:
    other = grant(environment="game-2")
    write(other, "other")
    taken = snapshots.take_snapshot(other.pk, now=NOW)
    with pytest.raises(SnapshotNotFound):
        forking.fork(lease, make_request(), snapshot=taken.pk, now=NOW)
    assert Lease.objects.count() == 2


def test_a_fork_that_is_not_admitted_leaves_neither_lease_nor_snapshot(lease: Lease, make_request) -> None:
    evict(lease)

    def refuse() -> None:
        raise RateLimited()

    with pytest.raises(RateLimited):
        forking.fork(lease, make_request(), now=NOW, admit=refuse)
    assert (Lease.objects.count(), Snapshot.objects.count(), LeaseEvent.objects.filter(kind="forked").count()) == (1, 1, 0)


@pytest.mark.parametrize("step", ["snapshot stored", "snapshot saved", "run answered"])
def test_a_crash_before_the_grant_leaves_no_fork_and_a_retry_succeeds(
    step: str, lease: Lease, make_request, at_checkpoint
) -> None:
    def die() -> None:
        raise SimulatedCrash

    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        forking.fork(lease, make_request(), now=NOW)
    assert Lease.objects.count() == 1
    fork, is_new = forking.fork(lease, make_request(), now=NOW + timedelta(seconds=1))
    assert (is_new, read_output(fork, "cat", "f")) == (True, "one")


@pytest.mark.django_db(transaction=True)
def test_concurrent_forks_are_one_lease(pool: Pool, memory: MemoryProvider, grant, make_request) -> None:
    lease = grant()
    write(lease, "one")
    with run_in_threads(4) as together:
        results = together(lambda index: forking.fork(lease, make_request(), now=NOW))
    assert sorted(is_new for _, is_new in results) == [False, False, False, True]
    assert len({fork.pk for fork, _ in results}) == 1
    assert Snapshot.objects.filter(kind="forked").count() == 1
    assert Sandbox.objects.count() == 1
