"""Restart of a container whose agent, process 1, does not respond."""

import contextlib
import os
import signal
from datetime import timedelta

import pytest

from sandboxes.providers.errors import Unavailable
from tests.conftest import MINUTE
from tests.docker.test_provider import Box, docker, executor, own_box, owner  # noqa: F401 - fixtures
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready", "executor")]
SHORT = timedelta(seconds=1)
FORK_BOMB = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.1)
"""


@pytest.mark.parametrize("executor", ["agent"], indirect=True)
def test_only_a_hung_agent_is_unresponsive_and_its_container_works_after_a_restart(own_box: Box) -> None:  # noqa: F811
    provider, ref = own_box.provider, own_box.ref
    own_box.run("sh", "-c", "echo kept > /data/file")
    assert provider.find_unresponsive([ref], timeout=MINUTE) == set()
    provider.suspend(ref)
    assert provider.find_unresponsive([ref], timeout=SHORT) == set()
    provider.resume(ref)
    os.kill(int(docker("inspect", "-f", "{{.State.Pid}}", ref)), signal.SIGSTOP)
    assert provider.find_unresponsive([ref], timeout=SHORT) == {ref}
    provider.restart(ref)
    provider.wait_ready(ref, timeout=MINUTE)
    assert provider.read_file(ref, "/data/file", limit=10) == b"kept\n"
    assert own_box.run("cat", "/data/file").stdout == b"kept\n"
    assert provider.find_unresponsive([ref], timeout=MINUTE) == set()


@pytest.mark.parametrize("executor", ["agent"], indirect=True)
def test_fork_bomb_left_by_a_finished_command_ends_with_a_restart(own_box: Box) -> None:  # noqa: F811
    """The bomb takes every process that the limit allows, so no further command starts."""
    provider, ref = own_box.provider, own_box.ref
    own_box.run("sh", "-c", "echo kept > /data/file")
    with contextlib.suppress(Unavailable):
        own_box.run("python3", "-c", FORK_BOMB)
    wait_until(lambda: len(docker("top", ref).splitlines()) > 50, "the bomb has spread")
    provider.restart(ref)
    provider.wait_ready(ref, timeout=MINUTE)
    assert own_box.run("cat", "/data/file").stdout == b"kept\n"
    counted = own_box.run("sh", "-c", "ls -d /proc/[0-9]* | wc -l")
    assert int(counted.stdout) < 10
