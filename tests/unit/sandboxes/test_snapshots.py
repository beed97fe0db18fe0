"""Copies that are asked for, and going back to them: what the next use finds, whatever happens in between."""

import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest

from leases import execution, leasing, snapshots, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease, LeaseEvent
from sandboxes import eviction, runs
from sandboxes import pool as pools
from sandboxes import snapshots as below
from sandboxes import sweeps as pool_sweeps
from sandboxes.errors import SandboxBusy, SnapshotNotFound, StoreUnavailable
from sandboxes.models import Pool, Run, Sandbox, Snapshot
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import Command
from sandboxes.state import workspace
from sandboxes.storage import get_store
from tests.conftest import MINUTE, NOW, SimulatedCrash, run_in_threads

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(hours=1)  # every deadline has passed, no lease has


def die() -> None:
    raise SimulatedCrash


def write(lease: Lease, text: str, *, now=NOW) -> None:
    command = Command(argv=["sh", "-c", f"echo {text} >f"], timeout=MINUTE)
    assert execution.exec_command(lease.pk, command, now=now)[1].exit_code == 0


def read(lease: Lease, *, now=NOW) -> str:
    return execution.exec_command(lease.pk, Command(argv=["cat", "f"], timeout=MINUTE), now=now)[1].stdout.decode().strip()


def sleep(lease: Lease, *, now=NOW) -> None:
    sandbox = pools.find_by_holder(lease.pk)
    assert sandbox
    assert eviction.evict(sandbox.pk, now=now, reason="test")


def names(lease: Lease) -> list[tuple[str, str]]:
    """Kind and name of what is kept, the newest first."""
    return list(workspace.find_by_holder(lease.pk).values_list("kind", "name"))


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    granted: Lease = grant()
    write(granted, "one")
    return granted


# --- taking -------------------------------------------------------------------------------------------------------


def test_a_copy_of_what_is_alive_is_a_run_and_leaves_it_alive(lease: Lease, memory: MemoryProvider) -> None:
    taken = snapshots.take_snapshot(lease.pk, name="before", now=NOW)
    assert (taken.kind, taken.name, taken.holder) == ("asked", "before", lease.pk)
    assert get_store().has(f"{taken.key}/workspace")
    run = Run.objects.get(kind="file")
    assert (run.argv, run.outcome) == (["snapshot", "before"], "ok")
    assert Sandbox.objects.get().state == "waiting"
    event = LeaseEvent.objects.get(kind="snapshot")
    assert (event.lease, event.reason) == (lease, f"{taken.pk} before")


def test_a_copy_of_what_sleeps_wakes_nothing_and_stores_nothing_anew(lease: Lease, memory: MemoryProvider) -> None:
    sleep(lease)
    asleep, calls = workspace.find_latest(lease.pk), len(memory.calls)
    assert asleep
    taken = snapshots.take_snapshot(lease.pk, name="cold", now=NOW + MINUTE)
    assert (taken.key, taken.name, len(memory.calls)) == (asleep.key, "cold", calls)
    assert names(lease) == [("asked", "cold"), ("sleep", "")]
    assert read(lease, now=NOW + MINUTE) == "one"


def test_a_copy_is_taken_of_what_has_lost_its_place(lease: Lease, memory: MemoryProvider) -> None:
    sleep(lease)
    assert eviction.release_cold(Sandbox.objects.get().pk, now=NOW, reason="test")
    assert snapshots.take_snapshot(lease.pk, now=NOW).kind == "asked"


def test_there_is_no_copy_of_nothing(grant, memory: MemoryProvider) -> None:
    with pytest.raises(SnapshotNotFound, match="nothing in this workspace yet"):
        snapshots.take_snapshot(grant().pk, now=NOW)
    assert memory.calls == []


def test_an_ended_lease_takes_no_copy(lease: Lease) -> None:
    leasing.release(lease.pk, now=NOW)
    with pytest.raises(LeaseEnded):
        snapshots.take_snapshot(lease.pk, now=NOW)


