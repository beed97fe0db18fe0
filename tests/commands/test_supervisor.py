"""Restart and shutdown of supervised children, with real processes that only sleep."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controlplane import supervisor
from controlplane.supervisor import AlreadyRunning, Child, Supervisor, hold_lock_file, kill_instance
from tests.support.waiting import wait_until

IGNORING_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w'); time.sleep(600)"
LOGGING = """
import os, signal, time
def log(text):
    with open({log!r}, "a") as file:
        print(text, file=file)
def end(*_):
    log("{name}-ended")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
log("{name}-started")
time.sleep(600)
"""
FORKING = "import os, time; os.fork(); time.sleep(600)"
NEW_SESSION = "import os, time; os.fork() or os.setsid(); time.sleep(600)"


def find_processes(instance: str) -> list[int]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if supervisor._belongs_to_instance(pid, instance)]


@pytest.fixture
def run_instance() -> Iterator[str]:
    name = f"test-{os.urandom(8).hex()}"
    yield name
    kill_instance(name)


def sleeper(instance: str) -> "subprocess.Popen[bytes]":
    """A process that the fixtures did not start as a child of a Supervisor."""
    process = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], supervisor.INSTANCE_VARIABLE: instance})
    wait_until(lambda: process.pid in find_processes(instance), "the process is found by its environment")
    return process


def test_only_processes_of_the_instance_are_killed(run_instance: str) -> None:
    parent, descendant, other = sleeper(run_instance), sleeper(f"{run_instance}.web.1"), sleeper(f"{run_instance}2")
    try:
        assert kill_instance(run_instance) == 2
        assert (parent.wait(30), descendant.wait(30), other.poll()) == (-signal.SIGKILL, -signal.SIGKILL, None)
        assert kill_instance(run_instance) == 0
    finally:
        other.kill()
        other.wait()


def test_a_lock_is_held_once_and_its_note_outlives_the_holder_unless_invalid(tmp_path: Path) -> None:
    path = tmp_path / "state" / "up.json"
    with hold_lock_file(path) as lock:
        assert lock.note == {}
        lock.write({"pid": 7, "started_at": "noon", "instance": "a"})
        with pytest.raises(AlreadyRunning, match="pid 7, since noon"), hold_lock_file(path):
            pass
    with hold_lock_file(path) as lock:
        assert lock.note["instance"] == "a"
        lock.write({"instance": "b"})
    with hold_lock_file(path) as lock:
        assert lock.note == {"instance": "b"}
    path.write_text('{"pid": 1')
    with hold_lock_file(path) as lock:
        assert lock.note == {}


class SupervisorRun:
    """A Supervisor that runs until `is_done` returns True, with its printed lines."""

    def __init__(self, run_instance: str, *children: Child) -> None:
        self.lines: list[str] = []
        self.supervisor = Supervisor(run_instance, children, print_line=self.lines.append)

    def until(self, is_done, within: float = 60.0) -> None:
        done, deadline = False, time.monotonic() + within

        def tick() -> None:
            nonlocal done
            done = bool(is_done())
            self.supervisor.stopping |= done or time.monotonic() > deadline

        self.supervisor.run(each_tick=tick)
        assert done, self.lines


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_SECONDS", 2.0)


@pytest.fixture(autouse=True)
def other_tests_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that earlier tests of this process have left do not count."""
    earlier = supervisor.find_other_threads()
    found = supervisor.find_other_threads
    monkeypatch.setattr(supervisor, "find_other_threads", lambda: [name for name in found() if name not in earlier])


def child(code: str, **options: object) -> Child:
    return Child("one", lambda: os.execv(sys.executable, [sys.executable, "-c", code]), **options)  # type: ignore[arg-type]


def test_a_child_that_dies_is_restarted_with_backoff(run_instance: str) -> None:
    one = child("raise SystemExit(3)")
    run = SupervisorRun(run_instance, one)
    run.until(lambda: one.failures == 2)
    assert [line.split(": ", 1)[1] for line in run.lines[:2]] == [
        "exited with code 3; restarting in 1 s",
        "exited with code 3; restarting in 2 s",
    ]
    assert one.instance == f"{run_instance}.one.2"


def test_processes_of_a_dead_child_are_killed_also_outside_its_group(run_instance: str) -> None:
    one = child(NEW_SESSION)
    run = SupervisorRun(run_instance, one)

    def kill_leader_once_both_run() -> bool:
        if one.pid and one.starts == 1 and len(find_processes(one.instance)) == 2:
            os.kill(one.pid, signal.SIGKILL)
        return one.failures > 0

    run.until(kill_leader_once_both_run)
    assert find_processes(f"{run_instance}.one.1") == []


