"""Programs in the background of a sandbox: rows that say what is so, whatever dies in between."""

import uuid
from datetime import datetime, timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction, processes
from sandboxes import pool as pools
from sandboxes import sweeps as below
from sandboxes.errors import ProcessOutputGone, ProviderCallFailed, SandboxBusy, TooManyProcesses
from sandboxes.models import Pool, Process, Run, Sandbox
from sandboxes.processes import MAX_PROCESSES, START_TIMEOUT, ProcessSpec
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import File, MemoryProvider, ProgramResult
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(hours=1)
SOON = timedelta(seconds=30)
WATCHER = ProcessSpec(["sh", "-c", "echo connected; sleep 300"], {"TOKEN": "s3cret"}, name="watcher")


def start(lease: Lease, launch: ProcessSpec | None = None, *, now: datetime = NOW) -> Process:
    launch = launch or ProcessSpec(WATCHER.argv, WATCHER.env, name=WATCHER.name)
    with execution.use_lease(lease.pk, now=now) as request:
        return processes.start_process(request, launch, now=now)


def die() -> None:
    raise SimulatedCrash


def runs_in(memory: MemoryProvider, process: Process) -> bool:
    found = memory.processes(process.sandbox.ref, [str(process.pk)]).get(str(process.pk))
    return found is not None and found.running


def again(process: Process) -> Process:
    return Process.objects.select_related("sandbox").get(pk=process.pk)


def test_a_started_process_has_a_row_and_a_closed_run_of_the_same_id(grant, memory) -> None:
    process = start(grant())
    assert (process.state, process.ended_at, process.name) == ("running", None, "watcher")
    assert (process.env_names, "s3cret" in str(vars(process))) == (["TOKEN"], False)
    run = Run.objects.get(pk=process.pk)
    assert (run.kind, run.outcome) == ("process", "ok")
    assert process.sandbox.state == "waiting"
    assert runs_in(memory, process)


def test_starting_renews_the_lease(grant) -> None:
    lease = grant()
    start(lease, now=NOW + MINUTE)
    assert Lease.objects.get(pk=lease.pk).expires_at > lease.expires_at


def test_what_exits_at_once_says_so_at_once(grant) -> None:
    process = start(grant(), ProcessSpec(["no-such-program"]))
    assert (process.state, process.exit_code) == ("exited", 127)


def test_a_sweep_closes_what_has_ended_by_itself(grant, memory) -> None:
    lease = grant()
    process, other = start(lease), start(lease)
    memory.kill(process.sandbox.ref, str(process.pk))
    assert sweeps.recover_stalled(now=NOW + MINUTE).counts == {"processes ended": 1}
    assert (again(process).state, again(process).exit_code) == ("exited", 137)
    assert again(other).state == "running"
    assert sweeps.recover_stalled(now=NOW + MINUTE).counts == {}


def test_looking_closes_what_has_ended_by_itself(grant, memory) -> None:
    lease = grant()
    process = start(lease, ProcessSpec(["sleep", "0.01"]))
    wait_until(
        lambda: processes.refresh_by_holder(lease.pk, now=NOW) or again(process).state == "exited", "it is seen to have ended"
    )
    assert again(process).exit_code == 0


def test_a_provider_that_does_not_answer_leaves_the_rows_and_is_told(grant, memory) -> None:
    lease = grant()
    process = start(lease)
    with memory.fail("processes", Unavailable("engine down")):
        assert len(sweeps.recover_stalled(now=NOW + MINUTE).failures) == 1
        with pytest.raises(ProviderCallFailed):
            processes.refresh_by_holder(lease.pk, now=NOW)
    assert again(process).state == "running"


def test_killing_says_killed_and_again_is_success(grant, memory) -> None:
    process = start(grant())
    assert processes.kill_process(process, now=NOW).state == "killed"
    assert processes.kill_process(process, now=NOW).state == "killed"
    assert not runs_in(memory, process)


def test_killing_what_had_exited_keeps_its_exit(grant, memory) -> None:
    process = start(grant(), ProcessSpec(["sleep", "0.01"]))
    wait_until(lambda: not runs_in(memory, process), "it ends")
    assert (processes.kill_process(process, now=NOW).state, process.exit_code) == ("exited", 0)


def test_a_kill_that_fails_leaves_it_running(grant, memory) -> None:
    process = start(grant())
    with memory.fail("kill", Unavailable("engine down")), pytest.raises(ProviderCallFailed):
        processes.kill_process(process, now=NOW)
    assert again(process).state == "running"


def test_a_kill_before_it_has_begun_is_told_to_come_again(grant, memory, at_checkpoint) -> None:
    launch = ProcessSpec(["sleep", "300"])

    def too_early() -> None:
        with pytest.raises(SandboxBusy):
            processes.kill_process(Process.objects.get(pk=launch.process_id), now=NOW)

    at_checkpoint("process noted", too_early)
    process = start(grant(), launch)
    assert processes.kill_process(process, now=NOW).state == "killed"
    assert not runs_in(memory, process)


