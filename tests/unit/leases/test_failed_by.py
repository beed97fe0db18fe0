"""Classification of failures: every outcome, reason and code has an origin."""

import re
from pathlib import Path
from typing import Any

import pytest

from leases import execution, failed_by, leasing, stops
from leases.agent_runs.models import AgentRun, AgentRunState
from leases.failed_by import END_REASONS, classify_agent_run, classify_end_reason, classify_queued_run, classify_turn
from leases.models import Lease, Turn
from leases.models.leases import END_REASONS as LEASE_END_REASONS
from leases.queue.models import QueuedRun, QueuedRunState
from leases.stops import Scope
from sandboxes import failed_by as run_failed_by
from sandboxes.errors import ProviderCallFailed
from sandboxes.failed_by import RUN_OUTCOMES, STOP_REASONS, FailedBy, classify_run
from sandboxes.models import Run, RunOutcome, StopReason
from sandboxes.providers.errors import ProviderError, Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider, ProgramResult
from sandboxes.runs import operations
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW
from tests.support.leases import get_sandbox, run

TASK, INFRASTRUCTURE, LIMIT, INTERRUPTION = FailedBy
ROOT = Path(__file__).parents[3]
LOCAL_VARIABLES = {"renewed"}  # found by the same search


def list_codes() -> set[str]:
    """Return the codes of the error classes in the source, whether or not their modules are imported."""
    sources = (path.read_text() for name in ("leases", "billing", "sandboxes") for path in (ROOT / name).rglob("*.py"))
    return {code for source in sources for code in re.findall(r'^    code = "(\w+)"$', source, re.M)} - LOCAL_VARIABLES


def test_each_outcome_reason_and_code_has_an_origin() -> None:
    assert set(RUN_OUTCOMES) == set(RunOutcome.values)
    assert set(STOP_REASONS) == set(StopReason.values)
    assert set(END_REASONS) == set(LEASE_END_REASONS)
    sets = (
        failed_by.TASK_CODES, failed_by.LIMIT_CODES, failed_by.INTERRUPTION_CODES, failed_by.INFRASTRUCTURE_CODES,
    )  # fmt: skip
    listed = [code for each in sets for code in each]
    assert len(listed) == len(set(listed))
    assert list_codes() - set(listed) == set()
    generated = {"database_unavailable", "error", "internal", *RunOutcome.values}
    assert set(listed) - list_codes() - generated == set()


def test_code_of_the_lower_layer_has_the_same_origin_in_both() -> None:
    codes = run_failed_by.TASK_CODES | run_failed_by.LIMIT_CODES | run_failed_by.INFRASTRUCTURE_CODES
    assert [code for code in codes if run_failed_by.classify_code(code) != failed_by.classify_code(code)] == []


@pytest.mark.parametrize(
    ("reason", "origin"),
    [("", None), ("ttl", None), ("released", None), ("condition:game.finished", None), ("budget", LIMIT),
     ("operator", INTERRUPTION), ("lost", INFRASTRUCTURE), ("failed", INFRASTRUCTURE)],
)  # fmt: skip
def test_origin_of_the_end_of_a_lease(reason: str, origin: FailedBy | None) -> None:
    assert classify_end_reason(reason) == origin


@pytest.mark.parametrize(
    ("values", "origin"),
    [
        ({"outcome": "open"}, None),
        ({"outcome": "ok", "exit_code": 0}, None),
        ({"outcome": "ok", "exit_code": 0, "stop_reason": "operator"}, None),
        ({"outcome": "failed", "exit_code": 1}, TASK),
        ({"outcome": "timed_out", "exit_code": 137}, TASK),
        ({"outcome": "oom", "exit_code": 137}, TASK),
        ({"outcome": "lost"}, INFRASTRUCTURE),
        ({"outcome": "error"}, INFRASTRUCTURE),
        ({"outcome": "failed", "error_code": "workspace_full"}, TASK),
        ({"outcome": "failed", "error_code": "store_unavailable"}, INFRASTRUCTURE),
        ({"outcome": "failed", "error_code": ""}, INFRASTRUCTURE),
        ({"outcome": "failed", "exit_code": 137, "stop_reason": "operator"}, INTERRUPTION),
        ({"outcome": "lost", "stop_reason": "budget"}, LIMIT),
        ({"outcome": "lost", "stop_reason": "ttl"}, LIMIT),
    ],
    ids=str,
)
def test_origin_of_the_failure_of_a_run(values: dict[str, Any], origin: FailedBy | None) -> None:
    assert classify_run(Run(**values)) == origin


