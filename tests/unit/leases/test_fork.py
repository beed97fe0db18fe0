"""A lease that starts from the workspace of another one."""

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


def run(lease: Lease, *argv: str, now=NOW) -> str:
    _, result = execution.exec_command(lease.pk, Command(argv=argv, timeout=MINUTE), now=now)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


def write(lease: Lease, text: str, *, now=NOW) -> None:
    run(lease, "sh", "-c", f"echo {text} >f", now=now)


def sleep(lease: Lease, *, now=NOW) -> None:
    sandbox = pools.find_by_holder(lease.pk)
    assert sandbox
    assert eviction.evict(sandbox.pk, now=now, reason="test")


def config(lease: Lease, *, now=NOW) -> str:
    said: str = json.loads(run(lease, "cat", "config.json", now=now))["leaseId"]
    return said


@pytest.fixture
def ask(pool: Pool) -> Callable[..., LeaseRequest]:
    def into(environment: str = "fork-1", agent: str = ADA, **fields) -> LeaseRequest:
        return LeaseRequest(agent_did=agent, environment_id=environment, environment_type="catan", pool=pool.name, **fields)

    return into


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    granted: Lease = grant()
    write(granted, "one")
    return granted


def test_a_fork_starts_with_what_is_there_now_and_goes_its_own_way(lease: Lease, ask) -> None:
    fork, is_new = forking.fork(lease, ask(), now=NOW, actor="key x")
    assert (is_new, fork.environment_id, run(fork, "cat", "f")) == (True, "fork-1", "one")
    write(fork, "two")
    assert (run(lease, "cat", "f"), run(fork, "cat", "f")) == ("one", "two")


def test_the_config_of_a_fork_is_its_own_from_its_first_use_on(lease: Lease, ask) -> None:
    fork, _ = forking.fork(lease, ask(), now=NOW)
    assert config(fork) == str(fork.pk)
    sleep(fork)
    assert config(fork, now=NOW + MINUTE) == str(fork.pk)
    assert config(lease) == str(lease.pk)


def test_the_config_of_a_fork_is_its_own_when_its_first_copy_is_restored(lease: Lease, ask) -> None:
    fork, _ = forking.fork(lease, ask(), now=NOW)
    first = Snapshot.objects.get(holder=fork.pk)
    write(fork, "two")
    snapshots.restore_snapshot(fork.pk, first.pk, now=NOW + MINUTE)
    assert (run(fork, "cat", "f", now=NOW + 2 * MINUTE), config(fork, now=NOW + 2 * MINUTE)) == ("one", str(fork.pk))


def test_a_fork_that_sleeps_before_its_first_use_has_its_own_config_after(lease: Lease, ask, memory: MemoryProvider) -> None:
    fork, _ = forking.fork(lease, ask(), now=NOW)
    execution.ensure_sandbox_ready(fork.pk, now=NOW)
    sleep(fork)
    assert config(fork, now=NOW + MINUTE) == str(fork.pk)


def test_a_lease_that_sleeps_is_forked_without_being_woken(lease: Lease, ask, memory: MemoryProvider) -> None:
    sleep(lease)
    calls = len(memory.calls)
    fork, _ = forking.fork(lease, ask(), now=NOW)
    assert len(memory.calls) == calls
    assert Snapshot.objects.get(holder=fork.pk).key == Snapshot.objects.get(holder=lease.pk).key
    assert run(fork, "cat", "f") == "one"


def test_a_fork_starts_with_the_copy_that_is_named(lease: Lease, ask) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    fork, _ = forking.fork(lease, ask(), snapshot=taken.pk, now=NOW + MINUTE)
    assert run(fork, "cat", "f", now=NOW + MINUTE) == "one"


def test_an_ended_lease_is_forked_from_its_newest_copy(lease: Lease, ask) -> None:
    sleep(lease)
    leasing.release(lease.pk, now=NOW)
    lease.refresh_from_db()
    fork, _ = forking.fork(lease, ask(lease.environment_id), now=NOW)
    assert (fork.environment_id, run(fork, "cat", "f")) == (lease.environment_id, "one")