def test_a_lease_that_ends_while_its_copy_is_stored_has_none(lease: Lease, at_checkpoint) -> None:
    at_checkpoint("snapshot stored", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        snapshots.take_snapshot(lease.pk, now=NOW)
    assert not Snapshot.objects.exists()


def test_the_oldest_copies_go(lease: Lease, settings) -> None:
    settings.KEEP_ASKED_SNAPSHOTS = 2
    first, *_ = [snapshots.take_snapshot(lease.pk, name=name, now=NOW + n * MINUTE) for n, name in enumerate("abc")]
    assert names(lease) == [("asked", "c"), ("asked", "b")]
    assert not get_store().has(f"{first.key}/workspace")


def test_sleeping_pushes_no_copy_out_that_somebody_asked_for(lease: Lease) -> None:
    taken = snapshots.take_snapshot(lease.pk, name="before the raid", now=NOW)
    for hour in range(1, 5):
        write(lease, str(hour), now=NOW + hour * timedelta(minutes=20))
        pool_sweeps.evict_idle(now=NOW + hour * timedelta(minutes=20) + 10 * MINUTE)
    assert [each.kind for each in workspace.find_by_holder(lease.pk)] == ["sleep", "sleep", "asked"]
    assert workspace.find_by_holder(lease.pk).last() == taken


def test_the_store_failing_leaves_no_row(lease: Lease, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.fail("get_files", Unavailable("engine away"))
    with pytest.raises(Exception, match="engine away"):
        snapshots.take_snapshot(lease.pk, now=NOW)
    assert not Snapshot.objects.exists()
    assert Sandbox.objects.get().state == "waiting"


@pytest.mark.parametrize("step", ["run opened", "snapshot stored", "snapshot saved", "run answered"])
def test_dying_anywhere_while_a_copy_is_taken_loses_nothing(step: str, lease: Lease, at_checkpoint) -> None:
    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        snapshots.take_snapshot(lease.pk, now=NOW)
    sweeps.recover_stalled(now=LATER)
    assert all(get_store().has(f"{row.key}/workspace") for row in Snapshot.objects.all())
    assert read(lease, now=LATER) == "one"
    assert snapshots.take_snapshot(lease.pk, now=LATER).kind == "asked"


# --- restoring ----------------------------------------------------------------------------------------------------


def test_the_next_use_after_a_restore_finds_the_copy(lease: Lease) -> None:
    taken = snapshots.take_snapshot(lease.pk, name="one", now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    restored = snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert (restored.kind, restored.name, restored.key) == ("restored", "one", taken.key)
    assert Sandbox.objects.get().state == "cold"
    assert read(lease, now=NOW + 3 * MINUTE) == "one"
    assert Sandbox.objects.get().prepared


def test_what_was_there_before_a_restore_can_be_gone_back_to(lease: Lease) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    before = workspace.find_by_holder(lease.pk).get(kind="sleep")
    snapshots.restore_snapshot(lease.pk, before.pk, now=NOW + 3 * MINUTE)
    assert read(lease, now=NOW + 4 * MINUTE) == "two"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_one_copy_is_restored_again_and_again_by_its_first_name(keep: int, lease: Lease, settings) -> None:
    settings.KEEP_SNAPSHOTS = keep
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    for n in range(1, 5):
        write(lease, f"try-{n}", now=NOW + n * timedelta(minutes=20))
        restored = snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + n * timedelta(minutes=20) + MINUTE)
        assert workspace.find_latest(lease.pk) == restored
        assert read(lease, now=NOW + n * timedelta(minutes=20) + 2 * MINUTE) == "one"


def test_a_restore_of_what_sleeps_calls_no_provider(lease: Lease, memory: MemoryProvider) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    sleep(lease, now=NOW + MINUTE)
    calls = len(memory.calls)
    snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert len(memory.calls) == calls
    assert read(lease, now=NOW + 3 * MINUTE) == "one"


def test_a_restore_after_the_place_was_lost_is_found_by_the_next_sandbox(lease: Lease) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    sleep(lease, now=NOW + MINUTE)
    eviction.release_cold(Sandbox.objects.get().pk, now=NOW + MINUTE, reason="test")
    snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert read(lease, now=NOW + 3 * MINUTE) == "one"


def test_a_restore_is_the_newest_whatever_the_clocks_say(lease: Lease) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    sleep(lease, now=NOW + 10 * MINUTE)
    snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 5 * MINUTE)
    assert read(lease, now=NOW + 11 * MINUTE) == "one"


def test_nothing_is_restored_while_something_runs(lease: Lease, memory: MemoryProvider) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    tried: list[Exception] = []

    def try_it(ref: str) -> None:
        with pytest.raises(SandboxBusy, match="Something runs") as refused:
            snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
        tried.append(refused.value)

    memory.before("exec", try_it)
    write(lease, "two")
    assert tried
    assert names(lease) == [("asked", "")]


def test_a_use_that_begins_before_the_sleep_wins(lease: Lease, at_checkpoint) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    run = Command(argv=["true"], timeout=MINUTE)
    sandbox = pools.find_by_holder(lease.pk)
    assert sandbox
    at_checkpoint("restore noted", lambda: runs.open_run(sandbox, run, now=NOW))
    with pytest.raises(SandboxBusy, match="Something runs"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
    assert names(lease) == [("asked", "")]
    assert Snapshot.objects.get(kind="restored").forgotten_at


def test_a_use_that_wakes_it_in_between_is_put_to_sleep_as_well(lease: Lease, at_checkpoint) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    at_checkpoint("restore asleep", lambda: write(lease, "three", now=NOW + 2 * MINUTE))
    snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert read(lease, now=NOW + 3 * MINUTE) == "one"
    restored, last, *_ = workspace.find_by_holder(lease.pk).exclude(incarnation=3)
    assert (restored.kind, last.kind) == ("restored", "sleep")
    snapshots.restore_snapshot(lease.pk, last.pk, now=NOW + 4 * MINUTE)
    assert read(lease, now=NOW + 5 * MINUTE) == "three"


def test_somebody_who_uses_it_over_and_over_is_not_waited_for_for_ever(lease: Lease, monkeypatch) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    monkeypatch.setattr(below, "checkpoint", lambda name, subject: name == "restore asleep" and write(lease, "more"))
    with pytest.raises(SandboxBusy, match="constant use"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
    assert read(lease) == "more"


def test_what_cannot_be_stored_stays_and_nothing_is_restored(lease: Lease, memory: MemoryProvider) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    with memory.fail("get_files", Unavailable("engine away")), pytest.raises(StoreUnavailable, match="engine away"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert read(lease, now=NOW + 3 * MINUTE) == "two"
    assert names(lease) == [("asked", "")]


def test_a_process_that_does_not_go_makes_a_restore_busy_at_once(lease: Lease, memory: MemoryProvider) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    with memory.fail("destroy", Unavailable("engine away")), pytest.raises(SandboxBusy, match="could not be destroyed"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
    sweeps.recover_stalled(now=LATER)
    assert snapshots.restore_snapshot(lease.pk, taken.pk, now=LATER).key == taken.key


def test_only_copies_of_the_same_lease_that_are_kept_are_restored(lease: Lease, grant, settings) -> None:
    settings.KEEP_ASKED_SNAPSHOTS = 2
    other = grant(environment="game-2")
    write(other, "other")
    taken = snapshots.take_snapshot(other.pk, now=NOW)
    gone, *_ = [snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE) for n in range(3)]
    for pk in (taken.pk, gone.pk, uuid.uuid4()):
        with pytest.raises(SnapshotNotFound) as refused:
            snapshots.restore_snapshot(lease.pk, pk, now=NOW + 3 * MINUTE)
        assert refused.value.extra == {"field": "snapshot_id"}
    assert Sandbox.objects.get(holder=lease.pk).state == "waiting"


def test_a_restore_of_an_ended_lease_is_refused(lease: Lease, at_checkpoint) -> None:
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    at_checkpoint("restore asleep", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
    with pytest.raises(LeaseEnded):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)


STEPS = ["restore noted", "eviction claimed", "objects stored", "persisted", "process gone", "restore asleep", "restored"]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_dying_anywhere_in_a_restore_leaves_one_or_the_other(
    step: str, keep: int, lease: Lease, pool: Pool, memory: MemoryProvider, at_checkpoint, settings
) -> None:
    settings.KEEP_SNAPSHOTS = keep
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    soon = NOW + 15 * MINUTE  # every deadline has passed
    sweeps.recover_stalled(now=soon)
    sweeps.reconcile(now=soon, grace=timedelta(0))
    assert read(lease, now=soon) == ("one" if step == "restored" else "two")
    if keep > 1 or step in ("restore noted", "restored"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=soon + MINUTE)
        assert read(lease, now=soon + 2 * MINUTE) == "one"
    assert not Run.objects.filter(ended_at__isnull=True).exists()


@pytest.mark.django_db(transaction=True)
def test_of_a_restore_and_uses_at_the_same_time_nothing_is_lost(pool: Pool, memory: MemoryProvider, grant) -> None:
    lease = grant()
    write(lease, "one")
    taken = snapshots.take_snapshot(lease.pk, now=NOW)

    def act(index: int) -> object:
        if index:
            return write(lease, f"use-{index}")
        return snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)

    with run_in_threads(4) as together:
        answers = together(act)
    assert all(isinstance(answer, None | Snapshot | SandboxBusy) for answer in answers), answers
    assert read(lease, now=NOW + MINUTE) in ("one", "use-1", "use-2", "use-3")
    pool_sweeps.evict_idle(now=LATER)
    assert Sandbox.objects.get(holder=lease.pk).state == "cold"
    assert [row.forgotten_at for row in workspace.find_by_holder(lease.pk)] == [None] * workspace.find_by_holder(
        lease.pk
    ).count()
