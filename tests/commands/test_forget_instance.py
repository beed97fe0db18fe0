"""Recovery of the work of a dead instance by the next sweep. Work of other instances is not touched."""

from collections.abc import Callable

import pytest

from leases import execution, sweeps
from leases.models import Lease
from sandboxes import claims
from sandboxes.claims import KILL_GRACE
from sandboxes.models import Run, Sandbox
from sandboxes.runs.operations import Command
from sandboxes.sweeps.passes import release_instance
from tests.conftest import MINUTE, NOW, SimulatedCrash, die

pytestmark = pytest.mark.django_db
SHORTLY_AFTER = NOW + MINUTE / 60  # long before every deadline


@pytest.fixture
def interrupted(grant, at_checkpoint, settings) -> Callable[[str, str], Lease]:
    """Factory of a lease whose exec was interrupted at a given step, in a given instance."""

    def make(instance: str, step: str) -> Lease:
        settings.INSTANCE = instance
        lease: Lease = grant(environment=f"game-{instance}-{step.replace(' ', '-')}")
        at_checkpoint(step)
        with pytest.raises(SimulatedCrash):
            execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
        return lease

    return make


def test_a_run_and_a_start_of_a_dead_instance_are_recovered_at_once(interrupted) -> None:
    ran, started = interrupted("up-a.web.1", "run opened"), interrupted("up-a.web.1", "created")
    assert release_instance("up-a", now=SHORTLY_AFTER) == 2
    assert release_instance("up-a", now=SHORTLY_AFTER) == 0
    result = sweeps.recover_stalled(now=SHORTLY_AFTER + MINUTE / 60)
    assert result.counts == {"runs closed": 1, "stalled starts destroyed": 1}
    assert Run.objects.get(holder=ran.pk).outcome == "lost"
    assert Sandbox.objects.get(holder=started.pk).state == "destroying"


def test_a_lost_run_says_what_happened_and_keeps_its_output_and_its_deadline(grant, memory, settings, monkeypatch) -> None:
    settings.INSTANCE = "up-a.web.1"
    lease = grant()

    def restart(ref: str) -> None:
        claims.HEARTBEAT.beat()
        die()

    memory.after("exec", restart)
    monkeypatch.setattr(memory, "find_exec", lambda ref, mark: None)  # the sandbox has lost the result
    with pytest.raises(SimulatedCrash):
        execution.exec_command(lease.pk, Command(argv=["sh", "-c", "echo begun; nope"], timeout=MINUTE), now=NOW)
    assert release_instance("up-a", now=SHORTLY_AFTER) == 1
    sweeps.recover_stalled(now=SHORTLY_AFTER)
    run = Run.objects.get()
    assert (run.outcome, bytes(run.stdout), run.stdout_bytes) == ("lost", b"begun\n", 6) and b"nope" in bytes(run.stderr)
    assert run.deadline_at - run.started_at == MINUTE + KILL_GRACE
    assert "(up-a.web.1) was restarted or killed" in run.note


def test_an_interrupted_destroy_is_retried_at_once(interrupted, memory, settings) -> None:
    lease = interrupted("up-old.web.1", "run answered")
    settings.INSTANCE = "up-a.queue.1"
    sweeps.end_all_leases(now=SHORTLY_AFTER, detail="test")
    memory.before("destroy", die)
    with pytest.raises(SimulatedCrash):
        sweeps.reclaim(now=SHORTLY_AFTER)
    memory.clear_hooks()
    assert not sweeps.reclaim(now=SHORTLY_AFTER + MINUTE).counts
    assert release_instance("up-a", now=SHORTLY_AFTER + MINUTE) == 1
    assert sweeps.reclaim(now=SHORTLY_AFTER + MINUTE).counts == {"destroyed": 1, "leases closed": 1}
    assert Lease.objects.get(pk=lease.pk).status == "destroyed"


@pytest.mark.parametrize("dead", ["up-b", "up-a.web.1", "up-a.web", "up"])
def test_claims_of_another_instance_are_left_alone(dead: str, interrupted) -> None:
    interrupted("up-a.web.10", "run opened")
    assert release_instance(dead, now=SHORTLY_AFTER) == (1 if dead == "up-a.web" else 0)


def test_rows_without_an_instance_are_left_alone() -> None:
    with pytest.raises(ValueError, match="may belong to any process"):
        release_instance("", now=NOW)
