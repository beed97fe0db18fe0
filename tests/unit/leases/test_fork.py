"""Forks: leases whose workspace starts as a copy of another lease's workspace."""

import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.db import OperationalError, connections, transaction

from leases import execution, leasing, snapshots
from leases import fork as forking
from leases.errors import Conflict, RateLimited
from leases.leasing import LeaseRequest
from leases.models import Lease, LeaseEvent
from sandboxes.errors import SnapshotNotFound
from sandboxes.models import Pool, Sandbox, Snapshot
from sandboxes.models.state import SnapshotKind
from sandboxes.providers.memory import MemoryProvider
from sandboxes.state import workspace
from sandboxes.storage import get_store
from sandboxes.storage.base import StoreError
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.leases import evict, read, run, write
from tests.support.waiting import wait_until_blocked

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
ADA, BOB = "did:plc:ada", "did:plc:bob"


def read_config_lease_id(lease: Lease, *, now=NOW) -> str:
    lease_id: str = json.loads(run(lease, "cat", "config.json", now=now).stdout)["leaseId"]
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


def test_a_fork_starts_with_the_current_workspace_and_its_own_config_and_is_independent(lease: Lease, make_request) -> None:
    fork, is_new = forking.fork(lease, make_request(), now=NOW, actor="key x")
    assert (is_new, fork.environment_id, read(fork)) == (True, "fork-1", "one")
    write(fork, "two")
    assert (read(lease), read(fork)) == ("one", "two")
    assert read_config_lease_id(fork) == str(fork.pk)
    evict(fork)
    assert read_config_lease_id(fork, now=NOW + MINUTE) == str(fork.pk)
    assert read_config_lease_id(lease) == str(lease.pk)
    source = Snapshot.objects.get(holder=lease.pk)
    events = {event.lease: (event.reason, event.actor) for event in LeaseEvent.objects.filter(kind="forked")}
    assert events[lease] == (f"into lease {fork.pk} of {ADA}::fork-1", "key x")
    assert events[fork][0] == f"from lease {lease.pk}, snapshot {source.pk}"


def test_a_fork_keeps_its_own_config_after_a_restore_of_its_first_snapshot(lease: Lease, make_request) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    first = Snapshot.objects.get(holder=fork.pk)
    write(fork, "two")
    snapshots.restore_snapshot(fork.pk, first.pk, now=NOW + MINUTE)
    assert (read(fork, now=NOW + 2 * MINUTE), read_config_lease_id(fork, now=NOW + 2 * MINUTE)) == ("one", str(fork.pk))


def test_a_fork_evicted_before_its_first_use_wakes_with_its_own_config(lease: Lease, make_request) -> None:
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    execution.ensure_sandbox_ready(fork.pk, now=NOW)
    evict(fork)
    assert read_config_lease_id(fork, now=NOW + MINUTE) == str(fork.pk)


def test_a_cold_lease_is_forked_without_a_wake_also_after_its_end(lease: Lease, make_request, memory: MemoryProvider) -> None:
    evict(lease)
    calls = len(memory.calls)
    fork, _ = forking.fork(lease, make_request(), now=NOW)
    assert len(memory.calls) == calls
    assert Snapshot.objects.get(holder=fork.pk).key == Snapshot.objects.get(holder=lease.pk).key
    leasing.release(lease.pk, now=NOW)
    lease.refresh_from_db()
    successor, _ = forking.fork(lease, make_request(lease.environment_id), now=NOW)
    assert (successor.environment_id, read(successor), read(fork)) == (lease.environment_id, "one", "one")


def test_a_fork_starts_with_the_named_snapshot(lease: Lease, make_request) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    fork, _ = forking.fork(lease, make_request(), snapshot=taken.pk, now=NOW + MINUTE)
    assert read(fork, now=NOW + MINUTE) == "one"


def test_an_ended_lease_without_a_snapshot_cannot_be_forked(lease: Lease, make_request) -> None:
    leasing.discard(lease.pk, now=NOW)
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
    assert read(fork, now=NOW + 6 * MINUTE) == "one"


