"""Restarts of background processes: policies, limits, wakes, kills, and crashes at each step."""

import uuid
from datetime import datetime, timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.models import Lease
from sandboxes import eviction, process_ends, process_restarts, processes, restarts
from sandboxes.db import encryption
from sandboxes.errors import SandboxBusy, TooManyProcesses
from sandboxes.models import Process, ProcessStatus, RestartPolicy, Run, Sandbox, TransitionReason
from sandboxes.process_restarts import MAX_PROCESSES, START_TIMEOUT, plan_restart
from sandboxes.processes import ProcessSpec
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.providers.memory import MemoryProvider, ProgramCall, ProgramResult
from tests.conftest import MINUTE, NOW
from tests.support.leases import run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stopped_clock")]
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


def start(lease: Lease, *argv: str, now: datetime = NOW, **fields) -> Process:
    spec = ProcessSpec(argv or ("sleep", "300000"), {"TOKEN": "s3cret"}, **{"restart": RestartPolicy.ALWAYS} | fields)
    with execution.use_lease(lease.pk, now=now) as request:
        return processes.start_process(request, spec, now=now)


def reload(process: Process) -> Process:
    return Process.objects.select_related("sandbox").get(pk=process.pk)


def end(memory: MemoryProvider, process: Process, *, now: datetime, exit_code: int = 1) -> Process:
    """End the program of a process, and let the sweep notice."""
    program = memory._sandboxes[process.sandbox.ref].background[process.current_mark]
    program.outcome = ProgramResult(exit_code)
    process_ends.close_ended(now=now)
    return reload(process)


def count_running(memory: MemoryProvider, process: Process) -> int:
    sandbox = memory._sandboxes.get(reload(process).sandbox.ref)
    return sum(program.state().running for program in sandbox.background.values()) if sandbox else 0


def sleep_and_wake(lease: Lease, *, now: datetime) -> None:
    sandbox = Sandbox.objects.get(holder=lease.pk)
    assert eviction.evict(sandbox.pk, now=now, reason="idle")
    run(lease, now=now)


# --- policies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "exit_code", "is_restarted"),
    [
        (RestartPolicy.NEVER, 1, False), (RestartPolicy.ON_FAILURE, 0, False), (RestartPolicy.ON_FAILURE, 1, True),
        (RestartPolicy.ON_FAILURE, 137, True), (RestartPolicy.ALWAYS, 0, True), (RestartPolicy.ALWAYS, 1, True),
    ],
)  # fmt: skip
def test_a_policy_decides_by_the_exit_code(lease, memory, policy: RestartPolicy, exit_code: int, is_restarted: bool) -> None:
    process = end(memory, start(lease, restart=policy), now=NOW, exit_code=exit_code)
    assert (process.state, process.exit_code) == ("exited", exit_code)
    assert process.restart_at == (NOW + 5 * SECOND if is_restarted else None)
    assert (process.sealed_env is not None) == is_restarted
    process_restarts.restart_due(now=NOW + MINUTE)
    process = reload(process)
    assert (process.state, process.restarts) == (("running", 1) if is_restarted else ("exited", 0))
    assert count_running(memory, process) == is_restarted


def test_a_restart_has_the_command_variables_and_row_of_the_process_and_opens_no_run(lease, memory) -> None:
    calls: list[ProgramCall] = []

    def serve(call: ProgramCall) -> ProgramResult:
        calls.append(call)
        return ProgramResult(0, f"start {len(calls)}".encode(), took=HOUR)

    memory.programs["serve"] = serve
    process = end(memory, start(lease, "serve", "8080", cwd="/workspace/app", stdin=True, keep_awake=True), now=NOW)
    used_at, expires_at = Sandbox.objects.get().last_used_at, Lease.objects.get().expires_at
    assert sweeps.recover_stalled(now=NOW + MINUTE).counts == {"processes restarted": 1}
    process = reload(process)
    assert [(call.argv, call.cwd, call.env["TOKEN"]) for call in calls] == [(["serve", "8080"], "/workspace/app", "s3cret")] * 2
    assert (process.state, process.exit_code, process.ended_at, process.restarted_at) == ("running", None, None, NOW + MINUTE)
    assert (process.started_at, process.current_mark != str(process.pk)) == (NOW, True)
    assert Run.objects.filter(kind="process").count() == 1
    assert (Sandbox.objects.get().last_used_at, Lease.objects.get().expires_at) == (used_at, expires_at)
    assert processes.read_log(process, start=0, length=100, now=NOW).content == b"start 2"
    assert processes.write_stdin(process, b"x", offset=0, last=False, now=NOW) == 1


