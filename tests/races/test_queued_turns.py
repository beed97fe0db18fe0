"""Queued turns: order of one agent in one environment, and runners that die at each step."""

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta

import pytest

from leases import sweeps
from leases.models import EnvironmentType, Lease, Turn
from leases.queue import attempts, queue
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from leases.queue.runner import Runner
from sandboxes.models import Event, Pool
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("queue: SKIP LOCKED and hand-written SQL")]
DAY = timedelta(days=1)
LATER = NOW + timedelta(hours=1)  # deadlines of runners, turns and runs have passed, no lease has


@pytest.fixture(autouse=True)
def turn_command(lease: Lease) -> None:
    EnvironmentType.objects.update(turn_argv=["cat"])


def enqueue(lease: Lease, number: int) -> QueuedRun:
    request = {"kind": "turn", "argv": ["cat"], "turn_number": number, "timeout_seconds": 60}
    return queue.enqueue(
        uuid.uuid4(), agent_did=lease.agent_did, lease=lease, pool=lease.pool, request=request,
        secrets={"env": {}, "state": {"n": number}}, options=QueueOptions(pending_timeout=DAY), now=NOW,
    )  # fmt: skip


def work(now: datetime = NOW, runner: str = "r1") -> list[int | None]:
    """Let a runner of this name look at the queue once. Return the turn numbers in the order of the attempts.

    The runner executes each attempt in the thread of the test, whose connection alone sees the rows of the test."""
    numbers: list[int | None] = []

    def execute(name: str, act: Callable[[], object]) -> None:
        numbers.append(QueuedRun.objects.get(pk=uuid.UUID(name.removeprefix("queued-run-"))).turn_number)
        act()

    process = Runner(1, now=lambda: now, start_thread=execute)
    process.name = runner
    process.run_pending()
    return numbers


def count_executions(memory: MemoryProvider) -> int:
    return sum(method == "exec" for method, _ in memory.calls)


def test_turns_of_an_agent_are_played_in_order_and_announced(lease: Lease, memory: MemoryProvider) -> None:
    rows = [enqueue(lease, number) for number in (3, 1, 2)]
    assert work() == [1, 2, 3]
    ended = Event.objects.filter(kind="queued_run.ended").order_by("pk")
    payloads = {event.payload["queued_run_id"]: event.payload for event in ended}
    assert [payloads[str(row.pk)]["action"] for row in rows] == [{"n": 3}, {"n": 1}, {"n": 2}]
    assert {QueuedRun.objects.get(pk=row.pk).state for row in rows} == {"completed"}


def test_later_turn_waits_for_the_earlier_one_and_other_agents_do_not(lease: Lease, grant: Callable[..., Lease]) -> None:
    first, _ = enqueue(lease, 1), enqueue(lease, 2)
    other = enqueue(grant("did:plc:bob"), 2)
    claimed = [queue.claim("r1", now=NOW) for _ in range(3)]
    assert {row.pk for row in claimed if row} == {first.pk, other.pk}
    late = enqueue(lease, 0)
    assert queue.claim("r1", now=NOW) is None  # turn 1 has started
    queue.finish(QueuedRun.objects.get(pk=first.pk), attempts.STATE.COMPLETED, now=NOW)
    row = queue.claim("r1", now=NOW)
    assert row is not None
    assert row.pk == late.pk


def test_turn_of_a_second_event_is_not_played_again(lease: Lease, memory: MemoryProvider) -> None:
    enqueue(lease, 1)
    enqueue(lease, 1)
    assert work() == [1, 1]
    assert (count_executions(memory), Turn.objects.count()) == (1, 1)
    assert set(QueuedRun.objects.values_list("state", flat=True)) == {"completed"}


@pytest.mark.parametrize(
    ("step", "skipped", "executions"),
    [
        ("queued run claimed", False, 1),
        ("turn claimed", True, 0),  # whether the command began is not known to the next attempt
        ("run opened", True, 0),
        ("run answered", False, 1),
        ("turn answered", False, 1),
        ("attempt executed", False, 1),
    ],
)
def test_runner_killed_at_any_step_plays_no_turn_twice(
    step: str, skipped: bool, executions: int, lease: Lease, pool: Pool, memory: MemoryProvider,
    crash_at: Callable[[str], AbstractContextManager[None]],
) -> None:  # fmt: skip
    row = enqueue(lease, 1)
    following = enqueue(lease, 2)
    with crash_at(step):
        work()
    if step != "attempt executed":
        assert queue.claim("r2", now=NOW) is None  # turn 2 waits for the dead runner's turn
    for minutes in (0, 10, 20):
        sweeps.recover_stalled(now=LATER + minutes * MINUTE)
        work(LATER + minutes * MINUTE, "r2")
    turn = Turn.objects.get(number=1)
    states = {row.pk: row.state for row in QueuedRun.objects.all()}
    assert states == {row.pk: "completed", following.pk: "completed"}
    assert (turn.skipped, count_executions(memory)) == (skipped, executions + 1)


def test_turn_that_was_played_does_not_expire_while_no_runner_is_there(
    lease: Lease, memory: MemoryProvider, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    row, unplayed = enqueue(lease, 1), enqueue(lease, 2)
    with crash_at("turn answered"):
        work()
    assert attempts.recover(runner="r2", now=LATER) == 1
    QueuedRun.objects.update(expires_at=LATER)  # both, and no runner is there until minutes later
    sweeps.recover_stalled(now=LATER + 10 * MINUTE)
    assert work(LATER + 10 * MINUTE, "r2") == [1]
    turn = Turn.objects.get()
    assert (turn.number, turn.skipped, turn.action, count_executions(memory)) == (1, False, {"n": 1}, 1)
    states = dict(QueuedRun.objects.values_list("pk", "state"))
    assert states == {row.pk: "completed", unplayed.pk: "expired"}
