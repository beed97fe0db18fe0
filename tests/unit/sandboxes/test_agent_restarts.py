"""Restart of sandboxes whose agent does not respond: which ones, what remains, and which crashes and races it survives."""

from datetime import timedelta

import pytest

from leases import execution, sweeps
from leases.models import Lease
from sandboxes import processes, suspension
from sandboxes.models import Sandbox, Transition
from sandboxes.pool import allocation
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import agent_restarts
from tests.conftest import MINUTE, NOW
from tests.support.leases import read, run, write

pytestmark = pytest.mark.django_db
DUE, LATER = NOW + MINUTE, NOW + 6 * MINUTE  # every claim has ended


@pytest.fixture
def silent(lease: Lease, memory: MemoryProvider) -> Sandbox:
    """Waiting sandbox with a file, whose agent does not respond."""
    sandbox = write(lease)
    memory.silent.add(sandbox.ref)
    return sandbox


def list_restarts(memory: MemoryProvider) -> list[str]:
    return [ref for verb, ref in memory.calls if verb == "restart"]


def test_sandbox_is_restarted_with_its_files_and_without_its_processes(lease, silent, memory) -> None:
    with execution.use_lease(lease.pk, now=NOW) as request:
        process = processes.start_process(request, ProcessSpec(["sh", "-c", "sleep 300"]), now=NOW)
    assert agent_restarts.restart_unresponsive(now=DUE).counts == {"restarted": 1}
    silent.refresh_from_db()
    assert (silent.state, silent.claim, silent.deadline_at, silent.tries) == ("waiting", None, None, 0)
    assert silent.idle_at is not None
    process.refresh_from_db()
    assert (process.state, process.note) == ("gone", "Sandbox restarted: agent does not respond.")
    moves = Transition.objects.filter(sandbox=silent).order_by("-pk").values_list("was", "to", "code")[:2]
    assert [*moves] == [("evicting", "waiting", "agent_restarted"), ("waiting", "evicting", "agent_unresponsive")]
    assert agent_restarts.restart_unresponsive(now=DUE).counts == {}
    assert (list_restarts(memory), read(lease, now=LATER)) == ([silent.ref], "kept")


def test_sandbox_without_a_holder_is_destroyed(pool, memory) -> None:
    type(pool).objects.update(warm_target=1)
    pool.refresh_from_db()
    sandbox = allocation.start_warm(pool, now=NOW)
    assert sandbox
    memory.silent.add(sandbox.ref)
    assert agent_restarts.restart_unresponsive(now=DUE).counts == {"unheld destroyed": 1}
    sandbox.refresh_from_db()
    assert (sandbox.state, list_restarts(memory)) == ("destroying", [])


def test_sandbox_that_was_used_meanwhile_is_not_restarted(lease, silent, memory) -> None:
    [found] = agent_restarts.find_unresponsive()
    run(lease, now=DUE)
    assert agent_restarts.restart(found, now=DUE) == "lost race"
    assert list_restarts(memory) == []


def test_suspended_sandbox_and_one_with_an_open_run_are_left_alone(lease, silent, memory) -> None:
    def restart_meanwhile(call: object) -> None:
        assert agent_restarts.find_unresponsive() == []

    with memory.before("exec", restart_meanwhile):
        run(lease, now=DUE)
    Sandbox.objects.update(suspend_after=timedelta(seconds=1))
    silent.refresh_from_db()
    assert suspension.suspend(silent, now=DUE + MINUTE)
    assert agent_restarts.find_unresponsive() == []


@pytest.mark.parametrize("step", ["restart claimed", "restarted"])
def test_crash_at_any_step_loses_no_file(step, lease, silent, crash_at) -> None:
    with crash_at(step):
        agent_restarts.restart_unresponsive(now=DUE)
    assert agent_restarts.find_unresponsive() == []  # claimed
    assert sweeps.recover_stalled(now=LATER).failures == []
    silent.refresh_from_db()
    assert (silent.state, read(lease, now=LATER)) == ("cold", "kept")


def test_failed_restart_is_repeated_but_not_more_than_three_times_an_hour(lease, silent, memory) -> None:
    memory.fail("restart", Unavailable("engine down"))
    for minute in range(1, 4):
        assert len(agent_restarts.restart_unresponsive(now=NOW + minute * MINUTE).failures) == 1
        silent.refresh_from_db()
        assert (silent.state, silent.last_error) == ("waiting", "could not be restarted: engine down")
    assert agent_restarts.restart_unresponsive(now=NOW + 4 * MINUTE).counts == {"not restarted again": 1}
    memory.clear_hooks()
    assert agent_restarts.restart_unresponsive(now=NOW + 62 * MINUTE).counts == {"restarted": 1}
    assert read(lease, now=NOW + 62 * MINUTE) == "kept"


def test_sandbox_that_is_gone_is_recorded_as_lost(lease, silent, memory) -> None:
    [found] = agent_restarts.find_unresponsive()
    memory.vanish(silent.ref)
    assert agent_restarts.restart(found, now=DUE) == "gone"
    silent.refresh_from_db()
    assert silent.lost_at is not None  # its files were not stored