def test_the_backoff_doubles_within_the_window(lease, memory) -> None:
    process, now, delays = start(lease, max_restarts=4, restart_window=HOUR), NOW, []
    for _ in range(4):
        process = end(memory, process, now=now)
        delays.append(process.restart_at - now)
        assert process_restarts.restart_due(now=process.restart_at - SECOND).counts == {}
        now = process.restart_at
        assert process_restarts.restart_due(now=now).counts == {"processes restarted": 1}
        process = reload(process)
    assert delays == [5 * SECOND, 10 * SECOND, 20 * SECOND, 40 * SECOND]
    process = end(memory, process, now=now)
    assert (process.restart_at, process.restarts, process.sealed_env) == (None, 4, None)
    assert process.note == "Restart limit reached: 4 restarts in 3600 s."


def test_a_new_window_begins_after_the_last_one() -> None:
    process = Process(restart=RestartPolicy.ALWAYS, max_restarts=2, restart_window_seconds=60)
    process.window_started_at, process.window_restarts = NOW, 2
    assert plan_restart(process, ProcessStatus.EXITED, 1, now=NOW + 59 * SECOND).restart_at is None
    plan = plan_restart(process, ProcessStatus.EXITED, 1, now=NOW + MINUTE)
    assert (plan.restart_at, plan.window_started_at, plan.window_restarts) == (NOW + 65 * SECOND, NOW + MINUTE, 0)


@pytest.mark.parametrize("state", [ProcessStatus.KILLED, ProcessStatus.GONE, ProcessStatus.FAILED])
def test_only_an_exit_is_followed_by_a_restart(state: ProcessStatus) -> None:
    assert plan_restart(Process(restart=RestartPolicy.ALWAYS), state, 1, now=NOW).restart_at is None


def test_a_program_that_does_not_exist_is_restarted_up_to_the_limit(lease, memory) -> None:
    process, now = start(lease, "no-such-program", max_restarts=2, restart_window=24 * HOUR), NOW
    for _ in range(5):
        now += HOUR
        process_restarts.restart_due(now=now)
    process = reload(process)
    assert (process.state, process.exit_code, process.restarts, process.restart_at) == ("exited", 127, 2, None)


def test_a_restart_that_the_provider_rejects_is_final(lease, memory) -> None:
    process = end(memory, start(lease), now=NOW)
    with memory.fail("start", Rejected("no such directory")):
        process_restarts.restart_due(now=NOW + MINUTE)
    process = reload(process)
    assert (process.state, process.note, process.restart_at) == ("failed", "no such directory", None)


def test_waiting_restarts_count_towards_the_limit_of_processes(lease, memory) -> None:
    started = [start(lease) for _ in range(MAX_PROCESSES)]
    end(memory, started[0], now=NOW)
    with pytest.raises(TooManyProcesses):
        start(lease, restart=RestartPolicy.NEVER)
    assert process_restarts.restart_due(now=NOW + MINUTE).counts == {"processes restarted": 1}


def test_variables_are_stored_encrypted_and_only_for_a_restart(lease) -> None:
    sealed, plain = start(lease).sealed_env, start(lease, restart=RestartPolicy.NEVER).sealed_env
    assert plain is None
    assert b"s3cret" not in bytes(sealed)


