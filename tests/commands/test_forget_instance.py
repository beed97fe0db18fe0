"""What a dead instance was at is taken over by the next sweep; what others are at is not touched."""

from collections.abc import Callable

import pytest

from leases import execution, sweeps
from leases.models import Lease
from sandboxes.models import Run, Sandbox
from sandboxes.runs import Command
from sandboxes.sweeps import release_instance
from tests.conftest import MINUTE, NOW, SimulatedCrash

pytestmark = pytest.mark.django_db
SOON = NOW + MINUTE / 60  # long before any deadline


@pytest.fixture
def interrupted(grant, at_checkpoint, settings) -> Callable[[str, str], Lease]:
    """A lease whose exec, begun by this instance, died at this step."""

    def make(instance: str, step: str) -> Lease:
        def die() -> None:
            raise SimulatedCrash

        settings.INSTANCE = instance
        lease: Lease = grant(environment=f"game-{instance}-{step.replace(' ', '-')}")
        at_checkpoint(step, die)
        with pytest.raises(SimulatedCrash):
            execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
        return lease

    return make


def test_a_run_and_a_start_are_taken_over_at_once(interrupted) -> None:
    ran, started = interrupted("up-a.web.1", "run opened"), interrupted("up-a.web.1", "created")
    assert release_instance("up-a", now=SOON) == 2
    assert release_instance("up-a", now=SOON) == 0
    swept = sweeps.recover_stalled(now=SOON + MINUTE / 60)
    assert swept.counts == {"runs closed": 1, "stalled starts destroyed": 1}
    assert Run.objects.get(holder=ran.pk).outcome == "lost"
    assert Sandbox.objects.get(holder=started.pk).state == "destroying"


def test_a_destroy_that_was_under_way_is_tried_again_at_once(interrupted, memory, settings) -> None:
    lease = interrupted("up-old.web.1", "run answered")
    settings.INSTANCE = "up-a.queue.1"
    sweeps.end_all_leases(now=SOON, why="test")
    memory.before("destroy", lambda ref: (_ for _ in ()).throw(SimulatedCrash()))
    with pytest.raises(SimulatedCrash):
        sweeps.reclaim(now=SOON)
    memory._hooks.clear()
    assert not sweeps.reclaim(now=SOON + MINUTE).counts
    assert release_instance("up-a", now=SOON + MINUTE) == 1
    assert sweeps.reclaim(now=SOON + MINUTE).counts == {"destroyed": 1, "leases closed": 1}
    assert Lease.objects.get(pk=lease.pk).status == "destroyed"


@pytest.mark.parametrize("dead", ["up-b", "up-a.web.1", "up-a.web", "up"])
def test_what_another_instance_is_at_is_left_alone(dead: str, interrupted) -> None:
    interrupted("up-a.web.10", "run opened")
    assert release_instance(dead, now=SOON) == (1 if dead == "up-a.web" else 0)


def test_a_deadline_stays_after_the_start_when_the_clock_was_set_back(interrupted) -> None:
    interrupted("up-a.web.1", "run opened")
    assert release_instance("up-a", now=NOW - MINUTE) == 0


def test_rows_without_an_instance_are_nobodys_to_forget() -> None:
    with pytest.raises(ValueError, match="anybody"):
        release_instance("", now=NOW)
