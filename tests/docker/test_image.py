"""Programs of the sandbox image that agents use."""

import pytest

from tests.docker.test_provider import Box, own_box, owner  # noqa: F401 - fixtures

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]


def test_a_virtual_environment_has_pip(own_box: Box) -> None:  # noqa: F811
    result = own_box.run("sh", "-c", "python3 -m venv v && v/bin/pip --version", seconds=120)
    assert (result.exit_code, result.stdout[:4]) == (0, b"pip "), result


def test_harness_is_the_same_in_all_environments(own_box: Box) -> None:  # noqa: F811
    listed = own_box.run("find", "/harness", "-printf", "%p %y %U %l\n").stdout.decode()
    assert sorted(listed.splitlines()) == [
        "/harness d 0 ",
        "/harness/bin d 0 ",
        "/harness/relay_watcher.py l 0 /opt/leasehold/relay_watcher.py",
        "/harness/skills l 0 /data/skills",
        "/harness/take_turn.py l 0 /opt/leasehold/take_turn.py",
    ]
    assert own_box.run("touch", "/harness/bin/x").exit_code != 0
    for shell in (["sh", "-c"], ["bash", "-lc"]):
        directories = own_box.run(*shell, "echo $PATH").stdout.decode().strip().split(":")
        assert directories[-2:] == ["/harness/bin", "/workspace/.home/.local/bin"]


def test_harness_has_the_turn_runner_and_the_skills_of_the_agent(own_box: Box) -> None:  # noqa: F811
    result = own_box.run("python3", "/harness/take_turn.py", stdin=b"[]")
    assert (result.exit_code, result.stderr) == (1, b"take_turn: the state on stdin is not a JSON object\n")
    install = "mkdir -p /data/skills/chess && echo Play. > /data/skills/chess/prompt.md"
    assert own_box.run("sh", "-c", install).exit_code == 0
    assert own_box.run("cat", "/harness/skills/chess/prompt.md").stdout == b"Play.\n"
