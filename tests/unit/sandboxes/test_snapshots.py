"""Requested snapshots and restores, with races and crashes."""

import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest

from leases import leasing, snapshots, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease, LeaseEvent
from sandboxes import eviction
from sandboxes import snapshots as sandbox_snapshots
from sandboxes.errors import SandboxBusy, SnapshotNotFound, StoreUnavailable
from sandboxes.models import Run, Sandbox, Snapshot
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from sandboxes.state import workspace
from sandboxes.storage import get_store
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.leases import evict, get_sandbox, read, write

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(hours=1)  # after every deadline, before the end of any lease


def retained(lease: Lease) -> list[tuple[str, str]]:
    """Kind and name of the retained snapshots, the newest first."""
    return list(workspace.find_by_holder(lease.pk).values_list("kind", "name"))


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    granted: Lease = grant()
    write(granted, "one")
    return granted


@pytest.fixture
def taken(lease: Lease) -> Snapshot:
    """A requested snapshot with `one` in the file, which has contained `two` since a minute later."""
    snapshot = snapshots.take_snapshot(lease.pk, name="one", now=NOW)
    write(lease, "two", now=NOW + MINUTE)
    return snapshot


# --- snapshots -------------------------------------------------------------------------------------------------------


def test_snapshot_of_an_alive_sandbox_is_a_run_and_leaves_it_alive(lease: Lease, memory: MemoryProvider) -> None:
    taken = snapshots.take_snapshot(lease.pk, name="before", now=NOW)
    assert (taken.kind, taken.name, taken.holder) == ("asked", "before", lease.pk)
    assert get_store().has(f"{taken.key}/workspace")
    run = Run.objects.get(kind="file")
    assert (run.argv, run.outcome) == (["snapshot", "before"], "ok")
    assert Sandbox.objects.get().state == "waiting"
    event = LeaseEvent.objects.get(kind="snapshot")
    assert (event.lease, event.reason) == (lease, f"{taken.pk} before")


@pytest.mark.parametrize("released", [False, True], ids=["cold", "without a place"])
def test_snapshot_without_a_process_wakes_nothing_and_reuses_the_stored_objects(released: bool, lease: Lease, memory) -> None:
    evict(lease)
    if released:
        assert eviction.release_cold(Sandbox.objects.get().pk, now=NOW, reason="test")
    stored, calls = workspace.find_latest(lease.pk), len(memory.calls)
    assert stored
    taken = snapshots.take_snapshot(lease.pk, name="cold", now=NOW + MINUTE)
    assert (taken.key, taken.name, len(memory.calls)) == (stored.key, "cold", calls)
    assert retained(lease) == [("asked", "cold"), ("sleep", "")]
    assert read(lease, now=NOW + MINUTE) == "one"


def test_snapshot_of_an_unused_workspace_is_refused(grant, memory: MemoryProvider) -> None:
    with pytest.raises(SnapshotNotFound, match="workspace is empty"):
        snapshots.take_snapshot(grant().pk, now=NOW)
    assert memory.calls == []


def test_lease_that_ends_before_or_while_its_snapshot_is_stored_gets_no_row(lease: Lease, at_checkpoint) -> None:
    at_checkpoint("snapshot stored", lambda: leasing.release(lease.pk, now=NOW))
    for _ in range(2):
        with pytest.raises(LeaseEnded):
            snapshots.take_snapshot(lease.pk, now=NOW)
    assert not Snapshot.objects.exists()


def test_oldest_requested_snapshots_are_deleted(lease: Lease, settings) -> None:
    settings.KEEP_ASKED_SNAPSHOTS = 2
    first, *_ = [snapshots.take_snapshot(lease.pk, name=name, now=NOW + n * MINUTE) for n, name in enumerate("abc")]
    assert retained(lease) == [("asked", "c"), ("asked", "b")]
    assert not get_store().has(f"{first.key}/workspace")


def test_eviction_snapshots_do_not_displace_requested_ones(lease: Lease) -> None:
    taken = snapshots.take_snapshot(lease.pk, name="before the raid", now=NOW)
    for hour in range(1, 5):
        write(lease, str(hour), now=NOW + hour * timedelta(minutes=20))
        passes.evict_idle(now=NOW + hour * timedelta(minutes=20) + 10 * MINUTE)
    assert [snapshot.kind for snapshot in workspace.find_by_holder(lease.pk)] == ["sleep", "sleep", "asked"]
    assert workspace.find_by_holder(lease.pk).last() == taken


