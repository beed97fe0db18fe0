"""Restarts of processes by several sweeps at once, and against kills, evictions and late observations."""

import pytest

from leases import execution
from leases.models import Lease
from sandboxes import eviction, process_ends, process_restarts, processes
from sandboxes.errors import SandboxBusy
from sandboxes.models import Process, ProcessStatus, RestartPolicy
from sandboxes.process_restarts import close_process
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import StartKilled
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.suites import TEST_PROVIDER

pytestmark = pytest.mark.django_db(transaction=True)
ROUNDS = range(5)


@pytest.fixture
def due(lease: Lease, memory: MemoryProvider) -> Process:
    """Process that has exited and is due for a restart."""
    with execution.use_lease(lease.pk, now=NOW) as request:
        spec = ProcessSpec(["sleep", "300000"], {"A": "1"}, restart=RestartPolicy.ALWAYS, restart_after_wake=True)
        process = processes.start_process(request, spec, now=NOW)
    memory.kill(process.sandbox.ref, process.current_mark)
    process_ends.close_ended(now=NOW)
    return reload(process)


def reload(process: Process) -> Process:
    return Process.objects.select_related("sandbox").get(pk=process.pk)


def count_running(memory: MemoryProvider) -> int:
    if TEST_PROVIDER != "memory":
        return memory.count_processes("sleep 300000")  # type: ignore[attr-defined,no-any-return]
    return sum(program.state().running for box in memory._sandboxes.values() for program in box.background.values())


@pytest.mark.parametrize("number", ROUNDS)
def test_concurrent_sweeps_start_a_process_once(due, memory, number: int) -> None:
    with run_in_threads(6) as together:
        results = together(lambda index: process_restarts.restart(reload(due), now=NOW + MINUTE))
    assert sorted(results, key=str) == [False] * 5 + [True]
    assert (reload(due).restarts, count_running(memory)) == (1, 1)


@pytest.mark.parametrize("number", ROUNDS)
def test_a_kill_wins_against_a_concurrent_restart(due, memory, number: int) -> None:
    def act(index: int) -> object:
        if index:
            return process_restarts.restart(reload(due), now=NOW + MINUTE)
        return processes.kill_process(reload(due), now=NOW + MINUTE).state

    with run_in_threads(2) as together:
        killed, restarted = together(act)
    assert killed in ("killed", "exited") or isinstance(killed, SandboxBusy), killed
    assert restarted in (True, False), restarted
    process = reload(due)
    assert (process.ended_at is None, process.restart_at, process.wake_pending) == (False, None, False)
    assert count_running(memory) == 0
    assert process_restarts.restart_due(now=NOW + 60 * MINUTE).counts == {}


def test_a_kill_that_kills_the_start_itself_wins_against_the_restart(due, memory) -> None:
    """At vendors the start is a command in the sandbox, and has the mark by which the process is killed."""

    def kill_start(ref: str) -> None:
        process_restarts.forbid(due, now=NOW + MINUTE)
        raise StartKilled

    with memory.before("start", kill_start):
        assert process_restarts.restart_due(now=NOW + MINUTE).counts == {"processes restarted": 1}
    process = reload(due)
    assert (process.state, process.exit_code, process.restart_at) == ("killed", 137, None)
    assert count_running(memory) == 0


@pytest.mark.parametrize("number", ROUNDS)
def test_an_eviction_and_a_restart_leave_the_process_to_the_wake(due, memory, number: int) -> None:
    def act(index: int) -> object:
        if index:
            return process_restarts.restart(reload(due), now=NOW + MINUTE)
        return eviction.evict(due.sandbox_id, now=NOW + MINUTE, reason="idle")

    with run_in_threads(2) as together:
        evicted, _ = together(act)
    assert evicted is True
    process = reload(due)
    assert (process.ended_at is None, process.restart_at, process.wake_pending) == (False, None, True)
    assert count_running(memory) == 0


@pytest.mark.parametrize("number", ROUNDS)
def test_one_of_several_observers_schedules_the_restart(due, memory, number: int) -> None:
    process_restarts.restart(due, now=NOW + MINUTE)
    stale = reload(due)
    memory.kill(stale.sandbox.ref, stale.current_mark)
    with run_in_threads(6) as together:
        closed = together(lambda i: close_process(stale, ProcessStatus.EXITED, now=NOW + 2 * MINUTE, exit_code=137))
    assert sorted(closed, key=str) == [False] * 5 + [True]
    process = reload(due)
    assert (process.window_restarts, process.restart_at) == (1, NOW + 2 * MINUTE + 2 * process_restarts.MIN_BACKOFF)
