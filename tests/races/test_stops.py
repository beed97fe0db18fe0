"""Stops between the Run of a command and its begin in the sandbox: the process that waits for the command kills it."""

import threading
import uuid
from collections.abc import Callable

import pytest

from leases import execution, one_shot, stops, turns
from leases.agent_runs import interruption
from leases.agent_runs.lifecycle import AgentRunGuard
from leases.agent_runs.models import AgentRun
from leases.failed_by import classify_turn
from leases.models import Lease
from leases.one_shot import OneShotRequest
from leases.queue import attempts, queue
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from leases.stops import Scope
from sandboxes import claims
from sandboxes.failed_by import FailedBy
from sandboxes.models import Pool, Run, StopReason
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider, ProgramResult
from sandboxes.runs.operations import Command
from sandboxes.runs.stops import KillThread
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db
AtCheckpoint = Callable[[str, Callable[[], object]], object]


def count_kills(memory: MemoryProvider) -> int:
    return sum(method == "kill" for method, _ in memory.calls)


def beat() -> None:
    """Let the heartbeat of this process look at its claims, and wait for the kills that it starts."""
    claims.HEARTBEAT.beat()
    for thread in threading.enumerate():
        if isinstance(thread, KillThread):
            thread.join()


@pytest.fixture
def kills(memory: MemoryProvider) -> list[int]:
    """Numbers of kills before the command begins, and after each of two beats while the command runs."""
    counts = list[int]()

    def observe(_: str) -> None:
        counts.append(count_kills(memory))
        for _ in range(2):
            beat()
            counts.append(count_kills(memory))

    memory.before("exec", observe)
    memory.programs["work"] = lambda call: ProgramResult(exit_code=137)
    return counts


def stop_at_open(at_checkpoint: AtCheckpoint) -> None:
    at_checkpoint("run opened", lambda: stops.stop(Scope(), now=NOW))


@pytest.mark.parametrize("streamed", [False, True], ids=["exec", "stream"])
def test_command_that_begins_after_its_stop_is_killed(
    lease: Lease, at_checkpoint: AtCheckpoint, kills: list[int], streamed: bool
) -> None:
    stop_at_open(at_checkpoint)
    stopped, _ = execution.exec_command(lease.pk, Command(["work"], MINUTE, streamed=streamed), now=NOW)
    assert (kills, stopped.stop_reason) == ([1, 2, 3], StopReason.OPERATOR)


def test_turn_that_begins_after_its_stop_is_killed(lease: Lease, at_checkpoint: AtCheckpoint, kills: list[int]) -> None:
    stop_at_open(at_checkpoint)
    lease.environment_type.turn_argv = ["work"]
    lease.environment_type.save()
    turn = turns.take_turn(lease.pk, 1, {}, now=NOW)
    assert (kills, turn.skipped, classify_turn(turn)) == ([1, 2, 3], True, FailedBy.INTERRUPTION)


def test_command_that_is_not_stopped_is_not_killed(lease: Lease, kills: list[int]) -> None:
    execution.exec_command(lease.pk, Command(["work"], MINUTE), now=NOW)
    assert kills == [0, 0, 0]


def test_kill_that_fails_is_repeated_while_the_command_runs(
    lease: Lease, memory: MemoryProvider, at_checkpoint: AtCheckpoint, kills: list[int]
) -> None:
    memory.fail("kill", Unavailable("down"), times=2)
    stop_at_open(at_checkpoint)
    execution.exec_command(lease.pk, Command(["work"], MINUTE), now=NOW)
    assert kills == [1, 2, 3]


def test_command_of_a_queued_run_that_begins_after_its_interruption_is_killed(
    lease: Lease, pool: Pool, at_checkpoint: AtCheckpoint, kills: list[int]
) -> None:
    request = {"kind": "exec", "argv": ["work"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}
    row = queue.enqueue(
        uuid.uuid4(), agent_did=lease.agent_did, lease=lease, pool=pool, request=request, secrets={"env": {}},
        options=QueueOptions(), now=NOW,
    )  # fmt: skip
    claimed = queue.claim("r1", now=NOW)
    assert claimed
    at_checkpoint("run opened", lambda: queue.interrupt(QueuedRun.objects.filter(pk=row.pk), now=NOW))
    attempts.execute(claimed, now=NOW)
    row.refresh_from_db()
    assert (kills, row.state, Run.objects.get(pk=row.run_id).stop_reason) == ([1, 2, 3], "interrupted", "interrupted")


def test_agent_run_that_is_interrupted_before_its_run_opens_is_killed(lease: Lease, kills: list[int]) -> None:
    row = AgentRun.objects.create(lease=lease, cli="program", started_at=NOW, recorder_deadline=NOW + MINUTE)
    assert interruption.request_interruption(row.pk, now=NOW)
    command = Command(["work"], MINUTE, run_id=row.pk)
    stopped, _ = execution.exec_command(lease.pk, command, now=NOW, wrap_guard=lambda guard: AgentRunGuard(guard, row))
    assert (kills, stopped.stop_reason) == ([0, 1, 2], StopReason.INTERRUPTED)


def test_one_shot_run_that_begins_after_its_stop_is_killed(pool: Pool, at_checkpoint: AtCheckpoint, kills: list[int]) -> None:
    stop_at_open(at_checkpoint)
    result = one_shot.run_once(OneShotRequest("did:plc:ada", ["work"], MINUTE, pool=pool.name), now=NOW)
    assert (kills, result.outcome, result.failed_by) == ([1, 2, 3], "failed", FailedBy.INTERRUPTION)
