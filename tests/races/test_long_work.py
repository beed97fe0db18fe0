"""Work that takes hours on a slow store while other workers sweep. It ends only if it makes no progress."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from leases.models import Lease
from sandboxes import claims, destruction, eviction
from sandboxes.errors import SandboxNotReady
from sandboxes.models import Run, Sandbox, Snapshot, Transition
from sandboxes.providers.memory import MemoryProvider, ProgramCall, ProgramResult
from sandboxes.state import workspace
from tests.conftest import MINUTE, NOW, SimulatedCrash, die
from tests.support.leases import evict, read, run, write
from tests.support.storage.slow_work import SlowStore, VirtualTime

pytestmark = pytest.mark.django_db
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
    run(grant(environment="writer"), "sh", "-c", "echo first >/data/note")
    lease = grant(ttl=HOUR / 2, sleep_after=MINUTE)
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
    assert run(grant(environment="reader"), "cat", "/data/note", now=time.now).stdout == b"second\n"


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