def test_a_kill_just_after_it_has_begun_counts(grant, memory, at_checkpoint) -> None:
    launch = ProcessSpec(["sleep", "300"])
    at_checkpoint("process started", lambda: processes.kill_process(Process.objects.get(pk=launch.process_id), now=NOW))
    process = start(grant(), launch)
    assert process.state == "killed"
    assert not runs_in(memory, process)


def test_it_does_not_keep_its_sandbox_awake_and_ends_when_that_sleeps(grant, memory) -> None:
    lease = grant()
    process = start(lease)
    below.evict_idle(now=NOW + 10 * MINUTE)
    ended = again(process)
    assert ended.sandbox.state == "cold"
    assert (ended.state, ended.exit_code, ended.note) == ("gone", None, "Sandbox evicted: stored")
    with pytest.raises(ProcessOutputGone):
        processes.read_log(ended, start=0, length=10)
    execution.exec_command(lease.pk, Command(["true"], MINUTE), now=NOW + 11 * MINUTE)
    assert processes.kill_process(ended, now=NOW + 11 * MINUTE).state == "gone"
    assert start(lease, now=NOW + 11 * MINUTE).incarnation == 2


def test_it_stays_while_its_sandbox_cannot_fall_asleep(grant, memory) -> None:
    process = start(grant())

    def try_to_kill(ref: str) -> None:
        with pytest.raises(SandboxBusy):
            processes.kill_process(again(process), now=NOW)
        raise Unavailable("no tar today")

    with memory.before("get_files", try_to_kill):
        below.evict_idle(now=NOW + 10 * MINUTE)
    assert (again(process).state, again(process).sandbox.state) == ("running", "waiting")
    assert runs_in(memory, process)


def test_it_ends_in_the_transaction_that_ends_the_lease(grant, memory) -> None:
    lease = grant()
    process = start(lease)
    leasing.release(lease.pk, now=NOW)
    assert again(process).state == "gone"
    sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get().state == "destroyed"
    with pytest.raises(LeaseEnded):
        start(lease)


def test_it_ends_with_a_sandbox_that_is_lost(grant, memory) -> None:
    lease = grant()
    process = start(lease)
    other = grant(environment="game-2")
    start(other)
    memory.vanish(process.sandbox.ref)
    sweeps.reconcile(now=LATER, grace=timedelta(0))
    assert again(process).state == "gone"
    assert Process.objects.get(holder=other.pk).state == "running"


def test_it_is_gone_after_its_sandbox_was_started_again(grant, memory) -> None:
    process = start(grant())
    memory.stop(process.sandbox.ref)
    memory.create(pools.build_spec(process.sandbox))
    sweeps.recover_stalled(now=NOW + 2 * START_TIMEOUT)
    assert again(process).state == "gone"


