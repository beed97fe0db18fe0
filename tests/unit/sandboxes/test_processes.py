"""Background processes: agreement of rows and provider, also after failures and crashes."""

from datetime import datetime, timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.errors import LeaseEnded
from leases.models import Lease
from sandboxes import eviction, processes
from sandboxes.errors import ProcessOutputGone, ProviderCallFailed, SandboxBusy, TooManyProcesses
from sandboxes.models import Pool, Process, Run, Sandbox
from sandboxes.output_search import OutputMatch, PatternSearch
from sandboxes.pool import starts
from sandboxes.processes import MAX_PROCESSES, START_TIMEOUT, ProcessSpec
from sandboxes.providers.command_results import ProcessOutput
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import File, MemoryProvider, ProgramResult
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import run, update_pool
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(hours=1)
WAIT_LIMIT = timedelta(seconds=30)
WATCHER_SPEC = ProcessSpec(["sh", "-c", "echo connected; sleep 300"], {"TOKEN": "s3cret"}, name="watcher")


def start(lease: Lease, spec: ProcessSpec | None = None, *, now: datetime = NOW) -> Process:
    spec = spec or ProcessSpec(WATCHER_SPEC.argv, WATCHER_SPEC.env, name=WATCHER_SPEC.name)
    with execution.use_lease(lease.pk, now=now) as request:
        return processes.start_process(request, spec, now=now)


@pytest.fixture
def process(lease: Lease) -> Process:
    return start(lease)


def runs_in(memory: MemoryProvider, process: Process) -> bool:
    state = memory.processes(process.sandbox.ref, [str(process.pk)]).get(str(process.pk))
    return state is not None and state.running


def reload(process: Process) -> Process:
    return Process.objects.select_related("sandbox").get(pk=process.pk)


def test_started_process_has_a_row_and_a_closed_run_with_the_same_id(process, memory) -> None:
    assert (process.state, process.ended_at, process.name) == ("running", None, "watcher")
    assert (process.env_names, "s3cret" in str(vars(process))) == (["TOKEN"], False)
    run = Run.objects.get(pk=process.pk)
    assert (run.kind, run.outcome) == ("process", "ok")
    assert process.sandbox.state == "waiting"
    assert runs_in(memory, process)


def test_start_renews_the_lease(lease) -> None:
    start(lease, now=NOW + MINUTE)
    assert Lease.objects.get(pk=lease.pk).expires_at > lease.expires_at


def test_process_that_exits_at_once_is_returned_as_exited(lease) -> None:
    process = start(lease, ProcessSpec(["no-such-program"]))
    assert (process.state, process.exit_code) == ("exited", 127)


def test_sweep_and_refresh_close_ended_processes(lease, process, memory) -> None:
    other = start(lease)
    memory.kill(process.sandbox.ref, str(process.pk))
    assert sweeps.recover_stalled(now=NOW + MINUTE).counts == {"processes ended": 1}
    assert (reload(process).state, reload(process).exit_code) == ("exited", 137)
    assert sweeps.recover_stalled(now=NOW + MINUTE).counts == {}
    assert reload(other).state == "running"
    memory.kill(other.sandbox.ref, str(other.pk))
    processes.refresh_by_holder(lease.pk, now=NOW)
    assert (reload(other).state, reload(other).exit_code) == ("exited", 137)


def test_unanswered_provider_call_leaves_the_rows_and_is_reported(lease, process, memory) -> None:
    with memory.fail("processes", Unavailable("engine down")):
        assert len(sweeps.recover_stalled(now=NOW + MINUTE).failures) == 1
        with pytest.raises(ProviderCallFailed):
            processes.refresh_by_holder(lease.pk, now=NOW)
    with memory.fail("kill", Unavailable("engine down")), pytest.raises(ProviderCallFailed):
        processes.kill_process(process, now=NOW)
    assert reload(process).state == "running"


def test_kill_is_idempotent(process, memory) -> None:
    for _ in range(2):
        assert processes.kill_process(process, now=NOW).state == "killed"
    assert not runs_in(memory, process)


