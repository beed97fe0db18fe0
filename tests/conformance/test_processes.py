"""Programs in the background, asked of every provider; what only a kernel can show, of those that have one."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from sandboxes.image import launch
from sandboxes.providers.base import Missing, ProcessOutput, ProcessState, Rejected
from tests.conformance.conftest import SandboxHandle, unique_name, unique_sleep_seconds
from tests.support.waiting import wait_until

ON = ProcessState(True)
MIB = 1 << 20

RELAY = """
import sys, time
time.sleep(0.3)
print("Connected to relay", flush=True)
while True:
    time.sleep(1)
"""

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


def test_it_outlives_the_call_that_started_it_and_its_output_arrives(box):
    mark = start(box, "sh", "-c", "echo hello; echo oops >&2; sleep 300")
    wait_until(lambda: log(box, mark).content == b"hello\noops\n", "it has printed")
    assert box.run("true").exit_code == 0
    assert state(box, mark) == ON


def test_its_exit_code_is_seen_with_all_that_it_printed(box):
    mark = start(box, "sh", "-c", "echo bye; exit 3")
    assert ended(box, mark) == ProcessState(False, 3)
    assert log(box, mark) == ProcessOutput(b"bye\n", 4)


def test_a_program_that_does_not_exist_has_exited_with_127(box):
    mark = unique_name()
    assert box.provider.start(box.ref, ["no-such-program"], env={}, mark=mark) == ProcessState(False, 127)
    assert state(box, mark) == ProcessState(False, 127)
    assert b"no-such-program" in log(box, mark).content


def test_words_that_no_program_takes_are_rejected(box):
    with pytest.raises(Rejected):
        start(box)
    with pytest.raises(Rejected):
        start(box, "true", cwd="relative")


def test_it_gets_its_env_and_cwd(box):
    where = start(box, "pwd", cwd="/data")
    ended(box, where)
    assert log(box, where).content.decode() == f"{box.path('/data')}\n"
    word = start(box, "printenv", "WORD", env={"WORD": "x y"})
    ended(box, word)
    assert log(box, word).content == b"x y\n"


def test_two_run_at_once_and_each_has_its_own_log(box):
    first, second = (start(box, "sh", "-c", f"echo {name}; sleep 300") for name in ("one", "two"))
    wait_until(lambda: (log(box, first).content, log(box, second).content) == (b"one\n", b"two\n"), "both have printed")
    assert box.provider.processes(box.ref, [first, second, unique_name()]) == {first: ON, second: ON}
    box.provider.kill(box.ref, first)
    assert box.provider.processes(box.ref, [first, second]) == {first: ProcessState(False, 137), second: ON}


def test_the_same_mark_starts_once(box):
    mark = start(box, "sh", "-c", "echo once; sleep 300")
    start(box, "sh", "-c", "echo twice; sleep 300", mark=mark)
    wait_until(lambda: log(box, mark).content == b"once\n", "it has printed")


def test_what_was_never_started_is_unknown_and_has_printed_nothing(box):
    assert state(box, unique_name()) is None
    assert log(box, unique_name(), start=7) == ProcessOutput(b"", 7)


def test_a_log_is_read_in_parts(box):
    mark = start(box, "printf", "0123456789")
    ended(box, mark)
    assert log(box, mark, length=4) == ProcessOutput(b"0123", 4)
    assert log(box, mark, start=4, length=4) == ProcessOutput(b"4567", 8)
    assert log(box, mark, start=8) == ProcessOutput(b"89", 10)
    assert log(box, mark, start=10) == ProcessOutput(b"", 10)


def test_of_a_long_log_the_end_is_kept(bench):
    box = bench.box()
    size = 5 * MIB + 12345
    mark = start(box, "head", "-c", str(size), "/dev/zero")
    assert ended(box, mark) == ProcessState(False, 0)
    content, after = log(box, mark, length=8 * MIB)
    assert after == size
    assert MIB >> 2 <= len(content) <= 2 * MIB
    assert log(box, mark, start=after - 10) == ProcessOutput(bytes(10), after)


def test_killing_ends_it_and_again_is_success(box):
    mark = start(box, "sleep", "300")
    box.provider.kill(box.ref, mark)
    assert state(box, mark) == ProcessState(False, 137)
    box.provider.kill(box.ref, mark)
    assert state(box, mark) == ProcessState(False, 137)


def test_killing_what_has_exited_keeps_its_exit_code(box):
    mark = start(box, "sh", "-c", "exit 3")
    ended(box, mark)
    box.provider.kill(box.ref, mark)
    assert state(box, mark) == ProcessState(False, 3)


def test_it_is_gone_with_its_sandbox(bench, box):
    mark = start(box, "sleep", "300")
    bench.provider.destroy(box.ref)
    for verb in (lambda: state(box, mark), lambda: log(box, mark), lambda: start(box, "true")):
        with pytest.raises(Missing):
            verb()


# --- where programs really run ------------------------------------------------------------------------------------


def test_a_child_that_left_its_session_and_parent_is_killed_too(real_box):
    nap = unique_sleep_seconds()
    mark = start(real_box, "python3", "-c", DAEMON, nap)
    wait_until(lambda: real_box.asleep(nap), "the daemon sleeps")
    real_box.provider.kill(real_box.ref, mark)
    assert real_box.asleep(nap) == []
    assert state(real_box, mark) == ProcessState(False, 137)


def test_what_its_first_process_leaves_behind_goes_on_printing_and_can_be_killed(real_box):
    nap = unique_sleep_seconds()
    mark = start(real_box, "sh", "-c", f"(sleep 1; echo late; sleep {nap}) & echo early")
    assert ended(real_box, mark) == ProcessState(False, 0)
    wait_until(lambda: log(real_box, mark).content == b"early\nlate\n", "what it left behind has printed")
    real_box.provider.kill(real_box.ref, mark)
    assert real_box.asleep(nap) == []
    assert state(real_box, mark) == ProcessState(False, 0)


def test_a_kill_while_it_is_being_started_leaves_none_or_is_followed_by_another(real_box):
    for _ in range(3):
        nap, mark = unique_sleep_seconds(), unique_name()
        with ThreadPoolExecutor(2) as threads:
            starting = threads.submit(start, real_box, "sleep", nap, mark=mark)
            threads.submit(real_box.provider.kill, real_box.ref, mark).result()
        starting.exception()  # it may have been killed on its way, and say so
        real_box.provider.kill(real_box.ref, mark)
        assert real_box.asleep(nap) == []
        assert not (state(real_box, mark) or ProcessState(False)).running


def test_a_timed_out_exec_does_not_take_it_along(real_box):
    nap = unique_sleep_seconds()
    mark = start(real_box, "sleep", nap)
    assert real_box.run("sleep", "60", seconds=1).timed_out
    assert state(real_box, mark) == ON


def test_signals_are_exit_codes(real_box):
    mark = start(real_box, "sh", "-c", "kill -TERM $$")
    assert ended(real_box, mark) == ProcessState(False, 143)


def test_the_logs_of_those_that_exited_long_ago_go(real_box):
    marks = [start(real_box, "echo", "hi") for _ in range(launch.MAX_EXITED_LOGS + 3)]
    for mark in marks:
        ended(real_box, mark)
    start(real_box, "true")
    kept = [log(real_box, mark).content for mark in marks]
    assert kept[-1] == b"hi\n"
    assert kept[0] == b""
    assert not state(real_box, marks[0]).running


def test_a_watcher_says_that_it_is_connected(real_box):
    mark = start(real_box, "python3", "-c", RELAY)
    wait_until(lambda: b"Connected to relay" in log(real_box, mark).content, "it is connected")
    assert state(real_box, mark) == ON
