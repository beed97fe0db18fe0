"""Failure injection of the memory provider: hooks, failures, vanished and stopped sandboxes."""

from datetime import timedelta

import pytest

from sandboxes.providers import recoveries
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.errors import Missing, Stopped, Unavailable
from sandboxes.providers.memory import File, Folder, Link, MemoryProvider, ProgramCall, ProgramResult
from sandboxes.providers.recoveries import Recovery
from tests.conftest import MINUTE, SimulatedCrash, die

SPEC = SandboxSpec(name="lhc-one", owner="me")


@pytest.fixture
def memory() -> MemoryProvider:
    return MemoryProvider()


@pytest.fixture
def ref(memory: MemoryProvider) -> str:
    return memory.create(SPEC)


def run(memory: MemoryProvider, ref: str, *argv: str, **options) -> ExecResult:
    return memory.exec(ref, argv or ["true"], env={}, mark="lhc-mark", **{"timeout": MINUTE} | options)


@pytest.mark.parametrize(("when", "created"), [("before", []), ("after", ["lhc-one"])])
def test_crash_before_a_call_leaves_it_undone_and_after_it_done(memory, when: str, created: list[str]) -> None:
    getattr(memory, when)("create", die)
    with pytest.raises(SimulatedCrash):
        memory.create(SPEC)
    assert [found.name for found in memory.list("me")] == created


def test_after_hook_does_not_run_after_a_failed_call(memory) -> None:
    memory.after("exec", die)
    with pytest.raises(Missing):
        run(memory, "lhc-none")


def test_fail_ends_after_the_given_number_of_calls_which_are_recorded(memory, ref) -> None:
    memory.fail("destroy", Unavailable("engine down"), times=2)
    for _ in range(2):
        with pytest.raises(Unavailable, match="engine down"):
            memory.destroy(ref)
    assert [found.running for found in memory.list("me")] == [True]
    memory.destroy(ref)
    assert memory.list("me") == []
    assert memory.calls == [("create", ref), *[("destroy", ref)] * 2, ("list", "me"), ("destroy", ref), ("list", "me")]


def test_hook_ends_with_its_with_block_or_a_reset(memory, ref) -> None:
    with memory.fail("exec", Unavailable("engine down")), pytest.raises(Unavailable):
        run(memory, ref)
    with memory.before("exec", die), pytest.raises(SimulatedCrash):
        run(memory, ref)
    assert run(memory, ref).exit_code == 0
    memory.fail("list", Unavailable("engine down"))
    memory.programs["python3"] = lambda call: ProgramResult()
    memory.reset()
    assert (memory.list("me"), memory.calls) == ([], [("list", "me")])
    assert "python3" not in memory.programs


def test_hook_on_an_unknown_method_is_refused(memory) -> None:
    with pytest.raises(ValueError, match="not a method"):
        memory.before("destory", die)


@pytest.mark.parametrize("how", ["create", "exec"])
def test_stopped_sandbox_is_listed_and_started_with_its_files_but_without_processes(memory, ref, how: str) -> None:
    memory.write_file(ref, "/workspace/kept", b"kept")
    memory.start(ref, ["sleep", "300"], env={}, mark="m")
    memory.stop(ref)
    assert [found.running for found in memory.list("me")] == [False]
    with recoveries.observe() as observed:
        if how == "create":
            memory.create(SPEC)
        assert run(memory, ref, "cat", "kept").stdout == b"kept"
    assert observed == ([Recovery.STARTED] if how == "exec" else [])
    assert memory.processes(ref, ["m"]) == {}
    memory.stop(ref)
    memory.destroy(ref)
    assert memory.list("me") == []


def test_sleep_takes_no_real_time_and_a_script_stops_at_the_timeout(memory, ref) -> None:
    assert run(memory, ref, "sleep", "59").duration == timedelta(seconds=59)
    result = run(memory, ref, "sleep", "3600")
    assert (result.exit_code, result.timed_out, result.duration) == (137, True, MINUTE)
    assert run(memory, ref, "sh", "-c", "echo 1 >first; sleep 40; sleep 40; echo 2 >second").timed_out
    assert {path for path in memory.files(ref) if path.startswith("/workspace/")} == {"/workspace/first"}


def test_python_is_missing_unless_a_test_provides_it(memory, ref) -> None:
    def act(call: ProgramCall) -> ProgramResult:
        call.files["/workspace/seen"] = File(call.stdin)
        return ProgramResult(stdout=call.env["LEASEHOLD_RUN"].encode(), took=timedelta(seconds=2))

    assert run(memory, ref, "python3", "/opt/leasehold/take_turn.py").exit_code == 127
    memory.programs["python3"] = act
    result = run(memory, ref, "python3", "/opt/leasehold/take_turn.py", stdin=b"{}")
    assert (result.stdout, result.duration) == (b"lhc-mark", timedelta(seconds=2))
    assert memory.read_file(ref, "/workspace/seen", limit=10) == b"{}"


@pytest.mark.parametrize(("end", "error"), [("destroy", Missing), ("vanish", Missing), ("stop", Stopped)])
def test_command_whose_sandbox_is_gone_raises_missing_and_not_if_it_has_stopped(memory, ref, end: str, error: type) -> None:
    def lose(call: ProgramCall) -> ProgramResult:
        getattr(memory, end)(ref)
        return ProgramResult(stdout=b"so far")

    memory.programs["work"] = lose
    with pytest.raises(error):
        run(memory, ref, "work")


def test_files_can_be_inserted_and_inspected(memory, ref) -> None:
    memory.write_file(ref, "/data/a/b", b"1")
    memory.files(ref)["/data/l"] = Link("/etc/passwd")
    assert memory.files(ref) == {
        "/workspace": Folder(), "/data": Folder(), "/data/a": Folder(), "/data/a/b": File(b"1"), "/data/l": Link("/etc/passwd"),
    }  # fmt: skip
