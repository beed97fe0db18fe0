"""Programs of the sandbox image that agents use."""

import pytest

from tests.docker.test_provider import Box, own_box, owner  # noqa: F401 - fixtures

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]


def test_a_virtual_environment_has_pip(own_box: Box) -> None:  # noqa: F811
    result = own_box.run("sh", "-c", "python3 -m venv v && v/bin/pip --version", seconds=120)
    assert (result.exit_code, result.stdout[:4]) == (0, b"pip "), result
