"""Process provider: shared directory, path translation, environment and process handling."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from sandboxes.image import reap
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.errors import Missing, Rejected, Unavailable
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
