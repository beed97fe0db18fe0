"""Conformance of background processes: every provider, and where noted only those that execute real programs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from sandboxes.image import launch
from sandboxes.providers.base import Missing, ProcessOutput, ProcessState, Rejected
from tests.conformance.conftest import SandboxHandle, unique_name, unique_sleep_seconds
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


def start(box: SandboxHandle, *argv, env=None, mark="", **more):
    mark = mark or unique_name()
    box.provider.start(box.ref, argv, env=env or {}, mark=mark, **more)
    return mark


def state(box: SandboxHandle, mark):
    return box.provider.processes(box.ref, [mark]).get(mark)


def log(box: SandboxHandle, mark, start=0, length=MIB):
    return box.provider.log(box.ref, mark, start=start, length=length)


def ended(box: SandboxHandle, mark):
    return wait_until(lambda: (now := state(box, mark)) and not now.running and now, "the program ends")


def test_process_outlives_its_start_call_and_other_execs_and_its_output_is_recorded(box):
    mark = start(box, "sh", "-c", "echo hello; echo oops >&2; sleep 300")
    wait_until(lambda: log(box, mark).content == b"hello\noops\n", "it has printed")
    assert box.run("sleep", "60", seconds=1).timed_out
    assert state(box, mark) == ON


def test_exit_code_and_complete_output_are_available_after_exit(box):
    mark = start(box, "sh", "-c", "echo bye; exit 3")
    assert ended(box, mark) == ProcessState(False, 3)
    assert log(box, mark) == ProcessOutput(b"bye\n", 4)


def test_missing_program_has_exited_with_127(box):
    mark = unique_name()
    assert box.provider.start(box.ref, ["no-such-program"], env={}, mark=mark) == ProcessState(False, 127)
    assert state(box, mark) == ProcessState(False, 127)
    assert b"no-such-program" in log(box, mark).content


def test_invalid_arguments_are_rejected(box):
    with pytest.raises(Rejected):
        start(box)
    with pytest.raises(Rejected):
        start(box, "true", cwd="relative")


def test_env_and_cwd_are_passed(box):
    mark = start(box, "sh", "-c", "pwd; printenv WORD", cwd="/data", env={"WORD": "x y"})
    ended(box, mark)
    assert log(box, mark).content.decode() == f"{box.path('/data')}\nx y\n"


def test_concurrent_processes_have_separate_logs(box):
    first, second = (start(box, "sh", "-c", f"echo {name}; sleep 300") for name in ("one", "two"))
    wait_until(lambda: (log(box, first).content, log(box, second).content) == (b"one\n", b"two\n"), "both have printed")
    assert box.provider.processes(box.ref, [first, second, unique_name()]) == {first: ON, second: ON}
    box.provider.kill(box.ref, first)
    assert box.provider.processes(box.ref, [first, second]) == {first: ProcessState(False, 137), second: ON}


def test_start_is_idempotent_per_mark(box):
    mark = start(box, "sh", "-c", "echo once; sleep 300")
    start(box, "sh", "-c", "echo twice; sleep 300", mark=mark)
    wait_until(lambda: log(box, mark).content == b"once\n", "it has printed")


def test_unknown_mark_has_no_state_and_no_output_and_can_be_killed(box):
    box.provider.kill(box.ref, unique_name())
    assert state(box, unique_name()) is None
    assert log(box, unique_name(), start=7) == ProcessOutput(b"", 7)


def test_log_is_read_in_parts(box):
    mark = start(box, "printf", "0123456789")
    ended(box, mark)
    assert log(box, mark, length=4) == ProcessOutput(b"0123", 4)
    assert log(box, mark, start=4, length=4) == ProcessOutput(b"4567", 8)
    assert log(box, mark, start=8) == ProcessOutput(b"89", 10)
    assert log(box, mark, start=10) == ProcessOutput(b"", 10)


def test_end_of_a_long_log_is_retained(box):
    size = 5 * MIB + 12345
    mark = start(box, "head", "-c", str(size), "/dev/zero")
    assert ended(box, mark) == ProcessState(False, 0)
    content, after = log(box, mark, length=8 * MIB)
    assert after == size
    assert MIB >> 2 <= len(content) <= 2 * MIB
    assert log(box, mark, start=after - 10) == ProcessOutput(bytes(10), after)


def test_kill_is_idempotent_and_keeps_the_exit_code(box):
    running, exited = start(box, "sleep", "300"), start(box, "sh", "-c", "exit 3")
    ended(box, exited)
    for _ in range(2):
        for mark in (running, exited):
            box.provider.kill(box.ref, mark)
        assert box.provider.processes(box.ref, [running, exited]) == {
            running: ProcessState(False, 137),
            exited: ProcessState(False, 3),
        }


def test_process_ends_with_its_sandbox(bench):
    box = bench.box()
    mark = start(box, "sleep", "300")
    bench.provider.destroy(box.ref)
    for verb in (lambda: state(box, mark), lambda: log(box, mark), lambda: start(box, "true")):
        with pytest.raises(Missing):
            verb()


# --- real programs ------------------------------------------------------------------------------------


def test_daemonized_child_is_killed_too(real_box):
    nap = unique_sleep_seconds()
    mark = start(real_box, "python3", "-c", DAEMON, nap)
    wait_until(lambda: real_box.asleep(nap), "the daemon sleeps")
    real_box.provider.kill(real_box.ref, mark)
    assert real_box.asleep(nap) == []
    assert state(real_box, mark) == ProcessState(False, 137)


def test_child_of_an_exited_process_is_still_logged_and_can_be_killed(real_box):
    nap = unique_sleep_seconds()
    mark = start(real_box, "sh", "-c", f"(sleep 1; echo late; sleep {nap}) & echo early")
    assert ended(real_box, mark) == ProcessState(False, 0)
    wait_until(lambda: log(real_box, mark).content == b"early\nlate\n", "the remaining child has printed")
    real_box.provider.kill(real_box.ref, mark)
    assert real_box.asleep(nap) == []
    assert state(real_box, mark) == ProcessState(False, 0)


def test_kill_during_start_is_effective_at_the_latest_when_repeated(real_box):
    for _ in range(3):
        nap, mark = unique_sleep_seconds(), unique_name()
        with ThreadPoolExecutor(2) as threads:
            starting = threads.submit(start, real_box, "sleep", nap, mark=mark)
            threads.submit(real_box.provider.kill, real_box.ref, mark).result()
        starting.exception()  # the start may have been killed and raise
        real_box.provider.kill(real_box.ref, mark)
        assert real_box.asleep(nap) == []
        assert not (state(real_box, mark) or ProcessState(False)).running


def test_signals_are_exit_codes(real_box):
    mark = start(real_box, "sh", "-c", "kill -TERM $$")
    assert ended(real_box, mark) == ProcessState(False, 143)


@pytest.mark.parametrize("real_box", ["process"], indirect=True)
def test_old_logs_of_exited_processes_are_removed(real_box):
    oldest = start(real_box, "echo", "hi")
    ended(real_box, oldest)
    marks = [start(real_box, "echo", "hi") for _ in range(launch.MAX_EXITED_LOGS + 1)]
    wait_until(
        lambda: not any(state.running for state in real_box.provider.processes(real_box.ref, marks).values()), "all have ended"
    )
    start(real_box, "true")
    assert (log(real_box, oldest).content, log(real_box, marks[-1]).content) == (b"", b"hi\n")
    assert not state(real_box, oldest).running
