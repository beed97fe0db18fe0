"""Agents of other versions: that of the version before works, others are named, and connect in vain."""

import io
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes.agent.client import AgentOutdated
from sandboxes.agent.operations import AgentProcesses, FileOperation
from sandboxes.agent.protocol import OLDEST_VERSION, VERSION
from sandboxes.agent.runs import NotStarted
from sandboxes.failures import find_cause, needs_operator
from tests.lint.base import NO_BASE, REPO, find_base
from tests.support.sandbox_agent import AGENT, Gateway, build_shim, make_run
from tests.support.servers.services import skip_or_fail
from tests.support.waiting import wait_until

VERSION_LINE = f"VERSION = {VERSION}\n"


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@contextmanager
def running(program: Path, gateway: Gateway) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-I", "-S", program, gateway.path, build_shim()], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def copy_agent(target: Path, *, version: int) -> Path:
    """Copy the agent with another version of its protocol. Return its program."""
    for source in AGENT.parent.glob("*.py"):
        target.joinpath(source.name).write_text(source.read_text().replace(VERSION_LINE, f"VERSION = {version}\n"))
    assert f"VERSION = {version}\n" in (target / "connection.py").read_text()
    return target / AGENT.name


def operate(gateway: Gateway, *words: str, stdin: bytes) -> bytes:
    return b"".join(FileOperation(gateway.client, words, idle_timeout=20, check=lambda: None).run(io.BytesIO(stdin)))


@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, VERSION + 1])
def test_agent_of_a_version_that_is_not_spoken_is_named(gateway: Gateway, tmp_path: Path, version: int) -> None:
    with running(copy_agent(tmp_path, version=version), gateway):
        wait_until(lambda: gateway.gateway.read_counts()["outdated"], "the agent is refused")
        with pytest.raises(AgentOutdated, match=f"protocol {version}, not {OLDEST_VERSION} to {VERSION}"), gateway.connect():
            pass
        with pytest.raises(NotStarted) as refused:
            AgentProcesses(gateway.client, check=lambda: None).start("a", ["true"], {}, "/")
        assert (find_cause(refused.value), needs_operator(refused.value)) == ("agent_outdated", True)
    with running(AGENT, gateway):  # as after the sandbox has slept and woken
        assert gateway.boot()
        assert gateway.gateway.read_counts()["outdated"] == 0


def test_version_before_is_spoken() -> None:
    assert max(VERSION - 1, 2) == OLDEST_VERSION  # there was no release with version 1


def test_agent_that_has_not_connected_for_a_while_is_forgotten(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.gateway.note_outdated("gone", b"", "")
    assert gateway.gateway.read_counts()["outdated"] == 1
    monkeypatch.setattr("sandboxes.agent.gateway.OUTDATED_SECONDS", 0.0)
    assert gateway.gateway.read_counts()["outdated"] == 0


@pytest.mark.matrix("the agent of the last commit of the remote branch: for a release, and for a change of the protocol")
def test_agent_of_the_version_before_works(gateway: Gateway, tmp_path: Path) -> None:
    try:
        base = find_base()
    except ValueError as error:
        pytest.fail(str(error))
    if not base:
        skip_or_fail(NO_BASE)
    tree = subprocess.run(["git", "archive", base, "sandboxes/image"], cwd=REPO, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tree)) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "root").mkdir()
    with running(tmp_path / "sandboxes/image/agent/main.py", gateway):
        assert gateway.boot()
        result = gateway.client.run(make_run("run", "sh", "-c", "cat; exit 3", stdin=b"in"))
        assert (result.exit_code, result.stdout) == (3, b"in")
        operate(gateway, "write", str(tmp_path / "root"), stdin=b"f\0content")
        assert operate(gateway, "read", str(tmp_path / "root"), "10", stdin=b"f") == b"content"
        processes = AgentProcesses(gateway.client, check=lambda: None)
        processes.start("process", ["sh", "-c", "echo started; exec sleep 300"], {}, "/")
        assert processes.list_exit_codes(["process"]) == {"process": None}
        wait_until(lambda: processes.read_log("process", start=0, length=100) == (b"started\n", 8), "the output is kept")
        processes.send_signal("process", signal.SIGKILL)
        wait_until(lambda: processes.list_exit_codes(["process"]) == {"process": 137}, "it is killed")