def test_kill_of_an_exited_process_keeps_its_exit_code(lease, memory) -> None:
    process = start(lease, ProcessSpec(["sleep", "0.01"]))
    wait_until(lambda: not runs_in(memory, process), "the process ends")
    assert (processes.kill_process(process, now=NOW).state, process.exit_code) == ("exited", 0)


def test_kill_before_the_process_has_begun_is_busy(lease, memory, at_checkpoint) -> None:
    spec = ProcessSpec(["sleep", "300"])

    def kill_too_early() -> None:
        with pytest.raises(SandboxBusy):
            processes.kill_process(Process.objects.get(pk=spec.process_id), now=NOW)

    at_checkpoint("process inserted", kill_too_early)
    process = start(lease, spec)
    assert processes.kill_process(process, now=NOW).state == "killed"
    assert not runs_in(memory, process)


def test_kill_just_after_the_process_has_begun_succeeds(lease, memory, at_checkpoint) -> None:
    spec = ProcessSpec(["sleep", "300"])
    at_checkpoint("process started", lambda: processes.kill_process(Process.objects.get(pk=spec.process_id), now=NOW))
    process = start(lease, spec)
    assert process.state == "killed"
    assert not runs_in(memory, process)


def test_process_does_not_prevent_eviction_and_ends_with_it(lease, process) -> None:
    passes.evict_idle(now=NOW + 10 * MINUTE)
    ended = reload(process)
    assert ended.sandbox.state == "cold"
    assert (ended.state, ended.exit_code, ended.note) == ("gone", None, "Sandbox evicted: stored")
    with pytest.raises(ProcessOutputGone):
        processes.read_log(ended, start=0, length=10, now=NOW)
    run(lease, now=NOW + 11 * MINUTE)
    assert processes.kill_process(ended, now=NOW + 11 * MINUTE).state == "gone"
    assert start(lease, now=NOW + 11 * MINUTE).incarnation == 2


def test_process_ends_for_an_eviction_even_if_it_fails(process, memory) -> None:
    def try_to_kill(ref: str) -> None:
        with pytest.raises(SandboxBusy):
            processes.kill_process(reload(process), now=NOW)
        raise Unavailable("no tar today")

    with memory.before("get_files", try_to_kill):
        passes.evict_idle(now=NOW + 10 * MINUTE)
    assert (reload(process).state, reload(process).sandbox.state) == ("gone", "waiting")
    assert "the state could not be stored, and the sandbox goes on" in reload(process).note
    assert not runs_in(memory, process)


def test_process_ends_in_the_transaction_that_ends_the_lease(lease, process) -> None:
    leasing.release(lease.pk, now=NOW)
    assert reload(process).state == "gone"
    sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get().state == "destroyed"
    with pytest.raises(LeaseEnded):
        start(lease)


def test_process_ends_with_a_lost_sandbox(process, grant, memory) -> None:
    other = grant(environment="game-2")
    start(other)
    memory.vanish(process.sandbox.ref)
    sweeps.reconcile(now=LATER, grace=timedelta(0))
    assert reload(process).state == "gone"
    assert Process.objects.get(holder=other.pk).state == "running"


def test_process_is_gone_as_soon_as_its_sandbox_was_restarted(lease, process, memory) -> None:
    memory.stop(process.sandbox.ref)
    memory.create(starts.build_spec(process.sandbox))
    processes.refresh_by_holder(lease.pk, now=NOW)
    assert (reload(process).state, reload(process).note) == ("gone", "The sandbox was restarted.")


def test_process_is_gone_as_soon_as_its_sandbox_is_missing(lease, process, memory) -> None:
    memory.vanish(process.sandbox.ref)
    processes.refresh_by_holder(lease.pk, now=NOW)
    assert reload(process).state == "gone"
    assert reload(process).note.startswith("The provider has no such sandbox")