def test_variables_are_encrypted_again_under_a_new_key(lease, settings) -> None:
    process = start(lease)
    assert process_restarts.reencrypt_env().current == 1
    settings.IDENTITY_KEYS = [b"k" * 32]
    assert process_restarts.reencrypt_env().changed == 1
    assert process_restarts.open_env(reload(process)) == {"TOKEN": "s3cret"}


def test_a_process_whose_variables_cannot_be_decrypted_is_not_restarted(lease, memory) -> None:
    process = end(memory, start(lease), now=NOW)
    Process.objects.update(sealed_env=encryption.encrypt(b"{}", row="another row"))
    assert len(process_restarts.restart_due(now=NOW + MINUTE).failures) == 1
    process = reload(process)
    assert (process.state, process.restart_at, "decrypts" in process.note) == ("exited", None, True)


# --- sandboxes ----------------------------------------------------------------------------------------------------


def test_a_process_is_started_again_after_a_wake(lease, memory) -> None:
    process = start(lease, restart=RestartPolicy.NEVER, restart_after_wake=True)
    for number in (1, 2):
        sandbox = Sandbox.objects.get(holder=lease.pk)
        assert eviction.evict(sandbox.pk, now=NOW + number * MINUTE, reason="idle")
        cold = reload(process)
        assert (cold.state, cold.wake_pending, cold.restarts) == ("gone", True, number - 1)
        run(lease, now=NOW + number * MINUTE)
        woken = reload(process)
        assert (woken.state, woken.restarts, woken.wake_pending, woken.note) == ("running", number, False, "")
        assert woken.incarnation == Sandbox.objects.get(holder=lease.pk).incarnation > cold.incarnation
        assert count_running(memory, woken) == 1


def test_a_wake_by_a_read_of_the_workspace_attaches_data_for_the_processes(lease, memory) -> None:
    seen = []
    memory.programs["serve"] = lambda call: seen.append("/data/notes" in call.files) or ProgramResult(took=HOUR)
    start(lease, "serve", restart_after_wake=True)
    run(lease, "sh", "-c", "echo 1 > /data/notes")
    sandbox = Sandbox.objects.get(holder=lease.pk)
    assert eviction.evict(sandbox.pk, now=NOW, reason="idle")
    command = processes.Command(["write", "/workspace/a"], MINUTE, kind="file", needs_data=False)
    execution.call_in_sandbox(lease.pk, command, lambda provider, sandbox: None, now=NOW)
    assert seen == [False, True]


def test_only_processes_that_ran_are_started_after_a_wake(lease, memory) -> None:
    policy_only = start(lease)
    ended = end(memory, start(lease, restart=RestartPolicy.NEVER, restart_after_wake=True), now=NOW)
    waiting = end(memory, start(lease, restart_after_wake=True), now=NOW)
    killed = processes.kill_process(start(lease, restart_after_wake=True), now=NOW)
    sleep_and_wake(lease, now=NOW)
    states = [reload(process).state for process in (policy_only, ended, waiting, killed)]
    assert states == ["gone", "exited", "running", "killed"]
    assert reload(policy_only).sealed_env is None


def test_a_restart_of_the_sandbox_by_the_caller_ends_processes_for_good(lease, memory) -> None:
    process = start(lease, restart_after_wake=True)
    execution.restart_sandbox(lease.pk, now=NOW)
    sleep_and_wake(lease, now=NOW)
    process_restarts.restart_due(now=NOW + HOUR)
    assert (reload(process).state, count_running(memory, process)) == ("gone", 0)


