"""Stop of all work of an agent, an environment or the installation."""

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

from leases import execution, leasing, stops
from leases.agent_runs.models import AgentRun
from leases.errors import StopIncomplete
from leases.models import Lease
from leases.queue import attempts, queue
from leases.queue.models import QueuedRun
from leases.queue.queue import QueueOptions
from leases.stops import Scope
from sandboxes import processes
from sandboxes.audit import COMMAND_LINE
from sandboxes.models import OperatorAction, Process, Run, RunOutcome
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.actors import console_user
from tests.support.leases import get_sandbox, run

pytestmark = pytest.mark.django_db
ADA, BOB = "did:plc:ada", "did:plc:bob"
ALL = Scope()


class Work(NamedTuple):
    """Work of one lease."""

    lease: Lease
    pending: QueuedRun
    started: QueuedRun
    agent_run: AgentRun
    command: Run
    process: Process


def reload(row: Any) -> Any:
    return type(row).objects.get(pk=row.pk)


def enqueue(lease: Lease) -> QueuedRun:
    request = {"kind": "exec", "argv": ["true"], "cwd": "/workspace", "shell": None, "timeout_seconds": 60}
    return queue.enqueue(
        uuid.uuid4(), agent_did=lease.agent_did, lease=lease, pool=lease.pool, request=request, secrets={"env": {}},
        options=QueueOptions(), now=NOW,
    )  # fmt: skip


def begin(lease: Lease) -> Work:
    """Begin one piece of work of each kind in a lease. The command is that of a process which waits for its end."""
    run(lease)
    started = enqueue(lease)
    assert queue.claim("r1", now=NOW)
    request = execution.build_sandbox_request(lease, now=NOW)
    process = processes.start_process(request, ProcessSpec(["sh", "-c", "sleep 300"]), now=NOW)
    command = operations.open_run(get_sandbox(lease), Command(["sleep", "60"], MINUTE), now=NOW)
    assert isinstance(command, Run)
    agent_run = AgentRun.objects.create(lease=lease, cli="program", started_at=NOW, recorder_deadline=NOW + MINUTE)
    return Work(lease, enqueue(lease), started, agent_run, command, process)


@pytest.fixture
def work(grant: Callable[..., Lease]) -> Work:
    return begin(grant(ADA, "game-1"))


def find_kills(memory: MemoryProvider) -> int:
    return sum(method == "kill" for method, _ in memory.calls)


def is_stopped(work: Work) -> bool:
    """Return whether all of the work is stopped, which must not be a part."""
    flags = {
        reload(work.pending).interrupted_at is not None,
        reload(work.started).interrupted_at is not None,
        reload(work.agent_run).interrupted_at is not None,
        reload(work.process).ended_at is not None,
    }
    assert len(flags) == 1
    return flags.pop()


@pytest.mark.parametrize(
    ("scope", "stopped"),
    [
        (Scope(agent_did=ADA), {"ada-1", "ada-2"}),
        (Scope(environment_id="game-1"), {"ada-1", "bob-1"}),
        (ALL, {"ada-1", "ada-2", "bob-1"}),
    ],
    ids=["agent", "environment", "installation"],
)
def test_work_of_the_scope_is_stopped_and_no_other(grant: Callable[..., Lease], scope: Scope, stopped: set[str]) -> None:
    works = {"ada-1": begin(grant(ADA, "game-1")), "ada-2": begin(grant(ADA, "game-2")), "bob-1": begin(grant(BOB, "game-1"))}
    result = stops.stop(scope, now=NOW)
    assert {name for name, work in works.items() if is_stopped(work)} == stopped
    number = len(stopped)
    assert (result.queued_runs, result.agent_runs, result.commands, result.processes) == (2 * number, number, number, number)
    assert (result.leases, result.failures) == ([], [])
    assert Lease.objects.filter(status="active").count() == 3


def test_command_is_killed_and_its_caller_gets_the_result(lease: Lease, memory: MemoryProvider) -> None:
    memory.before("exec", lambda _: stops.stop(ALL, now=NOW))
    run(lease, "echo", "hi")
    assert find_kills(memory) == 1
    assert Run.objects.get(kind="exec").ended_at


def test_transfer_of_files_goes_on(lease: Lease, memory: MemoryProvider) -> None:
    run(lease)
    operations.open_run(get_sandbox(lease), Command(["write", "f"], MINUTE, kind="file"), now=NOW)
    assert stops.stop(ALL, now=NOW).commands == find_kills(memory) == 0