def test_sandbox_with_only_processes_is_evicted_for_capacity(process, grant, pool: Pool) -> None:
    update_pool(pool, capacity=1)
    run(grant(agent="did:plc:bob"), now=NOW + MINUTE)
    assert reload(process).state == "gone"


def test_sandbox_is_not_evicted_while_a_process_is_started(lease, memory) -> None:
    evicted: list[bool] = []
    memory.before("start", lambda ref: evicted.append(eviction.evict(Sandbox.objects.get().pk, now=LATER, reason="idle")))
    assert start(lease).state == "running"
    assert evicted == [False]


def test_lease_that_ends_during_a_start_leaves_no_process(lease, memory) -> None:
    memory.before("start", lambda ref: leasing.release(lease.pk, now=NOW))
    with pytest.raises(LeaseEnded):
        start(lease)
    assert Process.objects.get().state == "gone"
    sweeps.reclaim(now=NOW)
    assert memory.list(str(lease.pool.owner)) == []


def test_processes_beyond_the_limit_are_refused(lease) -> None:
    first, *_ = [start(lease) for _ in range(MAX_PROCESSES)]
    with pytest.raises(TooManyProcesses):
        start(lease)
    processes.kill_process(first, now=NOW)
    start(lease)
    assert Process.objects.filter(ended_at__isnull=True).count() == MAX_PROCESSES


# --- logs -----------------------------------------------------------------------------------------------


def test_log_is_read_from_an_offset(process) -> None:
    assert processes.read_log(process, start=0, length=4, now=NOW) == (b"conn", 4)
    assert processes.read_log(process, start=4, length=100, now=NOW) == (b"ected\n", 10)


def test_wait_ends_when_the_text_is_printed_or_the_process_ends(lease, process) -> None:
    assert processes.wait_for_log(process, "connected", within=WAIT_LIMIT, now=NOW)
    assert not processes.wait_for_log(process, "connected", start=1, within=timedelta(0), now=NOW)
    ended = start(lease, ProcessSpec(["echo", "bye"]))
    assert processes.wait_for_log(ended, "bye", within=WAIT_LIMIT, now=NOW)
    assert not processes.wait_for_log(ended, "hello", within=WAIT_LIMIT, now=NOW)


def test_wait_finds_a_text_across_two_chunks(lease, memory) -> None:
    text = b"x" * (processes.LOG_CHUNK_BYTES - 3) + b"connected" + b"y" * 100
    memory.programs["babble"] = lambda call: ProgramResult(stdout=text)
    assert processes.wait_for_log(start(lease, ProcessSpec(["babble"])), "connected", within=WAIT_LIMIT, now=NOW)


def test_wait_finds_a_pattern_across_two_chunks_with_its_offsets(lease, memory) -> None:
    border = processes.LOG_CHUNK_BYTES
    output = b"x" * (border - 5) + b"\nport=8080 \n"
    memory.programs["babble"] = lambda call: ProgramResult(0, output, took=MINUTE)
    process = start(lease, ProcessSpec(["babble"]))
    waited = processes.wait_for_pattern(process, PatternSearch("(?m)^port=([0-9]+) $"), within=WAIT_LIMIT, now=NOW)
    assert waited.match == OutputMatch(b"port=8080 ", border - 4, border + 6)
    assert not waited.ended


def test_wait_for_a_pattern_in_a_cold_sandbox_ends(process, memory) -> None:
    sandbox = process.sandbox
    assert eviction.evict(sandbox.pk, now=LATER, reason="idle")
    waited = processes.wait_for_pattern(reload(process), PatternSearch("connected"), within=WAIT_LIMIT, now=LATER)
    assert (waited.match, waited.ended) == (None, True)


def test_wait_for_a_process_that_prints_without_end_is_bounded(process, memory, monkeypatch) -> None:
    chunk, count = b"x" * processes.LOG_CHUNK_BYTES, 0

    def print_more(ref: str, mark: str, *, start: int, length: int) -> ProcessOutput:
        nonlocal count
        count += 1
        assert count < 100, "the wait does not end"
        return ProcessOutput(chunk, start + len(chunk))

    monkeypatch.setattr(memory, "log", print_more)
    assert not processes.wait_for_log(process, "never", within=timedelta(0), now=NOW)


