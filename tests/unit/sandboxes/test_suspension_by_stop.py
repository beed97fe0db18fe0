"""Suspension at providers that stop the sandbox: the state is stored before, processes end, and the files stay."""

from datetime import timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.models import EnvironmentType, Lease
from sandboxes import processes, suspension
from sandboxes.models import Process, Run, Sandbox
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.storage.base import StoreError
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import get_sandbox, read, run, write

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stopped_clock")]
DUE, LATER = NOW + MINUTE, NOW + 6 * MINUTE  # every claim has ended at LATER, but not the idle time


@pytest.fixture(autouse=True)
def stopping(memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryProvider, "suspend_keeps_processes", False)
    EnvironmentType.objects.update(suspend_after=timedelta(seconds=30))


@pytest.fixture
def sandbox(lease: Lease) -> Sandbox:
    return write(lease)


@pytest.fixture
def suspended(sandbox: Sandbox) -> Sandbox:
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.claim, sandbox.persisted, sandbox.snapshots.count()) == ("suspended", None, True, 1)
    return sandbox


def start(lease: Lease, **fields: object) -> Process:
    with execution.use_lease(lease.pk, now=NOW) as request:
        return processes.start_process(request, ProcessSpec(["sleep", "300"], **fields), now=NOW)  # type: ignore[arg-type]


def test_next_exec_starts_the_sandbox_with_its_files_and_restores_nothing(lease, suspended, memory) -> None:
    before = len(memory.calls)
    assert read(lease, now=LATER) == "kept"
    suspended.refresh_from_db()
    assert (suspended.state, suspended.frozen, suspended.incarnation) == ("waiting", False, 1)
    assert {"create", "put_files"} & {method for method, _ in memory.calls[before:]} == set()


def test_vendor_that_deletes_a_suspended_sandbox_loses_nothing(lease, suspended, memory) -> None:
    memory.vanish(suspended.ref)
    with pytest.raises(execution.SandboxError, match="nothing unsaved was in it"):
        run(lease, now=LATER)
    assert read(lease, now=LATER) == "kept"
    assert get_sandbox(lease).incarnation == 2


def test_loss_of_what_ran_after_a_suspension_is_still_a_loss(lease, suspended, memory) -> None:
    run(lease, now=LATER)
    memory.vanish(suspended.ref)
    with pytest.raises(execution.SandboxError):
        run(lease, now=LATER)
    suspended.refresh_from_db()
    assert suspended.lost_at and "Lost" in suspended.last_error


def test_sandbox_resumed_without_a_run_stores_its_state_again(lease, suspended, memory) -> None:
    suspension.ensure_awake(suspended, memory, now=LATER)
    memory.write_file(suspended.ref, "/workspace/f", b"by a process\n")
    assert passes.suspend_waiting(now=LATER + MINUTE).counts == {"suspended": 1}
    memory.vanish(suspended.ref)
    assert sweeps.reconcile(now=LATER + MINUTE, grace=timedelta(0)).counts.get("leases ended as lost") is None
    with pytest.raises(execution.SandboxError, match="nothing unsaved was in it"):
        run(lease, now=LATER + MINUTE)
    assert read(lease, now=LATER + MINUTE) == "by a process"


def test_idle_suspended_sandbox_is_put_to_sleep_without_a_start(lease, suspended, memory) -> None:
    before = len(memory.calls)
    assert passes.evict_idle(now=NOW + 40 * MINUTE).counts == {"put to sleep": 1}
    assert [method for method, _ in memory.calls[before:] if method in ("resume", "get_files")] == []
    assert read(lease, now=NOW + 41 * MINUTE) == "kept"


def test_end_of_the_lease_destroys_a_suspended_sandbox_without_a_start(lease, suspended, memory) -> None:
    before = len(memory.calls)
    leasing.release(lease.pk, now=LATER)
    assert sweeps.reclaim(now=LATER).failures == []
    suspended.refresh_from_db()
    assert (suspended.state, suspended.snapshots.count()) == ("destroyed", 1)
    assert "resume" not in {method for method, _ in memory.calls[before:]}


def test_process_that_asked_for_it_prevents_the_stop_and_others_end_with_it(lease, sandbox, memory) -> None:
    watcher, other = start(lease, keep_awake=True), start(lease)
    server = start(lease, restart_after_wake=True)
    assert passes.suspend_waiting(now=DUE).counts == {}
    processes.kill_process(watcher, now=DUE)
    assert passes.suspend_waiting(now=DUE).counts == {"suspended": 1}
    other.refresh_from_db()
    assert (other.state, "vendor has stopped" in other.note, other.restart_at) == ("gone", True, None)
    assert sweeps.recover_stalled(now=DUE).counts.get("processes restarted") is None  # not before the next use
    assert read(lease, now=LATER) == "kept"
    assert sweeps.recover_stalled(now=LATER).counts["processes restarted"] == 1
    server.refresh_from_db()
    assert (server.state, server.restarts) == ("running", 1)