def test_a_place_that_somebody_needs_is_taken_from_one_with_only_processes(grant, pool: Pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(capacity=1)
    process = start(grant())
    execution.exec_command(grant(agent="did:plc:bob").pk, Command(["true"], MINUTE), now=NOW + MINUTE)
    assert again(process).state == "gone"


def test_nothing_takes_the_sandbox_while_one_is_started(grant, memory) -> None:
    lease = grant()
    slept: list[bool] = []
    memory.before("start", lambda ref: slept.append(eviction.evict(Sandbox.objects.get().pk, now=LATER, reason="idle")))
    assert start(lease).state == "running"
    assert slept == [False]


def test_a_lease_that_ends_while_one_is_started_leaves_none(grant, memory) -> None:
    lease = grant()
    memory.before("start", lambda ref: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        start(lease)
    assert Process.objects.get().state == "gone"
    sweeps.reclaim(now=NOW)
    assert memory.list(str(lease.pool.owner)) == []


def test_so_many_and_no_more(grant, memory) -> None:
    lease = grant()
    first, *_ = [start(lease) for _ in range(MAX_PROCESSES)]
    with pytest.raises(TooManyProcesses):
        start(lease)
    processes.kill_process(first, now=NOW)
    start(lease)
    assert Process.objects.filter(ended_at__isnull=True).count() == MAX_PROCESSES


# --- what it prints -----------------------------------------------------------------------------------------------


def test_what_it_prints_is_read_from_an_offset(grant) -> None:
    process = start(grant())
    assert processes.read_log(process, start=0, length=4) == (b"conn", 4)
    assert processes.read_log(process, start=4, length=100) == (b"ected\n", 10)


def test_waiting_ends_when_the_text_is_printed_or_never_will_be(grant) -> None:
    process = start(grant())
    assert processes.wait_for_log(process, "connected", within=SOON, now=NOW)
    assert not processes.wait_for_log(process, "connected", start=1, within=timedelta(0), now=NOW)
    ended = start(Lease.objects.get(), ProcessSpec(["echo", "bye"]))
    assert processes.wait_for_log(ended, "bye", within=SOON, now=NOW)
    assert not processes.wait_for_log(ended, "hello", within=SOON, now=NOW)


def test_waiting_finds_what_lies_across_two_looks(grant, memory) -> None:
    text = b"x" * (processes.LOG_CHUNK_BYTES - 3) + b"connected" + b"y" * 100
    memory.programs["babble"] = lambda call: ProgramResult(stdout=text)
    process = start(grant(), ProcessSpec(["babble"]))
    assert processes.wait_for_log(process, "connected", within=SOON, now=NOW)


def test_waiting_ends_when_the_sandbox_sleeps(grant, memory) -> None:
    process = start(grant())
    with memory.before("log", lambda ref: eviction.evict(process.sandbox_id, now=NOW, reason="idle")):
        assert not processes.wait_for_log(process, "never", within=SOON, now=NOW)
    assert again(process).state == "gone"


# --- dying --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["run opened", "process noted", "process started", "run answered"])
def test_dying_anywhere_in_a_start_leaves_nothing_that_nobody_knows(step: str, grant, memory, at_checkpoint) -> None:
    lease, launch = grant(), ProcessSpec(["sleep", "300"])
    execution.exec_command(lease.pk, Command(["true"], MINUTE), now=NOW)
    at_checkpoint(step, die)
    with pytest.raises(SimulatedCrash):
        start(lease, launch)
    box = Sandbox.objects.get()
    assert box.state == "running"
    sweeps.recover_stalled(now=NOW + START_TIMEOUT)
    assert Run.objects.filter(pk=launch.process_id, ended_at__isnull=True).exists()  # whoever starts it may be slow
    sweeps.recover_stalled(now=LATER)
    assert not Run.objects.filter(ended_at__isnull=True).exists()
    assert not Process.objects.filter(ended_at__isnull=True).exists()
    assert not any(seen.running for seen in memory.processes(box.ref, [str(launch.process_id)]).values())
    assert start(lease, now=LATER).state == "running"


def test_a_start_without_an_answer_is_settled_by_what_is_there(grant, memory) -> None:
    lease = grant()
    began, never = ProcessSpec(["sleep", "300"]), ProcessSpec(["sleep", "300"])

    def no_answer(ref: str) -> None:
        raise Unavailable("the connection broke")

    with memory.after("start", no_answer), pytest.raises(ProviderCallFailed):
        start(lease, began)
    with memory.before("start", no_answer), pytest.raises(ProviderCallFailed):
        start(lease, never)
    sweeps.recover_stalled(now=NOW)
    assert Process.objects.filter(state="running").count() == 2
    sweeps.recover_stalled(now=NOW + 2 * START_TIMEOUT)
    assert Process.objects.get(pk=began.process_id).state == "running"
    assert Process.objects.get(pk=never.process_id).state == "failed"


def test_files_it_wrote_before_the_sandbox_slept_are_there_when_it_wakes(grant, memory) -> None:
    def write(call) -> ProgramResult:
        call.files["/workspace/seen"] = File(b"1")
        return ProgramResult(took=MINUTE)

    memory.programs["write"] = write
    lease = grant()
    start(lease, ProcessSpec(["write"]))
    below.evict_idle(now=NOW + 10 * MINUTE)
    assert execution.exec_command(lease.pk, Command(["cat", "seen"], MINUTE), now=NOW + 11 * MINUTE)[1].stdout == b"1"


# --- for real -----------------------------------------------------------------------------------------------------

RELAY = """
import time
time.sleep(0.2)
print("Connected to relay", flush=True)
time.sleep(600)
"""


@pytest.mark.docker
def test_a_relay_watcher_connects_and_is_killed_with_its_lease(docker_pool: Pool, memory) -> None:
    ask = leasing.LeaseRequest("did:plc:ada", f"relay-{uuid.uuid4().hex[:8]}", "coding", pool=docker_pool.name)
    lease, _ = leasing.acquire(ask, now=NOW)
    process = start(lease, ProcessSpec(["python3", "-c", RELAY], {"RELAY_URL": "wss://relay.example"}, name="relay"))
    assert processes.wait_for_log(process, "Connected to relay", within=SOON, now=NOW)
    assert process.state == "running"
    _, seen = execution.exec_command(lease.pk, Command(["pgrep", "-fc", "Connected to relay"], MINUTE), now=NOW)
    assert int(seen.stdout) >= 1
    leasing.release(lease.pk, now=NOW)
    assert again(process).state == "gone"
    sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get(holder=lease.pk).state == "destroyed"