def test_an_ended_lease_of_which_nothing_is_kept_is_not_forked(lease: Lease, ask) -> None:
    leasing.release(lease.pk, now=NOW)
    lease.refresh_from_db()
    with pytest.raises(SnapshotNotFound, match="no snapshot"):
        forking.fork(lease, ask(), now=NOW)
    assert Lease.objects.count() == 1


def test_the_copies_of_a_fork_outlive_those_of_its_origin(lease: Lease, ask) -> None:
    fork, _ = forking.fork(lease, ask(), now=NOW)
    for n in range(1, 4):
        snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE)
    for row in workspace.find_by_holder(lease.pk):
        workspace.forget(row, now=NOW + 5 * MINUTE)
    assert run(fork, "cat", "f", now=NOW + 6 * MINUTE) == "one"


def test_no_copy_of_the_origin_goes_for_a_fork_and_none_is_left(lease: Lease, ask) -> None:
    taken = [snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE) for n in range(2)]
    for n in range(3):
        forking.fork(lease, ask(f"fork-{n}"), now=NOW + 3 * MINUTE)
    assert {*workspace.find_by_holder(lease.pk)} == {*taken}


def test_a_fork_that_is_refused_leaves_no_object(lease: Lease, ask) -> None:
    def refuse() -> None:
        raise RateLimited()

    with pytest.raises(RateLimited):
        forking.fork(lease, ask(), now=NOW, admit=refuse)
    assert not workspace.find_by_holder(lease.pk).exists()
    assert get_store().is_empty(f"snapshots/{lease.pk}/")


@pytest.mark.django_db(transaction=True)
def test_a_copy_that_is_forgotten_while_it_is_forked_stays_the_forks(pool: Pool, memory: MemoryProvider, grant) -> None:
    lease, other = grant(), grant(environment="game-2")
    write(lease, "one")
    taken, waits = snapshots.take_snapshot(lease.pk, now=NOW), threading.Event()

    def forget() -> None:
        waits.set()
        workspace.forget(taken, now=NOW)
        connections.close_all()

    rival = threading.Thread(target=forget)
    with transaction.atomic():
        workspace.copy_snapshot(taken, holder=other.pk, kind=SnapshotKind.FORKED, now=NOW)
        rival.start()
        waits.wait()
        wait_until_blocked(rival)
    rival.join()
    taken.refresh_from_db()
    assert (bool(taken.forgotten_at), get_store().has(f"{taken.key}/workspace")) == (True, True)


def test_another_agent_may_get_the_fork(lease: Lease, ask) -> None:
    run(lease, "sh", "-c", "echo secret >/data/diary")
    fork, _ = forking.fork(lease, ask(agent=BOB), now=NOW)
    assert (fork.agent_did, run(fork, "cat", "f")) == (BOB, "one")
    _, result = execution.exec_command(fork.pk, Command(argv=["cat", "/data/diary"], timeout=MINUTE), now=NOW)
    assert result.exit_code == 1


def test_both_leases_say_what_happened(lease: Lease, ask) -> None:
    fork, _ = forking.fork(lease, ask(), now=NOW, actor="key x")
    source = Snapshot.objects.get(holder=lease.pk)
    origin, made = LeaseEvent.objects.get(lease=lease, kind="forked"), LeaseEvent.objects.get(lease=fork, kind="forked")
    assert (origin.reason, origin.actor) == (f"into lease {fork.pk} of {ADA}::fork-1", "key x")
    assert made.reason == f"from lease {lease.pk}, snapshot {source.pk}"


# --- repeated, and refused ----------------------------------------------------------------------------------------


def test_a_repeat_is_the_same_lease_and_takes_no_copy(lease: Lease, ask) -> None:
    fork, _ = forking.fork(lease, ask(), now=NOW)
    copies = Snapshot.objects.count()
    again, is_new = forking.fork(lease, ask(), now=NOW + MINUTE)
    assert (again, is_new, Snapshot.objects.count()) == (fork, False, copies)


