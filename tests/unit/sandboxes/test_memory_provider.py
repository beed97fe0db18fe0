"""How the memory provider lets a test make things go wrong."""

import threading
from datetime import timedelta

import pytest

from sandboxes.providers.base import ExecResult, Missing, SandboxSpec, Unavailable
from sandboxes.providers.memory import File, Folder, Link, MemoryProvider, ProgramCall, ProgramResult

MINUTE = timedelta(minutes=1)


class Died(BaseException):
    """This process is gone; nothing after the point where it is raised happens."""


@pytest.fixture
def memory() -> MemoryProvider:
    return MemoryProvider()


@pytest.fixture
def ref(memory: MemoryProvider) -> str:
    return memory.create(SandboxSpec(name="lhc-one", owner="me"))


def run(memory: MemoryProvider, ref: str, *argv: str, **more) -> ExecResult:
    return memory.exec(ref, argv, env={}, mark="lhc-mark", **{"timeout": MINUTE} | more)


def died(ref: str) -> None:
    raise Died


def test_death_before_a_verb_leaves_it_undone(memory) -> None:
    memory.before("create", died)
    with pytest.raises(Died):
        memory.create(SandboxSpec(name="lhc-one", owner="me"))
    assert memory.list("me") == []


def test_death_after_a_verb_leaves_it_done(memory) -> None:
    memory.after("create", died)
    with pytest.raises(Died):
        memory.create(SandboxSpec(name="lhc-one", owner="me"))
    assert [found.name for found in memory.list("me")] == ["lhc-one"]


def test_nothing_runs_after_a_verb_that_failed(memory) -> None:
    memory.after("exec", died)
    with pytest.raises(Missing):
        run(memory, "lhc-none", "true")


def test_a_hook_is_told_which_sandbox_and_may_call_the_provider(memory, ref) -> None:
    memory.before("exec", memory.destroy)
    with pytest.raises(Missing):
        run(memory, ref, "true")


def test_fail_ends_after_its_times(memory, ref) -> None:
    memory.fail("destroy", Unavailable("engine down"), times=2)
    for _ in range(2):
        with pytest.raises(Unavailable, match="engine down"):
            memory.destroy(ref)
        assert memory.inspect(ref).running
    memory.destroy(ref)
    assert memory.list("me") == []


def test_hooks_end_with_their_block(memory, ref) -> None:
    with memory.fail("exec", Unavailable("engine down")), pytest.raises(Unavailable):
        run(memory, ref, "true")
    with memory.before("exec", died), pytest.raises(Died):
        run(memory, ref, "true")
    assert run(memory, ref, "true").exit_code == 0


def test_a_hook_on_a_misspelt_verb_is_refused(memory) -> None:
    with pytest.raises(ValueError, match="not a method"):
        memory.before("destory", died)


def test_what_vanished_is_missing(memory, ref) -> None:
    memory.vanish(ref)
    with pytest.raises(Missing):
        run(memory, ref, "true")
    assert memory.list("me") == []


def test_what_stopped_is_listed_and_cannot_run(memory, ref) -> None:
    memory.stop(ref)
    assert [found.running for found in memory.list("me")] == [False]
    with pytest.raises(Unavailable):
        run(memory, ref, "true")
    memory.destroy(ref)
    assert memory.list("me") == []


def test_what_stopped_is_started_by_create_and_keeps_its_files(memory, ref) -> None:
    memory.write_file(ref, "/workspace/kept", b"kept")
    memory.stop(ref)
    memory.create(SandboxSpec(name=ref, owner="me"))
    assert run(memory, ref, "cat", "kept").stdout == b"kept"


def test_calls_are_counted_also_those_that_fail(memory, ref) -> None:
    memory.fail("exec", Unavailable("engine down"))
    with pytest.raises(Unavailable):
        run(memory, ref, "true")
    memory.list("me")
    assert memory.calls == [("create", ref), ("exec", ref), ("list", "me")]


def test_reset_forgets_everything(memory, ref) -> None:
    memory.fail("list", Unavailable("engine down"))
    memory.programs["python3"] = lambda call: ProgramResult()
    memory.reset()
    assert (memory.list("me"), memory.calls) == ([], [("list", "me")])
    assert "python3" not in memory.programs


def test_two_execs_meet_in_a_hook(memory, ref) -> None:
    barrier = threading.Barrier(2)
    memory.before("exec", lambda ref: barrier.wait(timeout=30))
    other = threading.Thread(target=run, args=(memory, ref, "true"))
    other.start()
    assert run(memory, ref, "echo", "both are here").stdout == b"both are here\n"
    other.join()


def test_sleeping_takes_no_time_and_says_what_it_would_have_taken(memory, ref) -> None:
    assert run(memory, ref, "sleep", "59").duration == timedelta(seconds=59)
    result = run(memory, ref, "sleep", "3600")
    assert (result.exit_code, result.timed_out, result.duration) == (137, True, MINUTE)


def test_nothing_is_done_after_the_timeout(memory, ref) -> None:
    result = run(memory, ref, "sh", "-c", "echo 1 >first; sleep 40; sleep 40; echo 2 >second")
    assert result.timed_out
    assert {path for path in memory.files(ref) if path.startswith("/workspace/")} == {"/workspace/first"}


def test_there_is_no_python_unless_a_test_brings_one(memory, ref) -> None:
    def act(call: ProgramCall) -> ProgramResult:
        call.files["/workspace/seen"] = File(call.stdin)
        return ProgramResult(stdout=call.env["LEASEHOLD_RUN"].encode(), took=timedelta(seconds=2))

    assert run(memory, ref, "python3", "/opt/leasehold/take_turn.py").exit_code == 127
    memory.programs["python3"] = act
    result = run(memory, ref, "python3", "/opt/leasehold/take_turn.py", stdin=b"{}")
    assert (result.stdout, result.duration) == (b"lhc-mark", timedelta(seconds=2))
    assert memory.read_file(ref, "/workspace/seen", limit=10) == b"{}"


def test_a_sandbox_destroyed_under_a_running_command_kills_it(memory, ref) -> None:
    def destroyed(call: ProgramCall) -> ProgramResult:
        memory.destroy(ref)
        return ProgramResult(stdout=b"so far")

    memory.programs["work"] = destroyed
    assert run(memory, ref, "work").exit_code == 137


def test_out_of_memory_is_simulated(memory, ref) -> None:
    result = run(memory, ref, "sh", "-c", "echo begun; oom")
    assert (result.stdout, result.exit_code, result.oom) == (b"begun\n", 137, True)


def test_files_can_be_planted_and_looked_at(memory, ref) -> None:
    memory.write_file(ref, "/data/a/b", b"1")
    memory.files(ref)["/data/l"] = Link("/etc/passwd")
    assert memory.files(ref) == {
        "/workspace": Folder(),
        "/data": Folder(),
        "/data/a": Folder(),
        "/data/a/b": File(b"1"),
        "/data/l": Link("/etc/passwd"),
    }
