"""run_once: output and exit code of a command in a sandbox of its own, and a directory that travels with it."""

import io
import signal
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from leases.models import Lease
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.base import Rejected, Unavailable
from sandboxes.providers.memory import ProgramResult
from tests.commands.manage import run_manage

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def only_memory(memory) -> None:
    Pool.objects.update(provider="memory")


def code(*args: str, agent: str = "did:plc:ada") -> int:
    with pytest.raises(SystemExit) as ended:
        call_command("run_once", "--agent", agent, *args)
    assert isinstance(ended.value.code, int)
    assert set(Lease.objects.values_list("status", flat=True)) == {"destroyed"}
    return ended.value.code


def test_output_passes_through_byte_for_byte_and_it_ends_with_the_same_code(memory, capfdbinary) -> None:
    memory.programs["odd"] = lambda call: ProgramResult(exit_code=3, stdout=b"\xff\x00out", stderr=b"err\xfe")
    assert code("--", "odd", "-x", "--verbosity") == 3
    assert capfdbinary.readouterr() == (b"\xff\x00out", b"err\xfe")
    assert (Run.objects.get().argv, Sandbox.objects.get().state) == (["odd", "-x", "--verbosity"], "destroyed")


def test_it_ends_with_0_when_the_command_does(capsys) -> None:
    assert code("--", "true") == 0
    assert capsys.readouterr().err == ""


def test_stdin_is_a_file_or_its_own(tmp_path: Path, capfdbinary, monkeypatch) -> None:
    (tmp_path / "in").write_bytes(b"\xff\0")
    assert code("--stdin", str(tmp_path / "in"), "--", "cat") == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"own")))
    assert code("--stdin", "-", "--", "cat") == 0
    assert capfdbinary.readouterr().out == b"\xff\0own"


def test_memory_is_that_of_its_sandbox() -> None:
    assert code("--memory", "64", "--", "true") == 0
    assert Sandbox.objects.get().memory_mib == 64


@pytest.mark.parametrize(
    ("argv", "expected", "said"),
    [
        (["--timeout", "1s", "--", "sleep", "60"], 124, "killed after 1 s"),
        (["--", "oom"], 123, "out of memory"),
    ],
)
def test_what_was_killed_has_a_code_of_its_own(capsys, argv: list[str], expected: int, said: str) -> None:
    assert code(*argv) == expected
    assert capsys.readouterr().err == f"run_once: {said}\n"


def test_a_sandbox_that_does_not_start_and_a_bug_of_ours_have_codes_of_their_own(memory, capsys) -> None:
    with memory.fail("create", Rejected("no such image")):
        assert code("--", "true") == 125
    assert "run_once: container_failed: The sandbox could not be started: no such image\n" in capsys.readouterr().err
    with memory.fail("exec", ZeroDivisionError("ours")):
        assert code("--", "true") == 122
    assert "run_once: internal: ZeroDivisionError: ours\n" in capsys.readouterr().err


def test_whoever_ends_it_leaves_nothing(memory) -> None:
    before = signal.getsignal(signal.SIGTERM)
    memory.before("exec", lambda ref: signal.raise_signal(signal.SIGTERM))
    assert code("--", "true") == 143
    assert Sandbox.objects.get().state == "destroyed"
    assert signal.getsignal(signal.SIGTERM) is before
    memory.reset()
    memory.fail("exec", KeyboardInterrupt())
    assert code("--", "true") == 130


def test_a_sandbox_that_is_not_confirmed_gone_is_told(memory, capsys) -> None:
    memory.fail("destroy", Unavailable("engine down"))
    with pytest.raises(SystemExit, match="0"):
        call_command("run_once", "--agent", "did:plc:ada", "--", "true")
    assert capsys.readouterr().err.endswith("the destruction of the sandbox is not confirmed yet; the sweeps continue it\n")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--timeout", "2h"], "at most 3600 seconds"), (["--timeout", "soon"], "--timeout: "),
        (["--memory", "5000"], "From 16"),
        (["--type", "chess"], "no such environment type"), (["--pool", "none"], "no such pool"),
        (["--agent", "%(x)s"], "--agent: "), (["--stdin", "/no/such"], "No such file"),
        (["--workspace", "/no/such"], "No such file"), (["--workspace", "/etc/passwd"], "is not a directory"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why_and_runs_nothing(args: list[str], why: str) -> None:
    with pytest.raises(CommandError, match=why) as refused:
        call_command("run_once", "--agent", "did:plc:ada", *args, "--", "true")
    assert refused.value.returncode == 121
    assert not Lease.objects.exists()


def test_without_a_place_nothing_is_run(memory) -> None:
    Pool.objects.update(capacity=0)
    with pytest.raises(CommandError, match="places") as refused:
        call_command("run_once", "--agent", "did:plc:ada", "--", "true")
    assert (refused.value.returncode, Run.objects.count()) == (121, 0)


def test_without_a_database_it_says_so_in_one_line(tmp_path: Path) -> None:
    argv = ["run_once", "--agent", "did:plc:ada", "--", "true"]
    done = run_manage(tmp_path, *argv, DATABASE_URL="postgres://nobody@127.0.0.1:1/nothing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (122, "", 1)
    assert "connection failed" in done.stderr


# --- the directory ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("1")
    return folder


def test_what_the_command_did_in_the_workspace_is_done_in_the_directory(folder: Path, capfd) -> None:
    assert code("--workspace", str(folder), "--", "sh", "-c", "cat a; echo new >b; echo x >.home/junk") == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "1", "b": "new\n"}
    assert capfd.readouterr() == ("1", "")


@pytest.mark.parametrize(("argv", "expected"), [("echo new >b; exit 3", 3), ("echo new >b; sleep 3600", 124)])
def test_also_when_it_failed_or_was_killed(folder: Path, argv: str, expected: int) -> None:
    assert code("--workspace", str(folder), "--", "sh", "-c", argv) == expected
    assert (folder / "b").read_text() == "new\n"


@pytest.mark.parametrize(("argv", "expected"), [("true", 122), ("false", 122), ("oom", 123)])
def test_a_workspace_that_does_not_come_back_is_no_success(folder: Path, memory, capsys, argv: str, expected: int) -> None:
    memory.fail("get_files", Unavailable("engine down"))
    assert code("--workspace", str(folder), "--", argv) == expected
    assert "could not be returned" in capsys.readouterr().err or expected == 123
    assert (folder / "a").read_text() == "1"


def test_a_real_directory_travels_through_a_real_sandbox(folder: Path) -> None:
    Pool.objects.update(provider="process")
    (folder / "run").write_text("#!/bin/sh\nrm a; mkdir d; echo new >d/b; ln -s /etc/passwd d/link; echo '# x' >>run\n")
    (folder / "run").chmod(0o755)
    assert code("--workspace", str(folder), "--", "./run") == 0
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == ["d", "d/b", "d/link", "run"]
    assert ((folder / "d" / "b").read_text(), (folder / "d" / "link").readlink()) == ("new\n", Path("/etc/passwd"))
    assert (folder / "run").read_text().endswith("# x\n")
