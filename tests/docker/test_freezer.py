"""Freezer in the kernel: both versions of cgroups, the right container and no other, containers paused by the engine."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from sandboxes.providers.docker import freezer as freezer_module
from sandboxes.providers.docker import replacement
from sandboxes.providers.docker.freezer import Freezer, find_freezer
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.errors import Unavailable
from tests.docker.test_provider import Box, docker, own_box, owner  # noqa: F401 - fixtures
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]
ROOTS = {"freezer.state": Path("/sys/fs/cgroup/freezer"), "cgroup.freeze": Path("/sys/fs/cgroup/unified")}


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def container_id() -> str:
    return uuid4().hex + uuid4().hex


@pytest.fixture(params=ROOTS)
def cgroup(request: pytest.FixtureRequest, container_id: str, sleeper: "subprocess.Popen[bytes]") -> Iterator[Freezer]:
    """A cgroup of each version with one process. It is named like that of a container."""
    directory = ROOTS[request.param] / f"lh-test-{container_id}"
    if request.param == "cgroup.freeze" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
        directory = Path("/sys/fs/cgroup") / directory.name
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"{directory.parent}: {error}")
    (directory / "cgroup.procs").write_text(str(sleeper.pid))
    yield Freezer(directory / request.param)
    sleeper.kill()
    (directory / request.param).write_text({"freezer.state": "THAWED", "cgroup.freeze": "0"}[request.param])
    sleeper.wait()
    wait_until(lambda: not (directory / "cgroup.procs").read_text(), "the cgroup is empty")
    directory.rmdir()


def test_frozen_cgroup_runs_nothing_until_it_is_thawed(cgroup: Freezer) -> None:
    assert (cgroup.is_writable(), cgroup.is_frozen()) == (True, False)
    for _ in range(2):  # idempotent
        cgroup.freeze()
        assert cgroup.is_frozen()
    for _ in range(2):
        cgroup.thaw()
        assert not cgroup.is_frozen()


def test_cgroup_is_thawed_if_its_processes_do_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezer_module, "FREEZE_TIMEOUT_SECONDS", 0.01)
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    with pytest.raises(TimeoutError):
        Freezer(tmp_path / "cgroup.freeze").freeze()
    assert (tmp_path / "cgroup.freeze").read_text() == "0"


def test_only_the_cgroup_of_the_container_itself_is_found(sleeper: "subprocess.Popen[bytes]", container_id: str) -> None:
    assert find_freezer(sleeper.pid, container_id) is None  # a process id that was reused
    directory = ROOTS["freezer.state"] / container_id
    if not ROOTS["freezer.state"].exists():
        pytest.skip("cgroups of version 2")
    try:
        (directory / "part").mkdir(parents=True)
        (directory / "cgroup.procs").write_text(str(sleeper.pid))
        assert find_freezer(sleeper.pid, container_id) == Freezer(directory / "freezer.state")
        (directory / "part/cgroup.procs").write_text(str(sleeper.pid))
        assert find_freezer(sleeper.pid, container_id) is None
    finally:
        sleeper.kill()
        sleeper.wait()
        (directory / "part").rmdir()
        directory.rmdir()


def test_frozen_processes_of_a_removed_container_are_killed(
    cgroup: Freezer, sleeper: "subprocess.Popen[bytes]", container_id: str
) -> None:
    cgroup.freeze()
    replacement.kill_leftover_processes(container_id)
    assert sleeper.wait(60) == -9


def test_exec_in_a_container_paused_by_the_engine_and_thawed_without_it(own_box: Box) -> None:  # noqa: F811
    docker("pause", own_box.ref)
    assert own_box.provider.inspect(own_box.ref).suspended
    own_box.provider.resume(own_box.ref)
    found = own_box.provider.inspect(own_box.ref)
    assert (found.running, found.suspended) == (True, False)
    assert own_box.run("echo", "works").stdout == b"works\n"  # by the engine, which refuses to execute in a paused container


def test_process_without_rights_reports_a_container_frozen_by_another(
    own_box: Box, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    own_box.provider.suspend(own_box.ref)
    monkeypatch.setattr(Freezer, "is_writable", lambda self: False)
    with pytest.raises(Unavailable, match="more rights"):
        DockerProvider().resume(own_box.ref)
    assert DockerProvider().inspect(own_box.ref).suspended


def test_process_of_a_frozen_container_is_killed(own_box: Box) -> None:  # noqa: F811
    own_box.provider.start(own_box.ref, ["sleep", "300"], env={}, mark="m")
    own_box.provider.suspend(own_box.ref)
    own_box.provider.kill(own_box.ref, "m")
    assert not own_box.provider.inspect(own_box.ref).suspended  # it would end only when it is thawed
    assert "sleep 300" not in own_box.processes()
