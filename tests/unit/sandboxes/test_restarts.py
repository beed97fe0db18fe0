"""Restart of a sandbox on request: open runs, suspended and cold sandboxes, crashes and races."""

from datetime import timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction, processes, restarts, suspension
from sandboxes.errors import ProviderCallFailed, SandboxBusy
from sandboxes.models import Run, RunOutcome, Sandbox, Transition
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.leases import read, write

pytestmark = pytest.mark.django_db
LATER = NOW + 6 * MINUTE  # every claim has ended


@pytest.fixture
def sandbox(lease: Lease) -> Sandbox:
    """Waiting sandbox with a file."""
    return write(lease)


def restart(lease: Lease) -> str:
    restarted = execution.restart_sandbox(lease.pk, now=NOW, actor="key")
    return restarted.state if restarted else "none"


def test_processes_end_and_files_stay(lease: Lease, sandbox: Sandbox, memory: MemoryProvider) -> None:
    with execution.use_lease(lease.pk, now=NOW) as request:
        process = processes.start_process(request, ProcessSpec(["sh", "-c", "sleep 300"]), now=NOW)
    assert restart(lease) == "waiting"
    process.refresh_from_db()
    assert (process.state, process.note) == ("gone", "Sandbox restarted: restart requested.")
    moves = Transition.objects.filter(sandbox=sandbox).order_by("-pk").values_list("to", "code", "actor")[:2]
    assert [*moves] == [("waiting", "agent_restarted", "key"), ("evicting", "restart_requested", "key")]
    assert (read(lease), Lease.objects.get(pk=lease.pk).status) == ("kept", "active")


def test_open_run_is_killed_and_closed_before_the_restart(lease: Lease, sandbox: Sandbox, memory: MemoryProvider) -> None:
    run = operations.open_run(sandbox, Command(argv=["sleep"], timeout=MINUTE), now=NOW)
    assert run
    with memory.after("kill", lambda call: operations.close_run(run, now=NOW, outcome=RunOutcome.FAILED)):
        assert restart(lease) == "waiting"
    verbs = [verb for verb, _ in memory.calls if verb in ("kill", "restart")]
    assert (verbs, Run.objects.get(pk=run.pk).ended_at) == (["kill", "restart"], NOW)


def test_run_that_does_not_end_refuses_the_restart(
    lease: Lease, sandbox: Sandbox, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations.open_run(sandbox, Command(argv=["sleep"], timeout=MINUTE), now=NOW)
    monkeypatch.setattr(restarts, "RUN_END_TIMEOUT", timedelta(0))
    with pytest.raises(SandboxBusy):
        restart(lease)
    assert "restart" not in [verb for verb, _ in memory.calls]


def test_suspended_sandbox_is_thawed_and_a_cold_one_is_left_alone(
    lease: Lease, sandbox: Sandbox, memory: MemoryProvider
) -> None:
    Sandbox.objects.update(suspend_after=timedelta(seconds=1))
    sandbox.refresh_from_db()
    assert suspension.suspend(sandbox, now=NOW)
    assert restart(lease) == "waiting"
    sandbox.refresh_from_db()
    assert (sandbox.frozen, sandbox.idle_at) != (True, None)
    assert eviction.evict(sandbox.pk, now=NOW, reason="test")
    memory.calls.clear()
    assert (restart(lease), memory.calls) == ("cold", [])


def test_lease_without_a_sandbox_has_nothing_to_restart(grant) -> None:
    assert restart(grant("did:plc:bob")) == "none"


def test_failed_restart_leaves_the_sandbox_waiting(lease: Lease, sandbox: Sandbox, memory: MemoryProvider) -> None:
    memory.fail("restart", Unavailable("engine down"), times=1)
    with pytest.raises(ProviderCallFailed, match="engine down"):
        restart(lease)
    sandbox.refresh_from_db()
    assert (sandbox.state, sandbox.claim, sandbox.last_error) == ("waiting", None, "could not be restarted: engine down")
    assert (restart(lease), read(lease)) == ("waiting", "kept")


def test_lease_that_ends_during_the_restart_has_its_sandbox_destroyed(lease: Lease, sandbox: Sandbox, at_checkpoint) -> None:
    at_checkpoint("restart claimed", lambda: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        restart(lease)
    sandbox.refresh_from_db()
    assert sandbox.state == "destroying"
    sweeps.reclaim(now=LATER)
    sandbox.refresh_from_db()
    assert sandbox.state == "destroyed"