def test_a_restart_of_an_unresponsive_sandbox_restarts_processes_with_a_policy(lease, memory) -> None:
    with_policy, without = start(lease, restart=RestartPolicy.ON_FAILURE), start(lease, restart=RestartPolicy.NEVER)
    killed = start(lease)
    process_restarts.forbid(killed, now=NOW)
    sandbox = Sandbox.objects.get(holder=lease.pk)
    restarts.restart(sandbox, code=TransitionReason.AGENT_UNRESPONSIVE, now=NOW)
    assert [(reload(each).state, reload(each).restart_at) for each in (with_policy, without, killed)] == [
        ("gone", NOW), ("gone", None), ("gone", None),
    ]  # fmt: skip
    assert process_restarts.restart_due(now=NOW).counts == {"processes restarted": 1}
    assert (reload(with_policy).state, reload(with_policy).restarts, count_running(memory, with_policy)) == ("running", 1, 1)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_process_that_vanished_with_a_restart_of_the_engine_is_restarted(lease, memory, is_restarted: bool) -> None:
    process = start(lease, restart=RestartPolicy.ON_FAILURE)
    if is_restarted:
        end(memory, process, now=NOW)
        process_restarts.restart_due(now=NOW + MINUTE)
    memory._sandboxes[process.sandbox.ref].background.clear()
    process_ends.close_ended(now=NOW + HOUR)
    process = reload(process)
    assert (process.state, process.note) == ("gone", "The sandbox was restarted.")
    assert process.restart_at == NOW + HOUR + 5 * SECOND
    assert process_restarts.restart_due(now=NOW + 2 * HOUR).counts == {"processes restarted": 1}
    assert (reload(process).state, reload(process).note, count_running(memory, process)) == ("running", "", 1)


def test_an_eviction_ends_a_waiting_restart(lease, memory) -> None:
    process = end(memory, start(lease), now=NOW)
    sleep_and_wake(lease, now=NOW)
    assert process_restarts.restart_due(now=NOW + HOUR).counts == {}
    assert (reload(process).state, reload(process).restart_at) == ("exited", None)


@pytest.mark.parametrize("fields", [{"state": "suspended", "frozen": True}, {"frozen": True}])
def test_a_suspended_sandbox_is_left_alone(lease, memory, fields: dict[str, object]) -> None:
    process = end(memory, start(lease), now=NOW)
    Sandbox.objects.update(**fields)
    assert process_restarts.restart_due(now=NOW + MINUTE).counts == {}
    assert not process_restarts.restart(reload(process), now=NOW + MINUTE)
    Sandbox.objects.update(state="waiting", frozen=False)
    assert process_restarts.restart_due(now=NOW + MINUTE).counts == {"processes restarted": 1}


def test_the_end_of_the_lease_deletes_the_variables(lease, memory) -> None:
    processes_ = [start(lease, restart_after_wake=True), end(memory, start(lease), now=NOW)]
    leasing.end(lease.pk, reason="released", now=NOW)
    sweeps.recover_stalled(now=NOW)
    sweeps.reclaim(now=NOW)
    sweeps.recover_stalled(now=NOW)
    for process in map(reload, processes_):
        assert (process.sealed_env, process.wake_pending, process.restart_at) == (None, False, None)


def test_a_lost_sandbox_with_nothing_unsaved_restarts_its_processes_on_the_next_use(lease, memory) -> None:
    process = start(lease, restart_after_wake=True)
    memory.vanish(process.sandbox.ref)
    process_ends.close_ended(now=NOW)
    assert (reload(process).state, reload(process).wake_pending) == ("gone", True)


# --- kills --------------------------------------------------------------------------------------------------------


def test_a_killed_process_is_not_restarted(lease, memory) -> None:
    killed = processes.kill_process(start(lease, restart_after_wake=True), now=NOW)
    assert (killed.state, killed.restart_at, killed.sealed_env) == ("killed", None, None)
    process_restarts.restart_due(now=NOW + HOUR)
    assert count_running(memory, killed) == 0


def test_a_kill_ends_a_waiting_restart(lease, memory) -> None:
    process = processes.kill_process(end(memory, start(lease), now=NOW), now=NOW)
    assert (process.state, process.exit_code, process.restart_at) == ("exited", 1, None)
    assert process_restarts.restart_due(now=NOW + HOUR).counts == {}


