"""Conformance of background processes: every provider, and where noted only those that execute real programs."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandboxes import processes
from sandboxes.image import launch
from sandboxes.providers.base import Provider
from sandboxes.providers.command_results import ProcessOutput, ProcessState
from sandboxes.providers.errors import Missing, Rejected
from tests.conformance.conftest import SandboxHandle, unique_name, unique_sleep_seconds
from tests.support.servers.ports import find_free_ports
from tests.support.waiting import wait_until

ON = ProcessState(True)
MIB = 1 << 20

DAEMON = """
import os, sys, time
if os.fork():
    time.sleep(600)
os.setsid()
if os.fork():
    os._exit(0)
os.execvp("sleep", ["sleep", sys.argv[1]])
"""


def start(exec_box: SandboxHandle, *argv, env=None, mark="", **more):
    mark = mark or unique_name()
    exec_box.provider.start(exec_box.ref, argv, env=env or {}, mark=mark, **more)
    return mark


def state(exec_box: SandboxHandle, mark):
    return exec_box.provider.processes(exec_box.ref, [mark]).get(mark)


def log(exec_box: SandboxHandle, mark, start=0, length=MIB):
    return exec_box.provider.log(exec_box.ref, mark, start=start, length=length)


def ended(exec_box: SandboxHandle, mark):
    return wait_until(lambda: (now := state(exec_box, mark)) and not now.running and now, "the program ends")


@pytest.mark.smoke
def test_process_outlives_its_start_call_and_other_execs_and_its_output_is_recorded(exec_box):
    mark = start(exec_box, "sh", "-c", "echo hello; echo oops >&2; sleep 300")
    wait_until(lambda: log(exec_box, mark).content == b"hello\noops\n", "it has printed")
    assert exec_box.run("sleep", "60", seconds=1).timed_out
    assert state(exec_box, mark) == ON


def test_exit_code_and_complete_output_are_available_after_exit(exec_box):
    mark = start(exec_box, "sh", "-c", "echo bye; exit 3")
    assert ended(exec_box, mark) == ProcessState(False, 3)
    assert log(exec_box, mark) == ProcessOutput(b"bye\n", 4)


def test_missing_program_has_exited_with_127(exec_box):
    mark = unique_name()
    assert exec_box.provider.start(exec_box.ref, ["no-such-program"], env={}, mark=mark) == ProcessState(False, 127)
    assert state(exec_box, mark) == ProcessState(False, 127)
    assert b"no-such-program" in log(exec_box, mark).content


def test_invalid_arguments_are_rejected(exec_box):
    with pytest.raises(Rejected):
        start(exec_box)
    with pytest.raises(Rejected):
        start(exec_box, "true", cwd="relative")


def test_env_and_cwd_are_passed(exec_box):
    mark = start(exec_box, "sh", "-c", "pwd; printenv WORD", cwd="/data", env={"WORD": "x y"})
    ended(exec_box, mark)
    assert log(exec_box, mark).content.decode() == f"{exec_box.path('/data')}\nx y\n"


def test_concurrent_processes_have_separate_logs(exec_box):
    first, second = (start(exec_box, "sh", "-c", f"echo {name}; sleep 300") for name in ("one", "two"))
    wait_until(
        lambda: (log(exec_box, first).content, log(exec_box, second).content) == (b"one\n", b"two\n"), "both have printed"
    )
    assert exec_box.provider.processes(exec_box.ref, [first, second, unique_name()]) == {first: ON, second: ON}
    exec_box.provider.kill(exec_box.ref, first)
    assert exec_box.provider.processes(exec_box.ref, [first, second]) == {first: ProcessState(False, 137), second: ON}


def test_start_is_idempotent_per_mark(exec_box):
    mark = start(exec_box, "sh", "-c", "echo once; sleep 300")
    start(exec_box, "sh", "-c", "echo twice; sleep 300", mark=mark)
    wait_until(lambda: log(exec_box, mark).content == b"once\n", "it has printed")


def test_unknown_mark_has_no_state_and_no_output_and_can_be_killed(exec_box):
    exec_box.provider.kill(exec_box.ref, unique_name())
    assert state(exec_box, unique_name()) is None
    assert log(exec_box, unique_name(), start=7) == ProcessOutput(b"", 7)


def test_log_is_read_in_parts(exec_box):
    mark = start(exec_box, "printf", "0123456789")
    ended(exec_box, mark)
    assert log(exec_box, mark, length=4) == ProcessOutput(b"0123", 4)
    assert log(exec_box, mark, start=4, length=4) == ProcessOutput(b"4567", 8)
    assert log(exec_box, mark, start=8) == ProcessOutput(b"89", 10)
    assert log(exec_box, mark, start=10) == ProcessOutput(b"", 10)


def test_end_of_a_long_log_is_retained(exec_box):
    size = 5 * MIB + 12345
    mark = start(exec_box, "head", "-c", str(size), "/dev/zero")
    assert ended(exec_box, mark) == ProcessState(False, 0)
    content, after = log(exec_box, mark, length=8 * MIB)
    assert after == size
    assert MIB >> 2 <= len(content) <= 2 * MIB
    assert log(exec_box, mark, start=after - 10) == ProcessOutput(bytes(10), after)


@pytest.mark.smoke
def test_kill_is_idempotent_and_keeps_the_exit_code(exec_box):
    running, exited = start(exec_box, "sleep", "300"), start(exec_box, "sh", "-c", "exit 3")
    ended(exec_box, exited)
    for _ in range(2):
        for mark in (running, exited):
            exec_box.provider.kill(exec_box.ref, mark)
        assert exec_box.provider.processes(exec_box.ref, [running, exited]) == {
            running: ProcessState(False, 137),
            exited: ProcessState(False, 3),
        }


@pytest.mark.smoke
def test_process_ends_with_its_sandbox(bench):
    exec_box = bench.box()
    mark = start(exec_box, "sleep", "300")
    bench.provider.destroy(exec_box.ref)
    for verb in (lambda: state(exec_box, mark), lambda: log(exec_box, mark), lambda: start(exec_box, "true")):
        with pytest.raises(Missing):
            verb()


@pytest.mark.smoke
def test_all_commands_are_killed_by_kill_all_or_a_restart_and_the_files_are_kept(bench):
    exec_box = bench.box()
    exec_box.run("sh", "-c", "echo kept >f")
    mark = start(exec_box, "sleep", "300")
    has_verb = type(bench.provider).kill_all is not Provider.kill_all
    for _ in range(2):
        exec_box.provider.kill_all(exec_box.ref)
    assert state(exec_box, mark) == (ProcessState(False, 137) if has_verb else ON)
    if not has_verb:
        exec_box.provider.restart(exec_box.ref)
        ended = (None, ProcessState(False, 137))  # the agent of a Pod notices the end of a killed process a moment later
        wait_until(lambda: state(exec_box, mark) in ended, "the command has ended")
    assert exec_box.run("cat", "f").stdout == b"kept\n"
    bench.provider.destroy(exec_box.ref)
    exec_box.provider.kill_all(exec_box.ref)


# --- real programs ------------------------------------------------------------------------------------


def test_daemonized_child_is_killed_too(real_exec_box):
    nap = unique_sleep_seconds()
    mark = start(real_exec_box, "python3", "-c", DAEMON, nap)
    wait_until(lambda: real_exec_box.asleep(nap), "the daemon sleeps")
    real_exec_box.provider.kill(real_exec_box.ref, mark)
    assert real_exec_box.asleep(nap) == []
    assert state(real_exec_box, mark) == ProcessState(False, 137)


def test_child_of_an_exited_process_is_still_logged_and_can_be_killed(real_exec_box):
    nap = unique_sleep_seconds()
    mark = start(real_exec_box, "sh", "-c", f"(sleep 1; echo late; sleep {nap}) & echo early")
    assert ended(real_exec_box, mark) == ProcessState(False, 0)
    wait_until(lambda: log(real_exec_box, mark).content == b"early\nlate\n", "the remaining child has printed")
    real_exec_box.provider.kill(real_exec_box.ref, mark)
    assert real_exec_box.asleep(nap) == []
    assert state(real_exec_box, mark) == ProcessState(False, 0)


def test_kill_during_start_is_effective_at_the_latest_when_repeated(real_exec_box):
    for _ in range(3):
        nap, mark = unique_sleep_seconds(), unique_name()
        with ThreadPoolExecutor(2) as threads:
            starting = threads.submit(start, real_exec_box, "sleep", nap, mark=mark)
            threads.submit(real_exec_box.provider.kill, real_exec_box.ref, mark).result()
        starting.exception()  # the start may have been killed and raise
        real_exec_box.provider.kill(real_exec_box.ref, mark)
        assert real_exec_box.asleep(nap) == []
        assert not (state(real_exec_box, mark) or ProcessState(False)).running


def test_signals_are_exit_codes(real_exec_box):
    mark = start(real_exec_box, "sh", "-c", "kill -TERM $$")
    assert ended(real_exec_box, mark) == ProcessState(False, 143)


@pytest.mark.parametrize("real_exec_box", ["process"], indirect=True)
def test_old_logs_of_exited_processes_are_removed(real_exec_box):
    oldest = start(real_exec_box, "echo", "hi")
    ended(real_exec_box, oldest)
    marks = [start(real_exec_box, "echo", "hi") for _ in range(launch.MAX_EXITED_LOGS + 1)]
    wait_until(
        lambda: not any(state.running for state in real_exec_box.provider.processes(real_exec_box.ref, marks).values()),
        "all have ended",
    )
    start(real_exec_box, "true")
    assert (log(real_exec_box, oldest).content, log(real_exec_box, marks[-1]).content) == (b"", b"hi\n")
    assert not state(real_exec_box, oldest).running


@pytest.mark.smoke
def test_signal_reaches_the_program_once_and_an_ended_one_never(real_exec_box):
    script = "trap 'echo got; exit 3' USR1; echo ready; while :; do sleep 0.05; done"
    mark = start(real_exec_box, "sh", "-c", script)
    wait_until(lambda: log(real_exec_box, mark).content == b"ready\n", "it is ready")
    real_exec_box.provider.signal_process(real_exec_box.ref, mark, signal.SIGUSR1)
    assert ended(real_exec_box, mark).exit_code == 3
    real_exec_box.provider.signal_process(real_exec_box.ref, mark, signal.SIGUSR1)
    assert log(real_exec_box, mark).content.count(b"got\n") == 1


@pytest.mark.smoke
def test_stdin_is_written_by_offset_or_refused_from_the_start(real_exec_box, settings):
    provider, ref = real_exec_box.provider, real_exec_box.ref
    has_agent = provider.name == "kubernetes" or (provider.name == "docker" and settings.AGENT_GATEWAY.exists())
    if not has_agent:
        with pytest.raises(Rejected):
            start(real_exec_box, "cat", stdin=True)
        with pytest.raises(Rejected):
            provider.write_stdin(ref, start(real_exec_box, "cat"), b"x", offset=0, last=False)
        return
    mark = start(real_exec_box, "cat", stdin=True)
    assert provider.write_stdin(ref, mark, b"one ", offset=0, last=False) == 4
    assert provider.write_stdin(ref, mark, b"one two ", offset=0, last=False) == 8
    with pytest.raises(Rejected):
        provider.write_stdin(ref, mark, b"late", offset=9, last=False)
    large = b"x" * 300_000
    assert provider.write_stdin(ref, mark, large, offset=8, last=True) == 8 + len(large)
    assert ended(real_exec_box, mark).exit_code == 0
    assert log(real_exec_box, mark).content == (b"one two " + large)[-len(log(real_exec_box, mark).content) :]
    assert provider.write_stdin(ref, mark, b"", offset=0, last=True) == 8 + len(large)


def test_port_is_listed_while_a_program_listens_on_it(real_exec_box):
    [port] = find_free_ports()
    mark = start(real_exec_box, "python3", "-um", "http.server", str(port), "--bind", "127.0.0.1")
    wait_until(lambda: port in processes.list_listening_ports(real_exec_box.provider, real_exec_box.ref), "it listens")
    real_exec_box.provider.kill(real_exec_box.ref, mark)
    assert port not in processes.list_listening_ports(real_exec_box.provider, real_exec_box.ref)