def test_failed_snapshot_leaves_no_row(lease: Lease, memory: MemoryProvider) -> None:
    memory.fail("get_files", Unavailable("engine away"))
    with pytest.raises(Exception, match="engine away"):
        snapshots.take_snapshot(lease.pk, now=NOW)
    assert not Snapshot.objects.exists()
    assert Sandbox.objects.get().state == "waiting"


@pytest.mark.parametrize("step", ["run opened", "snapshot stored", "snapshot saved", "run answered"])
def test_crash_at_any_step_of_a_snapshot_loses_nothing(step: str, lease: Lease, crash_at) -> None:
    with crash_at(step):
        snapshots.take_snapshot(lease.pk, now=NOW)
    sweeps.recover_stalled(now=LATER)
    assert all(get_store().has(f"{row.key}/workspace") for row in Snapshot.objects.all())
    assert read(lease, now=LATER) == "one"
    assert snapshots.take_snapshot(lease.pk, now=LATER).kind == "asked"


# --- restores ----------------------------------------------------------------------------------------------------


def test_next_use_after_a_restore_finds_the_snapshot_and_the_state_before_can_be_restored(
    lease: Lease, taken: Snapshot
) -> None:
    restored = snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert (restored.kind, restored.name, restored.key) == ("restored", "one", taken.key)
    assert Sandbox.objects.get().state == "cold"
    before = workspace.find_by_holder(lease.pk).get(kind="sleep")
    assert read(lease, now=NOW + 3 * MINUTE) == "one"
    assert Sandbox.objects.get().prepared
    snapshots.restore_snapshot(lease.pk, before.pk, now=NOW + 4 * MINUTE)
    assert read(lease, now=NOW + 5 * MINUTE) == "two"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_one_snapshot_is_restored_repeatedly_by_its_first_id(keep: int, lease: Lease, settings) -> None:
    settings.KEEP_SNAPSHOTS = keep
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    for n in range(1, 5):
        moment = NOW + n * timedelta(minutes=20)
        write(lease, f"try-{n}", now=moment)
        restored = snapshots.restore_snapshot(lease.pk, taken.pk, now=moment + MINUTE)
        assert workspace.find_latest(lease.pk) == restored
        assert read(lease, now=moment + 2 * MINUTE) == "one"


@pytest.mark.parametrize("released", [False, True], ids=["cold", "without a place"])
def test_restore_without_a_process_calls_no_provider(
    released: bool, lease: Lease, taken: Snapshot, memory: MemoryProvider
) -> None:
    evict(lease, now=NOW + MINUTE)
    if released:
        assert eviction.release_cold(Sandbox.objects.get().pk, now=NOW + MINUTE, reason="test")
    calls = len(memory.calls)
    snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert len(memory.calls) == calls
    assert read(lease, now=NOW + 3 * MINUTE) == "one"


def test_restored_snapshot_is_the_newest_also_with_an_earlier_clock(lease: Lease, taken: Snapshot) -> None:
    evict(lease, now=NOW + 10 * MINUTE)
    snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 5 * MINUTE)
    assert read(lease, now=NOW + 11 * MINUTE) == "one"


def test_restore_during_a_run_is_refused(lease: Lease, taken: Snapshot, memory: MemoryProvider) -> None:
    refusals: list[Exception] = []

    def attempt(ref: str) -> None:
        with pytest.raises(SandboxBusy, match="A run is open") as refused:
            snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
        refusals.append(refused.value)

    memory.before("exec", attempt)
    write(lease, "three")
    assert refusals
    assert retained(lease) == [("asked", "one")]


