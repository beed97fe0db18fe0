"""Process provider: shared directory, path translation, environment and process handling."""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from sandboxes.image import files, reap
from sandboxes.providers.base import ExecResult, Missing, Rejected, SandboxSpec, Unavailable
from sandboxes.providers.process.child import start_process
from sandboxes.providers.process.directories import METADATA_FILE
from sandboxes.providers.process.provider import ProcessProvider
from tests.support.waiting import wait_until

PROVIDER = "sandboxes.providers.process.provider"
WAIT_TIMEOUT = timedelta(seconds=30)  # far below the 300 s that programs sleep in these tests


@pytest.fixture
def provider(tmp_path) -> ProcessProvider:
    return ProcessProvider(tmp_path / "process")


@pytest.fixture
def ref(provider: ProcessProvider):
    name = f"lhc-{uuid4().hex[:16]}"
    yield provider.create(SandboxSpec(name=name, owner="me"))
    provider.destroy(name)


@pytest.fixture
def run(provider: ProcessProvider, ref: str):
    def run(*argv: str, env=(), seconds: float = 60, **more) -> ExecResult:
        return provider.exec(ref, argv, env=dict(env), timeout=timedelta(seconds=seconds), mark=f"lhc-{uuid4().hex}", **more)

    return run


def living(ref: str) -> list[Path]:
    """List /proc directories of the sandbox's processes."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            found += [each] * (f"LEASEHOLD_SANDBOX={ref}".encode() in reap.read_environment(int(each.name)).split(b"\0"))
        except OSError:  # exited meanwhile
            continue
    return found


def raise_always(error: BaseException) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


# --- state is on disk only ----------------------------------------------------------------------------------------


def test_providers_on_one_directory_share_sandboxes(provider, ref) -> None:
    second = ProcessProvider(provider.root)
    second.write_file(ref, "/workspace/a", b"1")
    assert provider.read_file(ref, "/workspace/a", limit=10) == b"1"
    second.destroy(ref)
    assert provider.list("me") == []


@pytest.mark.parametrize("owner", ["pool:3", "a/b", "..", ".", "../../up", "ünï", "a" * 80])
def test_any_owner_label_is_a_directory_directly_below_the_root(provider, owner) -> None:
    provider.create(SandboxSpec(name="lhc-one", owner=owner))
    assert [found.name for found in provider.list(owner)] == ["lhc-one"]
    assert [*provider.root.glob("*/lhc-one")] == [next(provider.root.iterdir()) / "lhc-one"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "UPPER", "a.b", "*", "a" * 64])
def test_invalid_name_is_rejected(provider, ref, name) -> None:
    with pytest.raises(Rejected):
        provider.create(SandboxSpec(name=name, owner="me"))
    with pytest.raises(Missing):
        provider.inspect(name)
    provider.destroy(name)
    assert [found.ref for found in provider.list("me")] == [ref]


def test_leftover_of_an_interrupted_create_or_destroy_is_listed_and_can_be_completed_or_destroyed(provider, ref, run) -> None:
    metadata = provider.root / "me" / ref / METADATA_FILE
    metadata.unlink()
    assert [(found.ref, found.running) for found in provider.list("me")] == [(ref, False)]
    with pytest.raises(Unavailable):
        provider.wait_ready(ref, timeout=timedelta(0))
    with pytest.raises(Unavailable):
        run("true")
    provider.create(SandboxSpec(name=ref, owner="me"))
    assert provider.inspect(ref).running
    metadata.unlink()
    provider.destroy(ref)
    assert provider.list("me") == []


@pytest.mark.parametrize("finished", [True, False])
def test_exec_started_during_destroy_leaves_no_process(provider, ref, run, monkeypatch, finished) -> None:
    def destroyed_meanwhile(argv, cwd, env):
        child = start_process(argv, cwd, env)
        if finished:
            provider.destroy(ref)
        else:
            (provider.root / "me" / ref / METADATA_FILE).unlink()  # the first step of a destroy
        return child

    monkeypatch.setattr(f"{PROVIDER}.start_process", destroyed_meanwhile)
    with pytest.raises(Missing):
        run("sleep", "300")
    assert living(ref) == []


def test_command_whose_sandbox_is_destroyed_raises_missing(provider, ref, run) -> None:
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, "sleep", "300")
        wait_until(lambda: living(ref), "it sleeps")
        provider.destroy(ref)
        with pytest.raises(Missing):
            running.result()


def test_seed_copies_the_images_skill_and_no_other_directory(provider, ref) -> None:
    provider.seed(ref, "__pycache__")
    assert provider.manifest(ref, "/data") == {}
    provider.seed(ref, "catan")
    prompt = (Path(files.__file__).parent / "catan" / "prompt.md").read_bytes()
    assert provider.read_file(ref, "/data/skills/catan/prompt.md", limit=1 << 20) == prompt


def test_repeated_create_keeps_the_creation_time(provider, ref) -> None:
    before = provider.inspect(ref)
    provider.create(SandboxSpec(name=ref, owner="me"))
    assert provider.inspect(ref) == before
    assert json.loads((provider.root / "me" / ref / METADATA_FILE).read_bytes())["created_at"] == before.created_at.isoformat()


def test_disk_error_is_unavailable(provider, ref, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable):
        ProcessProvider(tmp_path / "file").list("me")
    with pytest.raises(Unavailable):
        ProcessProvider(tmp_path / "file" / "below").create(SandboxSpec(name="lhc-one", owner="me"))
    monkeypatch.setattr(files, "write", raise_always(OSError(28, "No space left on device")))
    with pytest.raises(Unavailable, match="No space left"):
        provider.write_file(ref, "/workspace/a", b"1")


# --- paths --------------------------------------------------------------------------------------------------------


def test_sandbox_paths_in_argv_are_translated(provider, ref, run) -> None:
    home = provider.root / "me" / ref
    told = run("printf", r"%s\n", "/data", "/data/in", "/database", "see /data", "/opt/leasehold/files.py", cwd="/data")
    assert told.stdout.decode().splitlines() == [
        f"{home}/data", f"{home}/data/in", "/database", "see /data", files.__file__,
    ]  # fmt: skip


def test_sockets_directory_is_persistent(provider, tmp_path, ref) -> None:
    name = provider.create(SandboxSpec(name=f"{ref}-2", owner="me", sockets=tmp_path))
    assert ProcessProvider(provider.root).inside(name, "/run/leasehold/exec.sock") == f"{tmp_path}/exec.sock"
    assert provider.inside(ref, "/run/leasehold/exec.sock") == "/run/leasehold/exec.sock"


def test_environment_contains_the_host_paths(provider, ref, run) -> None:
    home = provider.root / "me" / ref
    told = run("printenv", "LEASEHOLD_WORKSPACE", "LEASEHOLD_DATA", "HOME", env={"LEASEHOLD_DATA": "/forged"})
    assert told.stdout.decode().splitlines() == [f"{home}/workspace", f"{home}/data", f"{home}/workspace/.home"]
    assert (home / "workspace" / ".home").is_dir()


# --- execution ----------------------------------------------------------------------------------------------------


def test_no_file_descriptor_is_inherited(run) -> None:
    with open(os.devnull) as opened:
        os.set_inheritable(opened.fileno(), True)
        assert run("ls", "/proc/self/fd").stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is the directory opened by ls


def test_environment_is_minimal(run) -> None:
    names = {line.split(b"=")[0].decode() for line in run("env").stdout.splitlines()}
    ours = {"LEASEHOLD_WORKSPACE", "LEASEHOLD_DATA", "LEASEHOLD_SANDBOX", "LEASEHOLD_RUN"}
    assert names == {"PATH", "HOME", "LANG"} | ours


@pytest.mark.parametrize("python", ["python", "python3"])
def test_python_is_available_without_python_in_path(run, python) -> None:
    told = run(python, "-c", "import sys; print(sys.executable)", env={"PATH": "/nowhere"})
    assert told.stdout.decode().strip() == sys.executable


def test_relative_program_is_resolved_from_cwd(provider, ref, run) -> None:
    run("sh", "-c", r"printf '#!/bin/sh\necho ran $1\n' >tool; chmod +x tool")
    assert run("./tool", "here").stdout == b"ran here\n"
    assert run("/workspace/tool", "there").stdout == b"ran there\n"


def test_program_that_cannot_be_executed_is_a_result(provider, ref, run) -> None:
    provider.write_file(ref, "/workspace/text", b"no program")
    assert run("./text").exit_code == 126
    assert run("/workspace").exit_code == 126
    assert run("true", cwd="/workspace/nowhere").exit_code == 126


@pytest.mark.parametrize(
    ("argv", "more"),
    [([], {}), (["a\0b"], {}), (["true"], {"cwd": "here"}), (["true"], {"env": {"A=B": ""}}), (["true"], {"env": {"A": "\0"}})],
)
def test_invalid_command_is_rejected(run, argv, more) -> None:
    with pytest.raises(Rejected):
        run(*argv, **more)


def test_process_exhaustion_is_unavailable(run, monkeypatch) -> None:
    monkeypatch.setattr(f"{PROVIDER}.start_process", raise_always(BlockingIOError(11, "Resource temporarily unavailable")))
    with pytest.raises(Unavailable):
        run("true")


def test_descendant_that_keeps_writing_does_not_delay_the_result(run) -> None:
    result = run("sh", "-c", "yes & echo done", seconds=120, cap=1000)
    assert (result.exit_code, result.timed_out) == (0, False)
    assert result.duration < WAIT_TIMEOUT


def test_remaining_process_lives_until_destroy(provider, ref, run) -> None:
    run("sh", "-c", "setsid sleep 300 >/dev/null 2>&1 &")
    assert len(living(ref)) == 1
    provider.destroy(ref)
    assert living(ref) == []


@pytest.fixture
def show(tmp_path, monkeypatch):
    """Set the status and the environment of process 77 in /proc."""
    monkeypatch.setattr(reap, "PROC_DIRECTORY", tmp_path)
    (tmp_path / "77").mkdir()

    def show(status: str, environment: bytes = b"") -> None:
        (tmp_path / "77" / "stat").write_text(status)
        (tmp_path / "77" / "environ").write_bytes(environment)

    return show


def stat(env_end: int, memory: int = 4096) -> str:
    """Build /proc/77/stat of a process whose environment ends at this address."""
    fields = [0] * 52
    fields[23 - 3], fields[51 - 3] = memory, env_end
    return f"77 (a ) name) S {' '.join(map(str, fields[1:]))}"


@pytest.mark.parametrize("late", [0, 1, 3])
def test_environment_is_read_after_execve_completes(late: int, show, monkeypatch) -> None:
    """During execve a process has no environment and cannot be attributed to an exec."""
    remaining = [(stat(0), b"")] * late + [(stat(4711), b"A=1\0")]
    show(*remaining.pop(0))
    monkeypatch.setattr(reap.time, "sleep", lambda seconds: show(*remaining.pop(0)))
    assert (reap.read_environment(77), remaining) == (b"A=1\0", [])


@pytest.mark.parametrize("status", [stat(4711), stat(0, memory=0), "77 (short) S 1"])
def test_process_without_an_environment_is_not_awaited(status: str, show, monkeypatch) -> None:
    """A cleared environment, a zombie or kernel thread, and a kernel that does not report the address."""
    show(status)
    monkeypatch.setattr(reap.time, "sleep", lambda seconds: pytest.fail("waited"))
    assert reap.read_environment(77) == b""


def test_interrupted_exec_leaves_no_process(ref, run, monkeypatch) -> None:
    monkeypatch.setattr(f"{PROVIDER}.ChildCommunication.run", raise_always(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run("sleep", "300")
    assert living(ref) == []


def test_command_that_closed_its_outputs_is_awaited(run) -> None:
    assert run("sh", "-c", "exec >&- 2>&-; read line; exit 7", stdin=b"x\n").exit_code == 7


def test_read_only_directories_are_destroyed(provider, ref, run, tmp_path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    run("sh", "-c", f"mkdir -p a/b; touch a/b/c; ln -s {outside} a/b/link; chmod 0 a/b; chmod 0 a")
    provider.destroy(ref)
    assert not (provider.root / "me" / ref).exists()
    assert outside.stat().st_mode & 0o777 == 0o500


def test_two_state_directories_of_one_machine_are_two_engines(provider: ProcessProvider, tmp_path) -> None:
    again, other = ProcessProvider(tmp_path / "process"), ProcessProvider(tmp_path / "other")
    assert provider.engine_id() == again.engine_id() != other.engine_id()
    assert provider.list("me") == []