def test_started_run_whose_command_has_not_begun_never_begins(lease: Lease, memory: MemoryProvider) -> None:
    enqueue(lease)
    row = queue.claim("r1", now=NOW)
    assert row
    stops.stop(Scope(agent_did=ADA), now=NOW)
    attempts.execute(row, now=NOW)
    assert (reload(row).state, [method for method, _ in memory.calls if method == "exec"]) == ("interrupted", [])


def test_leases_end_on_request(work: Work, grant: Callable[..., Lease]) -> None:
    other = grant(BOB, "game-2")
    result = stops.stop(Scope(agent_did=ADA), end_leases=True, now=NOW, actor=console_user("root"), detail="runaway")
    assert [lease.pk for lease in result.leases] == [work.lease.pk]
    ended = reload(work.lease)
    assert (ended.status, ended.end_reason, ended.end_detail) == ("expired", "operator", "runaway")
    assert reload(other).status == "active"


def test_lease_that_is_over_ends_by_its_own_clock(lease: Lease) -> None:
    stops.stop(ALL, end_leases=True, now=lease.expires_at + timedelta(seconds=1))
    assert reload(lease).end_reason == "ttl"


def test_failure_is_named_and_tried_again_by_a_repetition(work: Work, memory: MemoryProvider) -> None:
    memory.fail("kill", Unavailable("engine gone"), times=1)
    result = stops.stop(ALL, now=NOW)
    assert [asdict(each) for each in result.failures] == [
        {"kind": "command", "id": str(work.command.pk), "detail": "engine gone"}
    ]
    assert (is_stopped(work), result.queued_runs) == (True, 2)
    with pytest.raises(StopIncomplete, match=f"Not stopped: command {work.command.pk}: engine gone. Stop again"):
        result.require_complete()
    again = stops.stop(ALL, now=NOW)
    assert (again.commands, again.failures) == (1, [])


def test_repetition_stops_nothing_twice(work: Work) -> None:
    first = stops.stop(ALL, end_leases=True, now=NOW)
    operations.close_run(work.command, now=NOW, outcome=RunOutcome.OK)
    again = stops.stop(ALL, end_leases=True, now=NOW + MINUTE)
    assert (first.has_stopped, again.has_stopped) == (True, False)
    assert reload(work.started).interrupted_at == NOW


@pytest.mark.parametrize("step", ["leases ended", "queued runs interrupted", "agent runs interrupted", "commands killed"])
def test_crash_in_the_middle_is_continued_by_a_repetition(
    work: Work, crash_at: Callable[[str], AbstractContextManager[None]], memory: MemoryProvider, step: str
) -> None:
    end_leases = step == "leases ended"
    with crash_at(f"stop: {step}"):
        stops.stop(ALL, end_leases=end_leases, now=NOW)
    stops.stop(ALL, end_leases=end_leases, now=NOW + MINUTE)
    assert reload(work.started).interrupted_at and reload(work.agent_run).interrupted_at
    assert reload(work.pending).state == "interrupted"
    assert end_leases or (is_stopped(work) and find_kills(memory) >= 2)


def test_new_work_is_not_affected(work: Work) -> None:
    stops.stop(Scope(agent_did=ADA), now=NOW)
    assert enqueue(work.lease).state == "queued"
    assert leasing.require_active(work.lease.pk, now=NOW)


def test_a_stop_is_an_order_with_its_result(work: Work, memory: MemoryProvider) -> None:
    memory.fail("kill", Unavailable("engine gone"), times=1)
    stops.stop(ALL, now=NOW, actor=COMMAND_LINE)
    recorded = OperatorAction.objects.get()
    assert recorded.summary.startswith("keeps leases; result: 0 leases ended, 2 queued runs interrupted, ")
    assert recorded.summary.endswith(", 1 not stopped")


@pytest.mark.parametrize("step", ["leases ended", "queued runs interrupted", "agent runs interrupted", "commands killed"])
def test_a_stop_that_dies_is_an_order_without_a_known_result(
    step: str, work: Work, crash_at: Callable[[str], AbstractContextManager[None]]
) -> None:
    with crash_at(f"stop: {step}"):
        stops.stop(ALL, end_leases=True, now=NOW, actor=COMMAND_LINE)
    assert OperatorAction.objects.get().summary == "ends leases; result: not known"