def test_run_that_begins_before_the_eviction_prevents_the_restore(lease: Lease, taken: Snapshot, at_checkpoint) -> None:
    run = Command(argv=["true"], timeout=MINUTE)
    at_checkpoint("restore reserved", lambda: operations.open_run(get_sandbox(lease), run, now=NOW))
    with pytest.raises(SandboxBusy, match="A run is open"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
    assert retained(lease) == [("asked", "one")]
    assert Snapshot.objects.get(kind="restored").forgotten_at


def test_sandbox_that_wakes_during_a_restore_is_evicted_again(lease: Lease, taken: Snapshot, at_checkpoint) -> None:
    at_checkpoint("restore evicted", lambda: write(lease, "three", now=NOW + 2 * MINUTE))
    snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert read(lease, now=NOW + 3 * MINUTE) == "one"
    restored, last, *_ = workspace.find_by_holder(lease.pk).exclude(incarnation=3)
    assert (restored.kind, last.kind) == ("restored", "sleep")
    snapshots.restore_snapshot(lease.pk, last.pk, now=NOW + 4 * MINUTE)
    assert read(lease, now=NOW + 5 * MINUTE) == "three"


def test_restore_of_a_constantly_used_sandbox_is_refused(lease: Lease, taken: Snapshot, monkeypatch) -> None:
    monkeypatch.setattr(
        sandbox_snapshots, "checkpoint", lambda name, subject: name == "restore evicted" and write(lease, "more")
    )
    with pytest.raises(SandboxBusy, match="constant use"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
    assert read(lease) == "more"


def test_restore_keeps_the_present_state_if_that_cannot_be_stored(lease: Lease, taken: Snapshot, memory) -> None:
    with memory.fail("get_files", Unavailable("engine away")), pytest.raises(StoreUnavailable, match="engine away"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    assert read(lease, now=NOW + 3 * MINUTE) == "two"
    assert retained(lease) == [("asked", "one")]


def test_restore_is_busy_while_the_process_cannot_be_destroyed(lease: Lease, taken: Snapshot, memory) -> None:
    with memory.fail("destroy", Unavailable("engine away")), pytest.raises(SandboxBusy, match="could not be destroyed"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)
    sweeps.recover_stalled(now=LATER)
    assert snapshots.restore_snapshot(lease.pk, taken.pk, now=LATER).key == taken.key


def test_snapshot_of_another_lease_or_a_deleted_one_is_not_restored(lease: Lease, taken: Snapshot, grant, settings) -> None:
    settings.KEEP_ASKED_SNAPSHOTS = 2
    other = grant(environment="game-2")
    write(other, "other")
    foreign = snapshots.take_snapshot(other.pk, now=NOW)
    for n in (1, 2):  # deletes the first one
        snapshots.take_snapshot(lease.pk, now=NOW + n * MINUTE)
    for pk in (foreign.pk, taken.pk, uuid.uuid4()):
        with pytest.raises(SnapshotNotFound) as refused:
            snapshots.restore_snapshot(lease.pk, pk, now=NOW + 3 * MINUTE)
        assert refused.value.extra == {"field": "snapshot_id"}
    assert Sandbox.objects.get(holder=lease.pk).state == "waiting"


def test_restore_is_refused_if_the_lease_ends_before_or_during_it(lease: Lease, taken: Snapshot, at_checkpoint) -> None:
    at_checkpoint("restore evicted", lambda: leasing.release(lease.pk, now=NOW))
    for _ in range(2):
        with pytest.raises(LeaseEnded):
            snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)


STEPS = ["restore reserved", "eviction claimed", "objects stored", "persisted", "process gone", "restore evicted", "restored"]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_crash_at_any_step_of_a_restore_leaves_the_old_or_the_new_state(
    step: str, keep: int, lease: Lease, taken: Snapshot, crash_at, settings
) -> None:
    settings.KEEP_SNAPSHOTS = keep
    with crash_at(step):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW + 2 * MINUTE)
    after_deadlines = NOW + 15 * MINUTE
    sweeps.recover_stalled(now=after_deadlines)
    sweeps.reconcile(now=after_deadlines, grace=timedelta(0))
    assert read(lease, now=after_deadlines) == ("one" if step == "restored" else "two")
    if keep > 1 or step in ("restore reserved", "restored"):
        snapshots.restore_snapshot(lease.pk, taken.pk, now=after_deadlines + MINUTE)
        assert read(lease, now=after_deadlines + 2 * MINUTE) == "one"
    assert not Run.objects.filter(ended_at__isnull=True).exists()


@pytest.mark.django_db(transaction=True)
def test_concurrent_restore_and_runs_lose_nothing(lease: Lease, taken: Snapshot) -> None:
    def act(index: int) -> object:
        return write(lease, f"use-{index}") if index else snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW)

    with run_in_threads(4) as together:
        answers = together(act)
    assert all(isinstance(answer, Sandbox | Snapshot | SandboxBusy) for answer in answers), answers
    assert read(lease, now=NOW + MINUTE) in ("one", "use-1", "use-2", "use-3")
    passes.evict_idle(now=LATER)
    assert Sandbox.objects.get(holder=lease.pk).state == "cold"
    assert not any(row.forgotten_at for row in workspace.find_by_holder(lease.pk))