@pytest.mark.parametrize("step", ["suspension claimed", "objects stored", "suspension stored", "frozen"])
def test_crash_at_any_step_is_continued_by_the_sweep(step, lease, sandbox, memory, crash_at) -> None:
    process = start(lease)
    with crash_at(step):
        passes.suspend_waiting(now=DUE)
    assert sweeps.recover_stalled(now=LATER).counts["suspensions finished"] == 1
    process.refresh_from_db()
    sandbox.refresh_from_db()
    assert (process.state, sandbox.state, sandbox.persisted, sandbox.snapshots.count()) == ("gone", "suspended", True, 1)
    assert memory.inspect(sandbox.ref).suspended
    assert read(lease, now=LATER) == "kept"


@pytest.mark.parametrize("step", ["suspension claimed", "objects stored", "suspension stored", "frozen"])
def test_exec_takes_over_from_a_dead_worker(step, lease, sandbox, memory, crash_at) -> None:
    with crash_at(step):
        passes.suspend_waiting(now=DUE)
    assert read(lease, now=LATER) == "kept"
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.frozen, memory.inspect(sandbox.ref).running) == ("waiting", False, True)


def test_worker_whose_claim_was_taken_over_stores_and_stops_nothing(lease, sandbox, memory, at_checkpoint, crash_at) -> None:
    def be_taken_over() -> None:
        with crash_at("suspension stored"):
            sweeps.recover_stalled(now=LATER)
        calls.extend(memory.calls)

    calls: list[tuple[str, str]] = []
    at_checkpoint("suspension claimed", be_taken_over)
    assert passes.suspend_waiting(now=DUE).counts == {"lost race": 1}
    assert memory.calls == calls
    assert get_sandbox(lease).state == "suspended"


@pytest.mark.parametrize("verb", ["get_files", "suspend"])
def test_failure_leaves_the_sandbox_waiting_with_its_processes(verb, lease, sandbox, memory) -> None:
    process = start(lease)
    with memory.fail(verb, Unavailable("vendor down")):
        assert len(passes.suspend_waiting(now=DUE).failures) == 1
    process.refresh_from_db()
    sandbox.refresh_from_db()
    assert (process.state, sandbox.state, memory.inspect(sandbox.ref).running) == ("running", "waiting", True)
    assert not sandbox.persisted  # the process may change files
    assert passes.suspend_waiting(now=DUE + MINUTE).counts == {"suspended": 1}


def test_sandbox_whose_state_cannot_be_stored_is_not_stopped(memory_store, lease, sandbox, memory) -> None:
    with memory_store.fail("upload", StoreError("store", "upload", "no response")):
        assert len(passes.suspend_waiting(now=DUE).failures) == 1
    assert memory.inspect(sandbox.ref).running
    assert "suspend" not in {method for method, _ in memory.calls}


def test_run_that_begins_while_the_worker_is_slow_is_not_stopped(lease, sandbox, memory, at_checkpoint) -> None:
    def take_over() -> None:
        Sandbox.objects.update(deadline_at=DUE - MINUTE)
        run(lease, now=DUE)

    at_checkpoint("suspension stored", take_over)
    assert passes.suspend_waiting(now=DUE).counts == {"lost race": 1}
    assert "suspend" not in {method for method, _ in memory.calls}
    assert Run.objects.filter(sandbox=sandbox, outcome="ok").count() == 2


def test_sandbox_that_its_vendor_stopped_by_itself_stays_stopped_until_its_next_use(lease, sandbox, memory) -> None:
    memory.suspend(sandbox.ref)
    assert sweeps.reconcile(now=NOW, grace=timedelta(0)).failures == []
    assert memory.inspect(sandbox.ref).suspended


def test_sandbox_that_runs_although_its_row_is_suspended_is_stopped_again(lease, suspended, memory) -> None:
    memory.resume(suspended.ref)  # for example by an operator
    assert sweeps.reconcile(now=LATER, grace=timedelta(0)).counts["suspended sandboxes frozen"] == 1
    assert memory.inspect(suspended.ref).suspended and suspension.find_due(now=LATER).count() == 0
