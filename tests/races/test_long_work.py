"""Work that takes hours on a slow store while other workers sweep. It ends only if it makes no progress."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from leases import execution, fork, leasing, one_shot, snapshots
from leases.leasing import LeaseRequest
from leases.models import Lease, LeaseEvent
from leases.one_shot import OneShotRequest
from sandboxes import claims, destruction, eviction, files
from sandboxes.errors import OutcomeUnknown, SandboxNotReady
from sandboxes.models import Pool, Run, Sandbox, Snapshot, Transition
from sandboxes.providers.base import WORKSPACE
from sandboxes.providers.memory import MemoryProvider, ProgramCall, ProgramResult
from sandboxes.runs.operations import Command
from sandboxes.state import workspace
from sandboxes.state.file_tree import FileTree, Unreadable
from tests.conftest import MINUTE, NOW, SimulatedCrash, die
from tests.support.leases import evict, read, run, write
from tests.support.storage.slow_work import SlowStore, VirtualTime

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("guarded UPDATEs of the state machine")]
HOUR = timedelta(hours=1)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    """Store of this test, which is fast until its `pace` is set."""
    store = SlowStore()
    monkeypatch.setattr("sandboxes.storage.FilesystemStore", lambda root: store)
    return store


def list_states(lease: Lease) -> list[str]:
    return [*Transition.objects.filter(holder=lease.pk).order_by("pk").values_list("to", flat=True)]


def test_a_run_whose_data_takes_an_hour_to_pull_and_to_store_stays_open_and_its_sandbox_alive(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime, memory: MemoryProvider
) -> None:
    run(grant(environment="writer", environment_type="run"), "sh", "-c", "echo first >/data/note")
    lease = grant(ttl=HOUR / 2, sleep_after=MINUTE, environment_type="run")
    deadlines = []

    def work(call: ProgramCall) -> ProgramResult:
        time.sweep()
        deadlines.append(Run.objects.get(holder=lease.pk).deadline_at - time.now)
        return ProgramResult(stdout=call.files["/data/note"].content)

    memory.programs["work"] = work
    store.pace = time.advance
    result = run(lease, "sh", "-c", "work; echo second >/data/note")
    assert (result.exit_code, result.stdout) == (0, b"first\n")
    assert time.elapsed > 2 * HOUR
    [lease_run] = Run.objects.filter(holder=lease.pk)
    assert (lease_run.outcome, lease_run.note) == ("ok", "") and lease_run.ended_at == time.now
    assert deadlines == [MINUTE + timedelta(seconds=30)]  # that of the command, from its start
    assert list_states(lease) == ["warming", "warm", "running", "waiting"]
    store.pace = lambda: None
    assert run(grant(environment="reader", environment_type="run"), "cat", "/data/note", now=time.now).stdout == b"second\n"


@pytest.mark.parametrize("ended", [False, True])
def test_a_workspace_that_takes_an_hour_to_store_is_stored_once(
    ended: bool, grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    lease = grant(ttl=HOUR * 24)
    sandbox = write(lease, "large")
    store.pace = time.advance
    if ended:
        destruction.schedule_destroy_by_holder(lease.pk, now=NOW, reason="test")
        assert destruction.destroy(sandbox.pk, now=NOW)
    else:
        assert eviction.evict(sandbox.pk, now=NOW)
    assert time.elapsed > HOUR
    assert Snapshot.objects.count() == 1
    assert sum(method == "upload" and key.startswith("snapshots/") for method, key in store.calls) == 1


def test_a_wake_that_takes_an_hour_to_download_is_not_a_stalled_start(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    lease = grant(ttl=HOUR / 2)
    write(lease, "large")
    evict(lease)
    workspace.forget_local(Snapshot.objects.get())
    store.pace = time.advance
    assert read(lease, now=NOW) == "large"
    assert time.elapsed > HOUR
    assert list_states(lease)[-4:] == ["warming", "warm", "running", "waiting"]


def test_a_start_without_progress_is_given_up_and_says_so(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    lease = grant()
    write(lease)
    evict(lease)
    workspace.forget_local(Snapshot.objects.get())
    store.before("download", lambda key: time.advance(HOUR / 4))
    with pytest.raises(SandboxNotReady, match="made no progress"):
        read(lease)
    store.clear_hooks()
    assert read(lease, now=time.now) == "kept"


def test_an_overtaken_start_whose_copy_was_replaced_meanwhile_loses_nothing(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    lease = grant()
    write(lease, "old")
    evict(lease)
    workspace.forget_local(Snapshot.objects.get())
    old = Snapshot.objects.get()

    def overtake(key: str) -> None:
        store.clear_hooks()
        time.advance(HOUR / 4)
        for content in ("newer", "newest"):
            write(lease, content, now=time.now)
            evict(lease, now=time.now)

    store.before("download", overtake)
    with pytest.raises(SandboxNotReady, match="made no progress"):
        read(lease)
    old.refresh_from_db()
    assert old.forgotten_at and not store.has(f"{old.key}/workspace")
    assert read(lease, now=time.now) == "newest"


def test_a_command_whose_sandbox_was_put_to_sleep_after_its_run_was_given_up_loses_nothing(
    grant: Callable[..., Lease], time: VirtualTime, memory: MemoryProvider
) -> None:
    lease = grant()
    write(lease, "kept")

    def stall(call: ProgramCall) -> ProgramResult:
        time.advance(HOUR / 4)
        evict(lease, now=time.now)
        return ProgramResult()

    memory.programs["work"] = stall
    with pytest.raises(OutcomeUnknown):
        run(lease, "work")
    assert Run.objects.get(argv=["work"]).outcome == "lost"
    assert read(lease, now=time.now) == "kept"


def test_a_store_without_progress_loses_its_claim_and_records_nothing(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    """The other worker stores the state and takes the sandbox to sleep. The late one stops at its next piece."""
    lease = grant()
    sandbox = write(lease)
    hangs = iter([2 * claims.CLAIM_TTL])
    store.pace = lambda: time.advance(next(hangs, timedelta(0)))
    assert not eviction.evict(sandbox.pk, now=NOW)
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.tries, Snapshot.objects.count()) == ("cold", 0, 1)
    assert read(lease, now=time.now) == "kept"


def test_an_eviction_killed_in_the_middle_counts_as_a_try_and_is_finished_by_a_sweep(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    lease = grant()
    sandbox = write(lease)
    pieces = iter([time.advance] * 10 + [die])
    store.pace = lambda: next(pieces)()
    with pytest.raises(SimulatedCrash):
        eviction.evict(sandbox.pk, now=NOW)
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.tries) == ("evicting", 1)
    store.pace = time.advance
    time.advance(claims.CLAIM_TTL + MINUTE)
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.tries) == ("cold", 0)
    store.pace = lambda: None
    assert read(lease, now=time.now) == "kept"


def test_a_destroy_whose_process_dies_in_every_try_ends_in_quarantine(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime, settings: pytest.MonkeyPatch
) -> None:
    settings.DESTROY_TRIES = 3
    sandbox = write(grant())
    destruction.schedule_destroy_by_holder(sandbox.holder, now=NOW, reason="test")
    store.pace = die
    for _ in range(3):
        with pytest.raises(SimulatedCrash):
            destruction.destroy(sandbox.pk, now=time.now)
        time.elapsed += claims.CLAIM_TTL
    assert not destruction.destroy(sandbox.pk, now=time.now)
    sandbox.refresh_from_db()
    assert sandbox.quarantined_at and "died in every try" in sandbox.last_error
    assert Sandbox.objects.filter(pk=sandbox.pk, state="destroying").exists()


# --- time after slow work ----------------------------------------------------------------------------------------------


def test_a_fork_of_a_workspace_that_takes_an_hour_to_store_is_granted_when_it_is_stored(
    grant: Callable[..., Lease], pool: Pool, store: SlowStore, time: VirtualTime
) -> None:
    lease = grant(ttl=HOUR / 2)
    write(lease, "large")
    store.pace = time.advance
    request = LeaseRequest(lease.agent_did, "fork", "catan", pool=pool.name, ttl=HOUR / 2)
    forked, is_new = fork.fork(lease, request, now=NOW)
    assert time.elapsed > HOUR
    assert (is_new, forked.leased_at, forked.expires_at) == (True, time.now, time.now + HOUR / 2)
    own, temporary = Snapshot.objects.get(holder=forked.pk), Snapshot.objects.get(holder=lease.pk)
    assert (own.at, temporary.forgotten_at) == (time.now, time.now)
    assert {event.at for event in LeaseEvent.objects.filter(kind="forked")} == {time.now}


def test_a_snapshot_and_a_restore_that_take_hours_are_on_the_timeline_at_their_end(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime
) -> None:
    lease = grant(ttl=HOUR / 2)
    write(lease, "large")
    store.pace = time.advance
    taken = snapshots.take_snapshot(lease.pk, now=NOW)
    taken_at = time.now
    restored = snapshots.restore_snapshot(lease.pk, taken.pk, now=time.now)
    assert (time.now > taken_at > NOW + HOUR, restored.at) == (True, time.now)
    assert [*LeaseEvent.objects.filter(kind__in=["snapshot", "restored"]).order_by("pk").values_list("at", flat=True)] == [
        taken_at, time.now,
    ]  # fmt: skip


def test_a_one_shot_run_ends_when_its_command_has_ended(pool: Pool, memory: MemoryProvider, time: VirtualTime) -> None:
    def work(call: ProgramCall) -> ProgramResult:
        time.advance(HOUR)
        return ProgramResult(stdout=b"done")

    memory.programs["work"] = work
    result = one_shot.run_once(OneShotRequest("did:plc:ada", ["work"], 2 * HOUR, pool=pool.name), now=NOW)
    lease = Lease.objects.get(pk=result.lease_id)
    assert (result.outcome, lease.ended_at, lease.leased_at) == ("ok", NOW + HOUR, NOW)
    assert Transition.objects.get(to="destroyed").at == NOW + HOUR


@pytest.mark.parametrize("verb", ["snapshot", "restore", "fork", "one-shot run"])
def test_work_after_a_slow_check_begins_when_the_check_has_ended(
    verb: str, grant: Callable[..., Lease], pool: Pool, time: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, check_active = grant(), leasing.check_active
    write(lease)
    taken = snapshots.take_snapshot(lease.pk, now=NOW)

    def check_slowly(found: Lease | None, *, now: datetime) -> Lease:
        time.elapsed = time.elapsed or MINUTE
        return check_active(found, now=now)

    monkeypatch.setattr(leasing, "check_active", check_slowly)
    request = LeaseRequest(lease.agent_did, "fork", "catan", pool=pool.name)
    act: dict[str, Callable[[], object]] = {
        "snapshot": lambda: snapshots.take_snapshot(lease.pk, now=NOW),
        "restore": lambda: snapshots.restore_snapshot(lease.pk, taken.pk, now=NOW),
        "fork": lambda: fork.fork(lease, request, now=NOW),
        "one-shot run": lambda: one_shot.run_once(OneShotRequest("did:plc:bob", ["true"], MINUTE, pool=pool.name), now=NOW),
    }
    last = Transition.objects.order_by("pk").last()
    assert last
    act[verb]()
    assert {*Transition.objects.filter(pk__gt=last.pk).values_list("at", flat=True)} == {NOW + MINUTE}


def test_files_whose_stored_copy_is_found_unreadable_late_are_read_after_a_wake(
    grant: Callable[..., Lease], time: VirtualTime
) -> None:
    lease = grant(ttl=HOUR)
    write(lease)
    evict(lease)

    def list_names(tree: FileTree) -> list[str]:
        if time.elapsed:
            return [*tree.list_entries("", deep=False, limit=10)]
        time.advance(HOUR / 4)
        raise Unreadable("unsupported members")

    command = Command(argv=["list"], timeout=MINUTE, kind="file", needs_data=False)
    with execution.use_lease(lease.pk, now=NOW) as request:
        names, source = files.read_files(request, WORKSPACE, command, list_names, now=NOW)
    assert ("f" in names, source) == (True, files.SOURCE_SANDBOX)
    woken = Transition.objects.filter(code="woken").get()
    assert (woken.at, Run.objects.get(argv=["list"]).started_at) == (time.now, time.now)


def test_a_workspace_measured_after_a_slow_wake_is_measured_then(
    grant: Callable[..., Lease], store: SlowStore, time: VirtualTime, memory: MemoryProvider
) -> None:
    lease = grant(ttl=HOUR / 2)
    write(lease)
    evict(lease)
    workspace.forget_local(Snapshot.objects.get())
    Sandbox.objects.update(workspace_bytes=1 << 40)
    store.pace, memory.calls[:] = time.advance, []
    read(lease)
    assert Sandbox.objects.get().measured_at == time.now > NOW + HOUR
    assert [verb for verb, _ in memory.calls].count("size") == 1  # not again after the command, as if an hour had passed
