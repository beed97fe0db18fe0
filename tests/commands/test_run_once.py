"""manage.py run_once: output, exit codes, and a directory copied in and back."""

import io
import signal
import uuid
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from leases.models import Lease
from sandboxes.models import Pool, Run, Sandbox
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.providers.memory import ProgramResult

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def only_memory(memory) -> None:
    Pool.objects.update(provider="memory")


def exit_code(*args: str, agent: str = "did:plc:ada") -> int:
    with pytest.raises(SystemExit) as ended:
        call_command("run_once", "--agent", agent, *args)
    assert isinstance(ended.value.code, int)
    assert set(Lease.objects.values_list("status", flat=True)) == {"destroyed"}
    return ended.value.code


def test_output_passes_through_unchanged_and_the_exit_code_is_the_same(memory, capfdbinary) -> None:
    memory.programs["odd"] = lambda call: ProgramResult(exit_code=3, stdout=b"\xff\x00out", stderr=b"err\xfe")
    assert exit_code("--", "odd", "-x", "--verbosity") == 3
    assert capfdbinary.readouterr() == (b"\xff\x00out", b"err\xfe")
    assert (Run.objects.get().argv, Sandbox.objects.get().state) == (["odd", "-x", "--verbosity"], "destroyed")


def test_stdin_comes_from_a_file_or_from_stdin_and_memory_limits_the_sandbox(tmp_path: Path, capfdbinary, monkeypatch) -> None:
    (tmp_path / "in").write_bytes(b"\xff\0")
    assert exit_code("--stdin", str(tmp_path / "in"), "--memory", "64", "--", "cat") == 0
    assert Sandbox.objects.get().memory_mib == 64
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"own")))
    assert exit_code("--stdin", "-", "--", "cat") == 0
    assert capfdbinary.readouterr() == (b"\xff\0own", b"")


@pytest.mark.parametrize(
    ("argv", "failing", "expected", "message"),
    [
        (["--timeout", "1s", "--", "sleep", "60"], None, 124, "killed after 1 s"),
        (["--", "oom"], None, 123, "out of memory"),
        (
            ["--", "true"], ("create", Rejected("no such image")), 125,
            "container_failed: The sandbox could not be started: no such image",
        ),
        (["--", "true"], ("exec", ZeroDivisionError("ours")), 122, "internal: ZeroDivisionError: ours"),
    ],
)  # fmt: skip
def test_each_outcome_but_a_failed_command_has_its_exit_code(
    memory, capsys, argv, failing, expected: int, message: str
) -> None:
    if failing:
        memory.fail(*failing)
    assert exit_code(*argv) == expected
    assert f"run_once: {message}\n" in capsys.readouterr().err


def test_an_interrupt_leaves_no_sandbox_and_has_its_exit_code(memory) -> None:
    before = signal.getsignal(signal.SIGTERM)
    memory.before("exec", lambda ref: signal.raise_signal(signal.SIGTERM))
    assert exit_code("--", "true") == 143
    assert signal.getsignal(signal.SIGTERM) is before
    memory.reset()
    memory.fail("exec", KeyboardInterrupt())
    assert exit_code("--", "true") == 130


def test_an_unconfirmed_destroy_is_reported(memory, capsys) -> None:
    memory.fail("destroy", Unavailable("engine down"))
    with pytest.raises(SystemExit, match="0"):
        call_command("run_once", "--agent", "did:plc:ada", "--", "true")
    assert capsys.readouterr().err.endswith("the destruction of the sandbox is not confirmed yet; the sweeps continue it\n")


def test_command_runs_without_the_model_proxy() -> None:
    assert exit_code("--no-llm-proxy", "--", "true") == 0
    assert not Sandbox.objects.get().llm_enabled


def test_chosen_id_names_the_run_and_runs_once(capfd) -> None:
    run_id = str(uuid.uuid4())
    assert exit_code("--run-id", run_id, "--", "true") == 0
    assert str(Run.objects.get().pk) == run_id
    with pytest.raises(CommandError, match="A run with this run_id exists"):
        call_command("run_once", "--agent", "did:plc:bob", "--run-id", run_id, "--", "true")
    assert Run.objects.count() == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--timeout", "2h"], "at most 3600 seconds"), (["--timeout", "soon"], "--timeout: "),
        (["--memory", "5000"], "Must be from 16"),
        (["--type", "chess"], "no such environment type"), (["--pool", "none"], "no such pool"),
        (["--run-id", "task-123"], "not a UUID"), (["--run-id", str(uuid.uuid5(uuid.NAMESPACE_DNS, "task"))], "random UUID"),
        (["--agent", "%(x)s"], "--agent: "), (["--stdin", "/no/such"], "No such file"),
        (["--workspace", "/no/such"], "No such file"), (["--workspace", "/etc/passwd"], "is not a directory"),
    ],
)  # fmt: skip
def test_a_refused_request_is_explained_and_runs_nothing(args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message) as refused:
        call_command("run_once", "--agent", "did:plc:ada", *args, "--", "true")
    assert refused.value.returncode == 121
    assert not Lease.objects.exists()


# --- the directory ------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "folder"
    directory.mkdir()
    (directory / "a").write_text("1")
    return directory


def test_changes_in_the_workspace_are_applied_to_the_directory(directory: Path, capfd) -> None:
    assert exit_code("--workspace", str(directory), "--", "sh", "-c", "cat a; echo new >b; echo x >.home/junk") == 0
    assert {path.name: path.read_text() for path in directory.iterdir()} == {"a": "1", "b": "new\n"}
    assert capfd.readouterr() == ("1", "")


@pytest.mark.parametrize(("argv", "expected"), [("echo new >b; exit 3", 3), ("echo new >b; sleep 3600", 124)])
def test_changes_are_applied_after_a_failure_or_a_kill(directory: Path, argv: str, expected: int) -> None:
    assert exit_code("--workspace", str(directory), "--", "sh", "-c", argv) == expected
    assert (directory / "b").read_text() == "new\n"


@pytest.mark.parametrize(("argv", "expected"), [("true", 122), ("false", 122), ("oom", 123)])
def test_a_workspace_that_cannot_be_returned_is_no_success(directory: Path, memory, capsys, argv: str, expected: int) -> None:
    memory.fail("get_files", Unavailable("engine down"))
    assert exit_code("--workspace", str(directory), "--", argv) == expected
    assert "could not be returned" in capsys.readouterr().err or expected == 123
    assert (directory / "a").read_text() == "1"


def test_a_directory_is_copied_through_a_sandbox_of_the_process_provider(directory: Path) -> None:
    Pool.objects.update(provider="process")
    (directory / "run").write_text("#!/bin/sh\nrm a; mkdir d; echo new >d/b; ln -s /etc/passwd d/link; echo '# x' >>run\n")
    (directory / "run").chmod(0o755)
    assert exit_code("--workspace", str(directory), "--", "./run") == 0
    assert sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*")) == ["d", "d/b", "d/link", "run"]
    assert ((directory / "d" / "b").read_text(), (directory / "d" / "link").readlink()) == ("new\n", Path("/etc/passwd"))
    assert (directory / "run").read_text().endswith("# x\n")
