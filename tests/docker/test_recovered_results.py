"""Results of commands whose end the control plane could not record, obtained from the agent in a container."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from sandboxes.providers.command_results import ExecState
from tests.conftest import MINUTE
from tests.docker.test_provider import Box, own_box, owner  # noqa: F401 - fixtures
from tests.support.sandbox_agent import Gateway

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]


def test_the_agent_gives_the_result_of_a_command_and_the_time_of_its_end(
    own_box: Box, agent_gateway: Gateway, settings: Any  # noqa: F811
) -> None:  # fmt: skip
    settings.AGENT_GATEWAY = agent_gateway.client_path
    provider, mark = own_box.provider, uuid4().hex
    script = "echo run >> log; echo out; echo err >&2; exit 7"
    argv: list[str] = ["sh", "-c", script]
    provider.exec(own_box.ref, argv, env={}, timeout=MINUTE, mark=mark, retain=True)
    ended = datetime.now(UTC)
    own_box.run("sleep", "0.5")
    asked = datetime.now(UTC)  # the age is that of a later moment
    state = provider.find_exec(own_box.ref, mark)
    assert isinstance(state, ExecState) and state.result is not None and state.age is not None
    assert (state.result.exit_code, state.result.stdout, state.result.stderr) == (7, b"out\n", b"err\n")
    assert timedelta(seconds=0.5) <= state.age
    assert asked - state.age <= ended
    assert provider.read_file(own_box.ref, "/workspace/log", limit=100) == b"run\n"