def test_a_kill_in_a_cold_sandbox_prevents_the_restart_after_the_wake(lease, memory) -> None:
    process = start(lease, restart_after_wake=True)
    assert eviction.evict(process.sandbox_id, now=NOW, reason="idle")
    assert processes.kill_process(reload(process), now=NOW).state == "gone"
    run(lease, now=NOW)
    assert (reload(process).state, count_running(memory, process)) == ("gone", 0)


def test_a_kill_before_the_claim_wins(lease, memory) -> None:
    process = end(memory, start(lease), now=NOW)
    stale = reload(process)
    processes.kill_process(process, now=NOW)
    assert not process_restarts.restart(stale, now=NOW + MINUTE)
    assert count_running(memory, process) == 0


@pytest.mark.parametrize("step", ["process restart claimed", "process restarted"])
def test_a_kill_during_a_restart_ends_the_new_program(lease, memory, at_checkpoint, step: str) -> None:
    process = end(memory, start(lease), now=NOW)
    outcomes = []

    def kill() -> None:
        try:
            outcomes.append(processes.kill_process(reload(process), now=NOW + MINUTE).state)
        except SandboxBusy as busy:
            outcomes.append(busy.code)

    at_checkpoint(step, kill)
    process_restarts.restart_due(now=NOW + MINUTE)
    assert outcomes == ["busy" if step == "process restart claimed" else "killed"]
    process = reload(process)
    assert (process.state, process.restart_at, count_running(memory, process)) == ("killed", None, 0)


def test_a_kill_while_the_exit_is_noticed_prevents_the_restart(lease, memory) -> None:
    process = start(lease)
    stale = reload(process)
    process_restarts.forbid(process, now=NOW)
    assert process_restarts.close_process(stale, ProcessStatus.EXITED, now=NOW, exit_code=1)
    assert (reload(process).restart_at, reload(process).state) == (None, "exited")


# --- races --------------------------------------------------------------------------------------------------------


def test_one_of_two_sweeps_restarts_a_process(lease, memory, at_checkpoint) -> None:
    process = end(memory, start(lease), now=NOW)
    other, results = reload(process), []
    at_checkpoint("process restart claimed", lambda: results.append(process_restarts.restart(other, now=NOW + MINUTE)))
    results.append(process_restarts.restart(reload(process), now=NOW + MINUTE))
    assert sorted(results) == [False, True]
    assert (reload(process).restarts, count_running(memory, process)) == (1, 1)


def test_a_late_observation_of_the_first_start_does_not_close_the_second(lease, memory) -> None:
    stale = start(lease)
    end(memory, reload(stale), now=NOW)
    process_restarts.restart_due(now=NOW + MINUTE)
    assert not process_restarts.close_process(stale, ProcessStatus.EXITED, now=NOW + MINUTE, exit_code=1)
    assert reload(stale).state == "running"


@pytest.mark.parametrize("step", ["process restart claimed", "process restarted", "process restart confirmed"])
def test_an_eviction_during_a_restart_leaves_no_open_row(lease, memory, at_checkpoint, step: str) -> None:
    process = end(memory, start(lease), now=NOW)
    at_checkpoint(step, lambda: eviction.evict(process.sandbox_id, now=NOW + MINUTE, reason="idle"))
    process_restarts.restart_due(now=NOW + MINUTE)
    process = reload(process)
    assert (process.state, process.restart_at, count_running(memory, process)) == ("gone", None, 0)
    run(lease, now=NOW + MINUTE)
    assert process_restarts.restart_due(now=NOW + HOUR).counts == {}


def test_an_eviction_before_the_claim_wins(lease, memory) -> None:
    process = end(memory, start(lease), now=NOW)
    stale = reload(process)
    assert eviction.evict(process.sandbox_id, now=NOW, reason="idle")
    assert not process_restarts.restart(stale, now=NOW + MINUTE)