@pytest.mark.parametrize(
    ("state", "violation", "values", "origin"),
    [
        ("running", "", None, None),
        ("completed", "", {"outcome": "ok", "exit_code": 0}, None),
        ("interrupted", "", {"outcome": "failed", "exit_code": 137}, INTERRUPTION),
        ("interrupted", "too many turns", {"outcome": "failed", "exit_code": 137}, LIMIT),
        ("failed", "", None, INFRASTRUCTURE),
        ("failed", "", {"outcome": "ok", "exit_code": 0}, TASK),
        ("failed", "", {"outcome": "lost"}, INFRASTRUCTURE),
    ],
    ids=str,
)
def test_origin_of_the_failure_of_an_agent_run(
    state: str, violation: str, values: dict[str, Any] | None, origin: FailedBy | None
) -> None:
    run = None if values is None else Run(**values)
    assert classify_agent_run(AgentRun(state=AgentRunState(state), violation=violation), run) == origin


@pytest.mark.parametrize("state", QueuedRunState.values)
def test_each_state_of_a_queued_run_has_an_origin(state: str) -> None:
    expected = {"interrupted": INTERRUPTION, "expired": INFRASTRUCTURE, "failed": INFRASTRUCTURE}
    assert classify_queued_run(QueuedRun(state=state)) == expected.get(state)


@pytest.mark.parametrize(
    ("error", "origin"),
    [({"code": "failed"}, TASK), ({"code": "forbidden"}, LIMIT), ({"code": "outcome_unknown"}, INFRASTRUCTURE),
     ({"code": "outcome_unknown", "failed_by": "limit"}, LIMIT), ({"code": "no such code"}, INFRASTRUCTURE)],
    ids=str,
)  # fmt: skip
def test_origin_of_the_error_of_a_queued_run(error: dict[str, Any], origin: FailedBy) -> None:
    assert classify_queued_run(QueuedRun(state="failed", error=error)) == origin


@pytest.mark.parametrize(
    ("skipped", "values", "origin"),
    [
        (False, {"outcome": "ok", "exit_code": 0}, None),
        (True, None, INFRASTRUCTURE),
        (True, {"outcome": "ok", "exit_code": 0, "ended_at": NOW}, TASK),
        (True, {"outcome": "timed_out", "exit_code": 137, "ended_at": NOW}, TASK),
        (True, {"outcome": "open"}, INFRASTRUCTURE),
        (True, {"outcome": "failed", "exit_code": 137, "stop_reason": "operator", "ended_at": NOW}, INTERRUPTION),
    ],
    ids=str,
)
def test_origin_of_a_skipped_turn(skipped: bool, values: dict[str, Any] | None, origin: FailedBy | None) -> None:
    assert classify_turn(Turn(skipped=skipped, run=None if values is None else Run(**values))) == origin


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("verb", "error", "origin"), [("exec", Rejected("no such user"), TASK), ("exec", Unavailable("down"), INFRASTRUCTURE)]
)
def test_error_of_the_provider_is_recorded_with_its_code(
    lease: Lease, memory: MemoryProvider, verb: str, error: ProviderError, origin: FailedBy
) -> None:
    run(lease)
    memory.fail(verb, error, times=1)
    with pytest.raises((Rejected, ProviderCallFailed)):
        run(lease, "true")
    row = Run.objects.exclude(outcome="ok").get()
    assert (row.error_code, classify_run(row)) == (error.code, origin)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("end_reason", "stop_reason", "origin"),
    [("ttl", "ttl", LIMIT), ("budget", "budget", LIMIT), ("released", "released", INTERRUPTION),
     ("condition:game.finished", "condition", INTERRUPTION), ("operator", "operator", INTERRUPTION),
     ("lost", "", INFRASTRUCTURE), ("failed", "", INFRASTRUCTURE)],
)  # fmt: skip
def test_command_that_the_end_of_its_lease_stops_has_its_reason(
    lease: Lease, memory: MemoryProvider, end_reason: str, stop_reason: str, origin: FailedBy
) -> None:
    run(lease)
    command = operations.open_run(get_sandbox(lease), Command(["sleep", "60"], MINUTE), now=NOW)
    assert command
    leasing.end(lease.pk, reason=end_reason, now=NOW)
    row = Run.objects.get(pk=command.pk)
    assert (row.outcome, row.stop_reason, classify_run(row)) == ("lost", stop_reason, origin)


@pytest.mark.django_db
def test_stopped_command_states_who_stopped_it(lease: Lease, memory: MemoryProvider) -> None:
    memory.programs["work"] = lambda call: ProgramResult(exit_code=137)
    memory.before("exec", lambda _: stops.stop(Scope(), now=NOW))
    stopped, _ = execution.exec_command(lease.pk, Command(["work"], MINUTE), now=NOW)
    assert (stopped.stop_reason, stopped.outcome, classify_run(stopped)) == ("operator", "failed", INTERRUPTION)
