"""image/agent/bridge.py in the agent's process: bytes are copied in both directions without delay."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import ports
from tests.support.waiting import wait_until

AGENT = Path(__file__).resolve().parents[4] / "sandboxes" / "image" / "agent" / "main.py"
TURNS = 60
QUICK = 0.035  # seconds; a busy machine may exceed it occasionally


@pytest.fixture
def upstream_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Unix socket server that answers each line by two small writes."""
    path = tmp_path_factory.mktemp("b") / "upstream_path.sock"
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(path))
    door.listen()

    def answer() -> None:
        one, _ = door.accept()
        with one, one.makefile("rb") as lines:
            for _ in lines:
                one.sendall(b"first ")
                time.sleep(0.002)  # the bridge reads the first write before the second
                one.sendall(b"second\n")

    threading.Thread(target=answer, daemon=True).start()
    yield path
    door.close()


@pytest.fixture
def client(upstream_path: Path) -> Iterator[socket.socket]:
    [port] = ports.find_free_ports()
    process = subprocess.Popen([sys.executable, "-I", "-S", AGENT, "/no/gateway", "/no/shim", str(port), upstream_path])

    def connected() -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except OSError:
            return None

    try:
        connection = wait_until(connected, "the bridge listens")
        assert connection is not None
        with connection:
            yield connection
    finally:
        process.kill()
        process.wait(20)


def test_second_small_write_does_not_wait_for_an_acknowledgement(client: socket.socket) -> None:
    """Delayed acknowledgements would add 40 ms to each event of a stream on Linux."""
    took: list[float] = []
    with client.makefile("rb") as lines:
        for _ in range(TURNS):
            began = time.monotonic()
            client.sendall(b"go\n")
            assert lines.readline() == b"first second\n"
            took.append(time.monotonic() - began)
    assert len([each for each in took if each < QUICK]) > TURNS / 4