# --- crashes ------------------------------------------------------------------------------------------------------


def test_a_crash_after_the_claim_counts_as_a_failed_restart(lease, memory, crash_at) -> None:
    process = end(memory, start(lease, restart=RestartPolicy.ON_FAILURE), now=NOW)
    with crash_at("process restart claimed"):
        process_restarts.restart_due(now=NOW + MINUTE)
    assert (reload(process).state, count_running(memory, process)) == ("running", 0)
    process_ends.close_ended(now=NOW + MINUTE)
    assert reload(process).state == "running"  # a slow start may still be in progress
    later = NOW + MINUTE + START_TIMEOUT + SECOND
    process_ends.close_ended(now=later)
    closed = reload(process)
    assert (closed.state, closed.restart_at) == ("failed", later + 10 * SECOND)
    assert process_restarts.restart_due(now=later + MINUTE).counts == {"processes restarted": 1}
    assert (reload(process).restarts, count_running(memory, process)) == (2, 1)


@pytest.mark.parametrize("step", ["process restarted", "process restart confirmed"])
def test_a_crash_after_the_start_leaves_a_running_process(lease, memory, crash_at, step: str) -> None:
    process = end(memory, start(lease), now=NOW)
    with crash_at(step):
        process_restarts.restart_due(now=NOW + MINUTE)
    process_ends.close_ended(now=NOW + HOUR)
    assert (reload(process).state, count_running(memory, process)) == ("running", 1)
    process = end(memory, reload(process), now=NOW + HOUR)
    assert process.restart_at is not None  # and is restarted again
    assert process_restarts.restart_due(now=NOW + 2 * HOUR).counts == {"processes restarted": 1}
    assert (reload(process).restarts, count_running(memory, process)) == (2, 1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_unanswered_restart_is_settled_by_the_provider(lease, memory, when: str) -> None:
    process = end(memory, start(lease), now=NOW)

    def no_answer(ref: str) -> None:
        raise Unavailable("the connection broke")

    with getattr(memory, when)("start", no_answer):
        assert len(process_restarts.restart_due(now=NOW + MINUTE).failures) == 1
    process_ends.close_ended(now=NOW + HOUR)
    assert reload(process).state == ("failed" if when == "before" else "running")
    process_restarts.restart_due(now=NOW + 2 * HOUR)
    assert (reload(process).state, count_running(memory, process)) == ("running", 1)


@pytest.mark.parametrize("step", ["process restart claimed", "process restarted", "process restart confirmed"])
def test_a_crash_during_a_wake_loses_no_process(lease, memory, crash_at, step: str) -> None:
    process = start(lease, restart=RestartPolicy.ALWAYS, restart_after_wake=True)
    assert eviction.evict(process.sandbox_id, now=NOW, reason="idle")
    with crash_at(step):
        run(lease, now=NOW)
    for minutes in (30, 60, 90):
        sweeps.recover_stalled(now=NOW + minutes * MINUTE)
    assert (reload(process).state, count_running(memory, process)) == ("running", 1)


def test_a_provider_that_fails_during_a_wake_does_not_fail_the_operation(lease, memory) -> None:
    process = start(lease, restart_after_wake=True)
    with memory.fail("start", Unavailable("busy")):
        sleep_and_wake(lease, now=NOW)
    for minutes in (30, 60):
        sweeps.recover_stalled(now=NOW + minutes * MINUTE)
    assert (reload(process).state, count_running(memory, process)) == ("running", 1)


def test_a_row_of_another_holder_is_not_started(lease, grant, memory) -> None:
    process = start(lease, restart_after_wake=True)
    assert eviction.evict(process.sandbox_id, now=NOW, reason="idle")
    run(grant(environment="other"), now=NOW)
    assert reload(process).wake_pending
    assert process_restarts.schedule_after_wake(Sandbox(holder=uuid.uuid4()), now=NOW) == 0