def test_wait_ends_with_the_eviction_of_the_sandbox(process, memory) -> None:
    with memory.before("log", lambda ref: eviction.evict(process.sandbox_id, now=NOW, reason="idle")):
        assert not processes.wait_for_log(process, "never", within=WAIT_LIMIT, now=NOW)
    assert reload(process).state == "gone"


PROC_NET_TCP = b"""  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 10001        0 1 1 0 100 0 0 10 0
   1: 0100007F:0050 0100007F:C350 01 00000000:00000000 00:00000000 00000000 10001        0 1 1 0 100 0 0 10 0
garbage
   2: 0100007F:zzzz 00000000:0000 0A
"""


def test_wait_for_a_port_ends_when_a_program_listens_or_the_process_ends(lease, process, memory) -> None:
    memory.programs["cat"] = lambda call: ProgramResult(stdout=PROC_NET_TCP)
    assert processes.wait_for_port(process, 8080, within=WAIT_LIMIT, now=NOW)
    assert not processes.wait_for_port(process, 80, within=timedelta(0), now=NOW)  # a connection, and no listener
    ended = start(lease, ProcessSpec(["echo", "bye"]))
    assert not processes.wait_for_port(ended, 8080, within=WAIT_LIMIT, now=NOW)


def test_wait_for_a_port_ends_with_the_eviction_of_the_sandbox(process, memory) -> None:
    with memory.before("exec", lambda ref: eviction.evict(process.sandbox_id, now=NOW, reason="idle")):
        assert not processes.wait_for_port(process, 80, within=WAIT_LIMIT, now=NOW)


# --- crashes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["run opened", "process inserted", "process started", "run answered"])
def test_crash_at_any_step_of_a_start_leaves_no_unknown_process(step: str, lease, memory, crash_at) -> None:
    spec = ProcessSpec(["sleep", "300"])
    run(lease)
    with crash_at(step):
        start(lease, spec)
    sandbox = Sandbox.objects.get()
    assert sandbox.state == "running"
    sweeps.recover_stalled(now=NOW + START_TIMEOUT)
    assert Run.objects.filter(pk=spec.process_id, ended_at__isnull=True).exists()  # a slow start may still be in progress
    sweeps.recover_stalled(now=LATER)
    assert not Run.objects.filter(ended_at__isnull=True).exists()
    assert not Process.objects.filter(ended_at__isnull=True).exists()
    assert not any(state.running for state in memory.processes(sandbox.ref, [str(spec.process_id)]).values())
    assert start(lease, now=LATER).state == "running"


def test_unanswered_start_is_settled_by_the_provider(lease, memory) -> None:
    started, not_started = ProcessSpec(["sleep", "300"]), ProcessSpec(["sleep", "300"])

    def no_answer(ref: str) -> None:
        raise Unavailable("the connection broke")

    with memory.after("start", no_answer), pytest.raises(ProviderCallFailed):
        start(lease, started)
    with memory.before("start", no_answer), pytest.raises(ProviderCallFailed):
        start(lease, not_started)
    sweeps.recover_stalled(now=NOW)
    assert Process.objects.filter(state="running").count() == 2
    sweeps.recover_stalled(now=NOW + 2 * START_TIMEOUT)
    assert Process.objects.get(pk=started.process_id).state == "running"
    assert Process.objects.get(pk=not_started.process_id).state == "failed"


def test_files_of_a_process_survive_eviction(lease, memory) -> None:
    def write(call) -> ProgramResult:
        call.files["/workspace/seen"] = File(b"1")
        return ProgramResult(took=MINUTE)

    memory.programs["write"] = write
    start(lease, ProcessSpec(["write"]))
    passes.evict_idle(now=NOW + 10 * MINUTE)
    assert run(lease, "cat", "seen", now=NOW + 11 * MINUTE).stdout == b"1"