def test_a_hanging_child_is_killed_even_if_stopped_and_restarted(run_instance: str) -> None:
    one = child(FORKING, find_problem=lambda child: "it hangs" if child.starts == 1 and stopped else "")
    stopped: list[int] = []
    run = SupervisorRun(run_instance, one)

    def stop_all() -> bool:
        if one.starts == 1 and not stopped and len(find_processes(one.instance)) == 2:
            stopped.extend(find_processes(one.instance))
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        return one.starts == 2

    run.until(stop_all)
    assert run.lines[0].endswith("it hangs; restarting in 1 s")
    assert find_processes(f"{run_instance}.one.1") == []


def test_stopping_terminates_first_and_kills_after_the_timeout(run_instance: str, tmp_path: Path) -> None:
    marker = tmp_path / "started"
    responsive, ignoring = child(FORKING), child(IGNORING_SIGTERM.format(str(marker)))
    ignoring.name = "two"
    run = SupervisorRun(run_instance, responsive, ignoring)
    run.until(lambda: marker.exists() and len(find_processes(run_instance)) == 3)
    assert run.lines == ["two does not stop: killing it"]
    assert find_processes(run_instance) == []


def test_a_draining_child_ends_before_the_others_are_stopped(run_instance: str, tmp_path: Path) -> None:
    """The web server's requests need the egress proxy until they end."""
    log = tmp_path / "log"
    log.touch()
    children = [child(LOGGING.format(name=name, log=str(log))) for name in ("other", "draining")]
    children[1].name, children[1].drain_seconds = "two", 30.0
    run = SupervisorRun(run_instance, *children)
    run.until(lambda: len(log.read_text().split()) == 2)
    assert log.read_text().split()[2:] == ["draining-ended", "other-ended"]
    assert not run.lines


def test_children_are_stopped_when_the_loop_raises(run_instance: str) -> None:
    run = SupervisorRun(run_instance, child("import time; time.sleep(600)"))

    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run.supervisor.run(each_tick=fail)
    assert find_processes(run_instance) == []


FORKING_PARENT = """
import os, sys, time
from controlplane.supervisor import Child, reserve_instance_name
reserve_instance_name()
sys.path.insert(0, {path!r})
def work():
    assert os.environ["LEASEHOLD_INSTANCE"] == {instance!r} + ".one.1"
    os.write(1, b"forked\\n")
    time.sleep(600)
Child("one", work).start({instance!r})
time.sleep(600)
"""


def test_a_forked_child_is_found_by_its_instance_and_dies_with_its_parent(run_instance: str) -> None:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING_PARENT.format(path=root, instance=run_instance)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"forked\n"
    [pid] = find_processes(f"{run_instance}.one.1")
    assert pid != process.pid
    assert Path(f"/proc/{pid}/comm").read_text() == "leasehold-one\n"
    process.kill()
    process.wait()
    wait_until(lambda: not find_processes(run_instance), "the child has ended")
    process.stdout.close()


@pytest.mark.parametrize(
    ("end", "code"), [(lambda: None, 0), (lambda: sys.exit(3), 3), (lambda: sys.exit("a reason"), 1), (lambda: 1 // 0, 1)]
)
def test_the_end_of_the_work_is_the_exit_code_of_the_child(run_instance: str, end: Callable[[], object], code: int) -> None:
    one = Child("one", end)
    run = SupervisorRun(run_instance, one)
    run.until(lambda: one.failures)
    assert run.lines[0].endswith(f"exited with code {code}; restarting in 1 s")


def test_the_lock_ends_with_its_holder_while_a_child_of_it_lives(run_instance: str, tmp_path: Path) -> None:
    one = Child("one", lambda: time.sleep(600))
    with hold_lock_file(tmp_path / "up.json"):
        one.start(run_instance)
        name = Path(f"/proc/{one.pid}/comm")
        wait_until(lambda: name.read_text() == "leasehold-one\n", "the child runs")
    try:
        with hold_lock_file(tmp_path / "up.json"):
            pass
    finally:
        one.kill_and_reap()


def test_no_child_is_forked_while_another_thread_runs() -> None:
    """The child would inherit locks that the thread holds, without the thread that releases them."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="other")
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="cannot fork one while other threads run: other"):
            Child("one", lambda: None).start("unused")
    finally:
        done.set()
        thread.join()