def test_a_fork_neither_removes_nor_leaves_a_snapshot_of_its_origin(lease: Lease, make_request) -> None:
    taken = [snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE) for n in range(2)]
    for n in range(3):
        forking.fork(lease, make_request(f"fork-{n}"), now=NOW + 3 * MINUTE)
    assert {*workspace.find_by_holder(lease.pk)} == {*taken}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("error", [StoreError("s3", "remove", "timed out"), OperationalError("the connection is closed")])
def test_a_granted_fork_is_returned_although_its_temporary_snapshot_cannot_be_deleted(
    lease: Lease, make_request, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(snapshot: Snapshot, *, now: datetime) -> bool:
        raise error

    monkeypatch.setattr(workspace, "forget", fail)
    fork, is_new = forking.fork(lease, make_request(), now=NOW)
    assert (is_new, fork.status) == (True, "active")


@pytest.mark.django_db(transaction=True)
def test_a_snapshot_deleted_during_a_fork_is_kept_by_the_fork(lease: Lease, grant) -> None:
    other = grant(environment="game-2")
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
    run(lease, "sh", "-c", "echo secret >/data/diary")
    fork, _ = forking.fork(lease, make_request(agent=BOB), now=NOW)
    assert (fork.agent_did, read(fork)) == (BOB, "one")
    assert run(fork, "cat", "/data/diary").exit_code == 1


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


def test_an_environment_held_by_an_unrelated_lease_or_the_origin_is_a_conflict(lease: Lease, make_request, grant) -> None:
    grant(environment="fork-1")
    for environment in ("fork-1", lease.environment_id):
        with pytest.raises(Conflict) as refused:
            forking.fork(lease, make_request(environment), now=NOW)
        assert refused.value.extra == {"field": "environment_id"}
    assert not Snapshot.objects.exists()


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
    assert read(second) == "one"
    with pytest.raises(Conflict):
        forking.fork(lease, make_request("fork-2"), now=NOW)


def test_only_snapshots_of_the_lease_itself_can_be_forked(lease: Lease, make_request, grant) -> None:
    other = grant(environment="game-2")
    write(other, "other")
    taken = snapshots.take_snapshot(other.pk, now=NOW)
    with pytest.raises(SnapshotNotFound):
        forking.fork(lease, make_request(), snapshot=taken.pk, now=NOW)
    assert Lease.objects.count() == 2


@pytest.mark.parametrize("cold", [False, True])
def test_a_fork_that_is_not_admitted_leaves_neither_lease_nor_snapshot(cold: bool, lease: Lease, make_request) -> None:
    if cold:
        evict(lease)
    kept = {*get_store().list(f"snapshots/{lease.pk}/")}

    def refuse() -> None:
        raise RateLimited()

    with pytest.raises(RateLimited):
        forking.fork(lease, make_request(), now=NOW, admit=refuse)
    assert (Lease.objects.count(), LeaseEvent.objects.filter(kind="forked").count()) == (1, 0)
    assert [snapshot.holder for snapshot in Snapshot.objects.filter(forgotten_at=None)] == [lease.pk] * cold
    assert {*get_store().list(f"snapshots/{lease.pk}/")} == kept


@pytest.mark.parametrize("step", ["snapshot stored", "snapshot saved", "run answered"])
def test_a_crash_before_the_grant_leaves_no_fork_and_a_retry_succeeds(step: str, lease: Lease, make_request, crash_at) -> None:
    with crash_at(step):
        forking.fork(lease, make_request(), now=NOW)
    assert Lease.objects.count() == 1
    fork, is_new = forking.fork(lease, make_request(), now=NOW + timedelta(seconds=1))
    assert (is_new, read(fork)) == (True, "one")


@pytest.mark.django_db(transaction=True)
def test_concurrent_forks_are_one_lease(lease: Lease, make_request) -> None:
    with run_in_threads(4) as together:
        results = together(lambda index: forking.fork(lease, make_request(), now=NOW))
    assert sorted(is_new for _, is_new in results) == [False, False, False, True]
    assert len({fork.pk for fork, _ in results}) == 1
    assert Snapshot.objects.filter(kind="forked").count() == 1
    assert Sandbox.objects.count() == 1
