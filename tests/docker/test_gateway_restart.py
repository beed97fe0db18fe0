"""Commands that the agent executes while the gateway or its container is started again."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sandboxes.providers.docker.provider import DockerProvider
from tests.docker.test_provider import Box, docker, own_box, owner  # noqa: F401 - fixtures
from tests.support.sandbox_agent import Gateway
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]


def test_restart_before_a_command_is_sent_does_not_end_it_when_the_gateway_starts_again(
    own_box: Box, agent_gateway: Gateway, settings: Any, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Another call may start a stopped container between the beginning of this call and its request to the agent."""
    settings.AGENT_GATEWAY = agent_gateway.client_path
    find_agent = DockerProvider._find_agent

    def restart_first(self: DockerProvider, ref: str) -> Any:
        monkeypatch.setattr(DockerProvider, "_find_agent", find_agent)
        docker("restart", "-t", "1", ref)
        agent = find_agent(self, ref)
        assert agent is not None
        with agent.open(20.0):
            return agent

    monkeypatch.setattr(DockerProvider, "_find_agent", restart_first)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(own_box.run, "sh", "-c", "touch begun; until [ -e go ]; do sleep 0.05; done; exit 3")
        wait_until(lambda: is_file(own_box.ref, "begun"), "the command runs")
        agent_gateway.stop()
        agent_gateway.start()
        docker("exec", own_box.ref, "touch", "/workspace/go")
        assert running.result().exit_code == 3


def is_file(ref: str, name: str) -> bool:
    return subprocess.run(["docker", "exec", ref, "test", "-e", f"/workspace/{name}"]).returncode == 0
