"""The bridge by itself: what comes in at one end goes out at the other, at once."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ports
from tests.support.waiting import wait_until

BRIDGE = Path(__file__).resolve().parents[3] / "sandboxes" / "image" / "bridge.py"
TURNS = 60
QUICK = 0.035  # seconds, which a busy machine may miss now and then


@pytest.fixture
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A socket behind which each line is answered by two small writes."""
    path = tmp_path_factory.mktemp("b") / "far.sock"
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(path))
    door.listen()

    def answer() -> None:
        one, _ = door.accept()
        with one, one.makefile("rb") as lines:
            for _ in lines:
                one.sendall(b"first ")
                time.sleep(0.002)  # so that the bridge reads it before the second is there
                one.sendall(b"second\n")

    threading.Thread(target=answer, daemon=True).start()
    yield path
    door.close()


@pytest.fixture
def near(far: Path) -> Iterator[socket.socket]:
    [port] = ports.find_free_ports()
    process = subprocess.Popen([sys.executable, str(BRIDGE), str(port), str(far)])

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


def test_the_second_of_two_small_writes_does_not_wait_for_the_first_to_be_acknowledged(near: socket.socket) -> None:
    """That is 40 ms on Linux once a connection is an answer old: for each event of a stream."""
    took: list[float] = []
    with near.makefile("rb") as lines:
        for _ in range(TURNS):
            began = time.monotonic()
            near.sendall(b"go\n")
            assert lines.readline() == b"first second\n"
            took.append(time.monotonic() - began)
    assert len([each for each in took if each < QUICK]) > TURNS / 4
