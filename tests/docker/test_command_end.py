"""End of all commands of a container from outside, by the kernel and by a restart of the engine."""

import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest

from sandboxes.providers.docker import command_end
from sandboxes.providers.docker.freezer import Freezer
from tests.conftest import MINUTE
from tests.docker.test_provider import BOMB, Box, docker, executor, own_box, owner  # noqa: F401 - fixtures
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready", "executor")]
AGENT_ALONE = pytest.mark.parametrize("executor", ["agent"], indirect=True)


def start(box: Box, *argv: str) -> str:
    mark = uuid4().hex
    box.provider.start(box.ref, argv, env={}, mark=mark)
    return mark


def list_pids(box: Box) -> set[int]:
    """Return the processes of the container, as numbered here."""
    return {int(line.split()[0]) for line in docker("top", box.ref, "-eo", "pid").splitlines()[1:]}


def find_init(box: Box) -> int:
    return int(docker("inspect", "-f", "{{.State.Pid}}", box.ref))


@pytest.fixture
def by_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Freezer, "is_writable", lambda self: False)


def test_a_fork_bomb_and_its_orphans_end_and_process_1_goes_on(own_box: Box) -> None:  # noqa: F811
    init = find_init(own_box)
    own_box.run("sh", "-c", "echo kept > /data/file")
    start(own_box, "python3", "-c", BOMB)
    wait_until(lambda: len(list_pids(own_box)) > 30, "the bomb has spread")
    own_box.provider.kill_all(own_box.ref)
    assert list_pids(own_box) == {init}
    assert own_box.provider.read_file(own_box.ref, "/data/file", limit=10) == b"kept\n"
    assert own_box.run("cat", "/data/file").stdout == b"kept\n"


@AGENT_ALONE
def test_the_helper_is_left_alone_without_commands_and_killed_if_it_is_stopped(own_box: Box) -> None:  # noqa: F811
    provider, ref = own_box.provider, own_box.ref
    provider.write_file(ref, "/workspace/file", b"kept")
    before = list_pids(own_box)
    assert len(before) == 2
    provider.kill_all(ref)
    assert list_pids(own_box) == before
    [helper] = before - {find_init(own_box)}
    os.kill(helper, signal.SIGSTOP)
    wait_until(lambda: ") T " in Path(f"/proc/{helper}/stat").read_text(), "the helper is stopped")
    provider.kill_all(ref)
    assert list_pids(own_box) == {find_init(own_box)}
    assert provider.read_file(ref, "/workspace/file", limit=10) == b"kept"


@pytest.mark.usefixtures("by_engine")
def test_without_access_to_the_kernel_the_container_is_restarted_if_it_has_commands(own_box: Box) -> None:  # noqa: F811
    provider, ref, init = own_box.provider, own_box.ref, find_init(own_box)
    provider.write_file(ref, "/workspace/file", b"kept")
    provider.kill_all(ref)
    assert find_init(own_box) == init
    start(own_box, "sleep", "1000")
    provider.kill_all(ref)
    assert find_init(own_box) != init
    provider.wait_ready(ref, timeout=MINUTE)
    assert provider.processes(ref, [uuid4().hex]) == {}
    assert provider.read_file(ref, "/workspace/file", limit=10) == b"kept"


@pytest.mark.usefixtures("by_engine")
def test_a_process_that_ends_between_two_looks_of_the_engine_causes_no_restart(
    own_box: Box,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a fork of the helper does that has answered."""
    looks, init = iter([True, False]), find_init(own_box)
    monkeypatch.setattr(command_end, "kill_commands", lambda cgroup: False)  # it has seen that process
    monkeypatch.setattr(type(own_box.provider), "_has_commands", lambda self, ref: next(looks))
    own_box.provider.kill_all(own_box.ref)
    assert find_init(own_box) == init and next(looks, None) is None


def test_a_stopped_container_has_no_commands_and_stays_stopped(own_box: Box) -> None:  # noqa: F811
    docker("stop", "-t", "0", own_box.ref)
    own_box.provider.kill_all(own_box.ref)
    assert docker("inspect", "-f", "{{.State.Running}}", own_box.ref).strip() == "false"


def test_a_suspended_container_is_running_afterwards_if_it_had_commands(own_box: Box) -> None:  # noqa: F811
    start(own_box, "sleep", "1000")
    own_box.provider.suspend(own_box.ref)
    own_box.provider.kill_all(own_box.ref)
    own_box.provider.resume(own_box.ref)
    assert own_box.run("echo", "on", seconds=20).stdout == b"on\n"
