"""Restart of a container whose agent, process 1, does not respond."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from datetime import timedelta

import pytest

from sandboxes.agent.protocol import VERSION
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.errors import Unavailable
from tests.conftest import DOCKER_IMAGE, MINUTE
from tests.docker.test_provider import Box, docker, executor, own_box, owner  # noqa: F401 - fixtures
from tests.support.sandbox_agent import Gateway
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


@pytest.fixture
def image(owner: str) -> Iterator[str]:  # noqa: F811
    """Name of an image of the test, which is built with the agent of another version."""
    name = f"{owner}-image"
    source = f"""FROM {DOCKER_IMAGE}
USER root
RUN cd /opt/leasehold && sed -i 's/^VERSION = {VERSION}$/VERSION = {VERSION + 1}/' source/connection.py \\
 && grep -q '^VERSION = {VERSION + 1}$' source/connection.py \\
 && python3 -I -OO -c "import py_compile; py_compile.compile('source/connection.py', 'agent/connection.pyc', doraise=True)"
USER agent
"""
    subprocess.run(["docker", "build", "--tag", name, "-"], input=source.encode(), check=True, capture_output=True)
    yield name
    docker("rmi", "--force", name)


@pytest.mark.parametrize("executor", ["agent"], indirect=True)
def test_restart_replaces_an_agent_of_another_version_once_the_image_has_the_present_one(
    owner: str,  # noqa: F811
    agent_gateway: Gateway,
    image: str,
) -> None:
    provider = DockerProvider()
    ref = provider.create(SandboxSpec(owner, owner, image=image, memory_mib=128, pids=64, agent=agent_gateway.mount))
    box = Box(provider, ref, owner=owner)
    provider.wait_ready(ref, timeout=MINUTE)
    wait_until(lambda: provider.has_outdated_agent(ref), "the agent is refused")
    box.run("sh", "-c", "echo kept > /data/file; echo kept > file")  # by the engine
    first = docker("inspect", "-f", "{{.Id}}", ref)
    provider.restart(ref)
    provider.wait_ready(ref, timeout=MINUTE)
    assert docker("inspect", "-f", "{{.Id}}", ref) == first
    assert provider.has_outdated_agent(ref)  # the image has no other one
    with pytest.raises(Unavailable, match="agent is of another version"):
        provider.start(ref, ["true"], env={}, mark="process-1")

    docker("tag", DOCKER_IMAGE, image)
    provider.restart(ref)
    provider.wait_ready(ref, timeout=MINUTE)
    wait_until(lambda: provider.responds(ref, timeout=SHORT), "the present agent answers")
    assert not provider.has_outdated_agent(ref)
    assert docker("inspect", "-f", "{{.Id}}", ref) != first
    assert box.run("cat", "/data/file", "file").stdout == b"kept\nkept\n"
    assert provider.start(ref, ["true"], env={}, mark="process-2")
    assert [found.ref for found in provider.list(owner)] == [ref]
