"""Wait of `manage.py up` for its database and its Docker daemon."""

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection

from controlplane import startup
from sandboxes.hosts import registry
from tests.commands.manage import MANAGE, build_environment
from tests.support.waiting import wait_until

REFUSALS = {
    'connection failed: FATAL:  password authentication failed for user "leasehold"': True,
    'connection failed: FATAL:  database "leasehold" does not exist': True,
    "connection failed: FATAL:  the database system is starting up": False,
    "connection failed: FATAL:  the database system is shutting down": False,
    "connection failed: FATAL:  the database system is not yet accepting connections": False,
    "connection failed: FATAL:  sorry, too many clients already": False,
    "connection failed: connection to server at 127.0.0.1, port 5432 failed: Connection refused": False,
    "failed to resolve host 'db': [Errno -3] Temporary failure in name resolution": False,
}


def test_wait_reports_at_once_and_then_every_half_minute() -> None:
    problems, lines, time = iter(["away"] * 61 + [""]), list[str](), [0.0]

    def sleep(seconds: float) -> None:
        time[0] += seconds

    startup.wait_for("the database", lambda: next(problems), print_line=lines.append, sleep=sleep, clock=lambda: time[0])
    assert lines == ["waiting for the database: away"] * 3 + ["the database responds"]
    startup.wait_for("the database", lambda: "", print_line=lines.append, sleep=sleep)
    assert len(lines) == 4


@pytest.mark.parametrize(("message", "is_lasting"), REFUSALS.items())
def test_refusals_that_do_not_pass_end_the_wait(monkeypatch: pytest.MonkeyPatch, message: str, is_lasting: bool) -> None:
    def refuse() -> None:
        raise OperationalError(message)

    monkeypatch.setattr(connection, "cursor", refuse)
    monkeypatch.setattr(startup.connections, "close_all", lambda: None)
    if is_lasting:
        with pytest.raises(OperationalError):
            startup.find_database_problem()
    else:
        assert startup.find_database_problem() == message


@pytest.mark.parametrize(
    ("provider", "needs_engine", "engines", "waits"),
    [
        ("docker", True, '{"docker": "E"}', True), ("docker", False, "{}", True), ("docker", False, '{"docker": "E"}', False),
        ("process", True, "{}", False),
    ],
)  # fmt: skip
def test_daemon_is_needed_for_its_image_and_by_a_new_host(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, needs_engine: bool, engines: str, waits: bool
) -> None:
    settings.ON_POSTGRES, settings.SANDBOX_PROVIDER, settings.STATE_DIR = False, provider, tmp_path
    (tmp_path / registry.ENGINES_FILE).write_text(engines)
    waited: list[str] = []
    monkeypatch.setattr(startup, "wait_for", lambda name, find_problem, **options: waited.append(name))
    startup.wait_for_services(print_line=waited.append, needs_engine=needs_engine)
    assert waited == ["the Docker daemon"] * waits


def test_up_waits_for_a_database_and_ends_at_once_on_sigterm(tmp_path: Path) -> None:
    """The daemon is away as well: `up` speaks of the database first."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        environment = build_environment(
            tmp_path, DATABASE_URL=f"postgres://u:p@127.0.0.1:{unused.getsockname()[1]}/x", SANDBOX_PROVIDER="docker",
            DOCKER_HOST=f"unix://{tmp_path}/docker.sock",
        )  # fmt: skip
        with (tmp_path / "log").open("wb") as log:
            up = subprocess.Popen([sys.executable, str(MANAGE), "up", "--initialize"], env=environment, stdout=log, stderr=log)
        try:
            wait_until(lambda: "waiting for the database" in (tmp_path / "log").read_text() or up.poll() is not None, "waits")
            assert up.poll() is None
            up.send_signal(signal.SIGTERM)
            assert up.wait(timeout=60) == -signal.SIGTERM
        finally:
            up.kill()
            up.wait()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1 and "Connection refused" in lines[0] and "Docker" not in lines[0]


def test_up_waits_for_the_daemon_of_its_image(tmp_path: Path) -> None:
    environment = build_environment(tmp_path, SANDBOX_PROVIDER="docker", DOCKER_HOST=f"unix://{tmp_path}/docker.sock")
    with (tmp_path / "log").open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, str(MANAGE), "up", "--initialize"], env=environment, stdout=log, stderr=log,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in a job of a shell
        )  # fmt: skip
    try:
        wait_until(lambda: "waiting for the Docker daemon" in (tmp_path / "log").read_text() or up.poll() is not None, "waits")
        assert up.poll() is None
        up.send_signal(signal.SIGINT)
        assert up.wait(timeout=60) == 130
    finally:
        up.kill()
        up.wait()
    [line] = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("up: waiting for the Docker daemon: Docker is unavailable")