def test_a_repeat_of_a_named_copy_is_the_same_lease_also_when_the_copy_has_gone(lease: Lease, ask, settings) -> None:
    settings.KEEP_ASKED_SNAPSHOTS = 2
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    fork, _ = forking.fork(lease, ask(), snapshot=taken.pk, now=NOW)
    for n in range(1, 4):
        snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE)
    taken.refresh_from_db()
    assert taken.forgotten_at
    assert forking.fork(lease, ask(), snapshot=taken.pk, now=NOW + 4 * MINUTE) == (fork, False)


def test_an_environment_that_is_held_for_something_else_is_a_conflict(lease: Lease, ask, grant) -> None:
    grant(environment="fork-1")
    with pytest.raises(Conflict) as refused:
        forking.fork(lease, ask(), now=NOW)
    assert refused.value.extra == {"field": "environment_id"}
    assert not Snapshot.objects.exists()


def test_the_environment_of_the_lease_itself_is_a_conflict_while_it_is_active(lease: Lease, ask) -> None:
    with pytest.raises(Conflict):
        forking.fork(lease, ask(lease.environment_id), now=NOW)


def test_a_fork_of_another_lease_or_copy_is_a_conflict(lease: Lease, ask, grant) -> None:
    first = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two")
    second = snapshots.take_snapshot(lease.pk, now=NOW + MINUTE)
    other = grant(environment="game-2")
    write(other, "other")
    forking.fork(lease, ask(), snapshot=first.pk, now=NOW + MINUTE)
    with pytest.raises(Conflict):
        forking.fork(lease, ask(), snapshot=second.pk, now=NOW + MINUTE)
    with pytest.raises(Conflict):
        forking.fork(other, ask(), now=NOW + MINUTE)


def test_the_fork_of_a_fork_is_no_fork_of_the_first(lease: Lease, ask) -> None:
    fork, _ = forking.fork(lease, ask(), now=NOW)
    second, _ = forking.fork(fork, ask("fork-2"), now=NOW)
    assert run(second, "cat", "f") == "one"
    with pytest.raises(Conflict):
        forking.fork(lease, ask("fork-2"), now=NOW)


def test_only_copies_of_the_lease_itself_are_forked(lease: Lease, ask, grant) -> None:
    other = grant(environment="game-2")
    write(other, "other")
    taken = snapshots.take_snapshot(other.pk, now=NOW)
    with pytest.raises(SnapshotNotFound):
        forking.fork(lease, ask(), snapshot=taken.pk, now=NOW)
    assert Lease.objects.count() == 2


def test_who_is_not_admitted_has_neither_lease_nor_copy(lease: Lease, ask) -> None:
    sleep(lease)

    def refuse() -> None:
        raise RateLimited()

    with pytest.raises(RateLimited):
        forking.fork(lease, ask(), now=NOW, admit=refuse)
    assert (Lease.objects.count(), Snapshot.objects.count(), LeaseEvent.objects.filter(kind="forked").count()) == (1, 1, 0)


@pytest.mark.parametrize("step", ["snapshot stored", "snapshot saved", "run answered"])
def test_dying_before_the_fork_is_granted_leaves_none_and_it_can_be_asked_for_again(
    step: str, lease: Lease, ask, at_checkpoint
) -> None:
    def die() -> None:
        raise SimulatedCrash

    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        forking.fork(lease, ask(), now=NOW)
    assert Lease.objects.count() == 1
    fork, is_new = forking.fork(lease, ask(), now=NOW + timedelta(seconds=1))
    assert (is_new, run(fork, "cat", "f")) == (True, "one")


@pytest.mark.django_db(transaction=True)
def test_forks_asked_for_at_once_are_one_lease(pool: Pool, memory: MemoryProvider, grant, ask) -> None:
    lease = grant()
    write(lease, "one")
    with run_in_threads(4) as together:
        answers = together(lambda index: forking.fork(lease, ask(), now=NOW))
    assert sorted(is_new for _, is_new in answers) == [False, False, False, True]
    assert len({fork.pk for fork, _ in answers}) == 1
    assert Snapshot.objects.filter(kind="forked").count() == 1
    assert Sandbox.objects.count() == 1
