"""Children are kept alive, and none is left behind: with real processes, which do nothing but sleep."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane import supervisor
from controlplane.supervisor import AlreadyRunning, Child, Supervisor, hold_lock_file, kill_instance
from tests.support.waiting import wait_until

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w'); time.sleep(600)"
FORKING = "import os, time; os.fork(); time.sleep(600)"
RUNAWAY = "import os, time; os.fork() or os.setsid(); time.sleep(600)"


def carrying(instance: str) -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and supervisor._belongs_to_instance(int(name), instance)
    ]


@pytest.fixture
def family() -> Iterator[str]:
    name = f"test-{os.urandom(8).hex()}"
    yield name
    kill_instance(name)


def sleeper(instance: str) -> "subprocess.Popen[bytes]":
    """A process that the fixtures did not start as a child of a Supervisor."""
    process = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], supervisor.INSTANCE_VARIABLE: instance})
    wait_until(lambda: process.pid in carrying(instance), "its environment is there")
    return process


def test_only_processes_of_the_instance_are_killed(family: str) -> None:
    ours, sub, other = sleeper(family), sleeper(f"{family}.web.1"), sleeper(f"{family}2")
    try:
        assert kill_instance(family) == 2
        assert (ours.wait(30), sub.wait(30), other.poll()) == (-signal.SIGKILL, -signal.SIGKILL, None)
        assert kill_instance(family) == 0
    finally:
        other.kill()
        other.wait()


def test_a_seat_is_taken_once_and_its_note_outlives_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "state" / "up.json"
    with hold_lock_file(path) as (before, write):
        assert before == {}
        write({"pid": 7, "started_at": "noon", "instance": "a"})
        with pytest.raises(AlreadyRunning, match="pid 7, since noon"), hold_lock_file(path):
            pass
    with hold_lock_file(path) as (before, write):
        assert before["instance"] == "a"
        write({"instance": "b"})
    with hold_lock_file(path) as (before, _):
        assert before == {"instance": "b"}


def test_a_torn_note_is_no_note(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text('{"pid": 1')
    with hold_lock_file(tmp_path / "up.json") as (before, _):
        assert before == {}


class Ran:
    """A Supervisor run until `enough` says so, and what it said and forgot."""

    def __init__(self, family: str, *children: Child) -> None:
        self.said: list[str] = []
        self.forgotten: list[str] = []
        self.supervisor = Supervisor(family, children, say=self.said.append, forget=self.forgotten.append)

    def until(self, enough, within: float = 60.0) -> None:
        timer = threading.Timer(within, lambda: setattr(self.supervisor, "stopping", True))
        timer.start()

        def tick() -> None:
            self.supervisor.stopping |= bool(enough())

        self.supervisor.run(each_tick=tick)
        in_time = timer.is_alive()
        timer.cancel()
        assert in_time, self.said


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_SECONDS", 2.0)


def child(code: str, **more: object) -> Child:
    return Child("one", [sys.executable, "-c", code], Path("/"), **more)  # type: ignore[arg-type]


def test_a_child_that_dies_is_forgotten_and_started_again_each_time_later(family: str) -> None:
    one = child("raise SystemExit(3)")
    ran = Ran(family, one)
    ran.until(lambda: one.failures == 2)
    assert [line.split(": ", 1)[1] for line in ran.said[:2]] == [
        "it ended with code 3; starting it again in 1 s",
        "it ended with code 3; starting it again in 2 s",
    ]
    assert ran.forgotten == [f"{family}.one.1", f"{family}.one.2"]


def test_whatever_a_dead_child_leaves_is_killed_with_it_also_outside_its_group(family: str) -> None:
    one = child(RUNAWAY)
    ran = Ran(family, one)

    def two_then_kill_one() -> bool:
        if one.process and one.starts == 1 and len(carrying(one.instance)) == 2:
            os.kill(one.process.pid, signal.SIGKILL)
        return bool(ran.forgotten)

    ran.until(two_then_kill_one)
    assert carrying(ran.forgotten[0]) == []


def test_a_child_that_hangs_is_killed_though_stopped_and_started_again(family: str) -> None:
    one = child(FORKING, hung=lambda child: "it hangs" if child.starts == 1 and stopped else "")
    stopped: list[int] = []
    ran = Ran(family, one)

    def stop_all() -> bool:
        if one.starts == 1 and not stopped and len(carrying(one.instance)) == 2:
            stopped.extend(carrying(one.instance))
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        return one.starts == 2

    ran.until(stop_all)
    assert ran.said[0].endswith("it hangs; starting it again in 1 s")
    assert carrying(f"{family}.one.1") == []


def test_stopping_asks_first_and_kills_what_does_not_listen(family: str, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    polite, stubborn = child(FORKING), child(STUBBORN.format(str(deaf)))
    stubborn.name = "two"
    ran = Ran(family, polite, stubborn)
    ran.until(lambda: deaf.exists() and len(carrying(family)) == 3)
    assert ran.said == ["two does not end: killing it"]
    assert carrying(family) == []


def test_children_end_also_when_the_loop_fails(family: str) -> None:
    ran = Ran(family, child("import time; time.sleep(600)"))

    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        ran.supervisor.run(each_tick=fail)
    assert carrying(family) == []


def test_a_process_that_is_tied_dies_with_its_parent_and_so_does_what_it_forks(family: str) -> None:
    tied = (
        "import os, time; from controlplane.supervisor import tie_descendants; tie_descendants();"
        "os.fork() and os.fork(); os.write(1, b'tied\\n'); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {tied!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        env={**os.environ, supervisor.INSTANCE_VARIABLE: family, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == b"tied\n"
    process.kill()
    process.wait()
    wait_until(lambda: not carrying(family), "all are gone")
    process.stdout.close()
