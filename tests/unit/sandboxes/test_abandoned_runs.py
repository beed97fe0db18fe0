"""Runs whose waiting process died: closed with the result that the sandbox retained, or continued, or lost."""

import uuid
from datetime import timedelta

import pytest

from leases import execution, sweeps
from sandboxes.models import Run, RunOutcome
from sandboxes.providers.command_results import ExecState
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory.programs import ProgramResult
from sandboxes.runs.claims import RunClaim
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW

SHORTLY = NOW + timedelta(seconds=5)


def abandon_run(lease, crash_at, step: str) -> Run:
    """Crash in an exec, and mark its run as the start of the next process does."""
    with crash_at(step):
        execution.exec_command(lease.pk, Command(["sh", "-c", "echo done; exit 3"], MINUTE), now=NOW)
    Run.objects.update(released=True)
    return Run.objects.get()


def test_retained_result_closes_the_run_before_its_deadline_and_is_acknowledged(grant, memory, crash_at):
    memory.programs["sh"] = lambda call: ProgramResult(3, b"done\n")
    run = abandon_run(grant(), crash_at, "run answered")
    assert sweeps.recover_stalled(now=SHORTLY).counts == {"runs closed": 1}
    run.refresh_from_db()
    assert (run.outcome, run.exit_code, bytes(run.stdout)) == (RunOutcome.FAILED, 3, b"done\n")
    assert "restarted or killed" in run.note
    assert run.sandbox.state == "waiting"
    assert memory.find_exec(run.sandbox.ref, str(run.pk)) is None


def test_command_that_still_runs_continues_until_its_deadline_and_is_killed_then(grant, memory, crash_at, monkeypatch):
    run = abandon_run(grant(), crash_at, "run opened")
    monkeypatch.setattr(memory, "find_exec", lambda ref, mark: ExecState(running=True))
    assert sweeps.recover_stalled(now=SHORTLY).counts == {"runs continued": 1}
    assert sweeps.recover_stalled(now=run.deadline_at).counts == {"runs closed": 1}
    run.refresh_from_db()
    assert (run.outcome, run.exit_code) == (RunOutcome.LOST, None)
    assert ("kill", run.sandbox.ref) in memory.calls


@pytest.mark.parametrize("rival", ["process", "sweep"])
def test_run_that_is_extended_or_claimed_while_a_sweep_looks_at_it_is_left_alone(rival, grant, memory, crash_at, monkeypatch):
    run = abandon_run(grant(), crash_at, "run answered")
    now, find_exec = run.deadline_at + MINUTE, memory.find_exec

    def act_and_find(ref: str, mark: str) -> ExecState | None:
        if rival == "process":
            RunClaim(run, lambda: now, memory).keep()
        else:
            Run.objects.update(claim=uuid.uuid4())
        return find_exec(ref, mark)

    monkeypatch.setattr(memory, "find_exec", act_and_find)
    assert sweeps.recover_stalled(now=now).counts == {"lost race": 1}
    run.refresh_from_db()
    assert (run.ended_at, "kill" in {method for method, _ in memory.calls}) == (None, False)


def test_run_stays_open_while_the_provider_does_not_respond(grant, memory, crash_at):
    run = abandon_run(grant(), crash_at, "run answered")
    with memory.fail("find_exec", Unavailable("restarting")):
        assert len(sweeps.recover_stalled(now=SHORTLY).failures) == 1
    run.refresh_from_db()
    assert run.ended_at is None
    assert sweeps.recover_stalled(now=SHORTLY + MINUTE).counts == {"runs closed": 1}


@pytest.mark.usefixtures("stopped_clock")
@pytest.mark.parametrize(
    ("age", "duration"),
    [(timedelta(minutes=9), MINUTE), (None, 10 * MINUTE), (timedelta(days=1), timedelta(0)), (-MINUTE, 10 * MINUTE)],
)
def test_the_time_without_a_control_plane_is_not_part_of_the_duration(grant, memory, crash_at, monkeypatch, age, duration):
    run = abandon_run(grant(), crash_at, "run answered")
    state = memory.find_exec(run.sandbox.ref, str(run.pk))._replace(age=age)
    monkeypatch.setattr(memory, "find_exec", lambda ref, mark: state)
    assert sweeps.recover_stalled(now=NOW + 10 * MINUTE).counts == {"runs closed": 1}
    run.refresh_from_db()
    assert (run.exit_code, run.duration) == (3, duration)
    assert run.sandbox.idle_at == NOW + 10 * MINUTE + run.sandbox.idle_after


@pytest.mark.parametrize("step", ["run opened", "run answered"])
def test_command_runs_once(grant, memory, crash_at, step):
    starts = []
    memory.programs["sh"] = lambda call: starts.append(call) or ProgramResult()
    abandon_run(grant(), crash_at, step)
    sweeps.recover_stalled(now=SHORTLY)
    assert len(starts) == (step == "run answered")
