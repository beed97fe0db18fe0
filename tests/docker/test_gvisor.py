"""Docker sandboxes under gVisor, beyond the conformance suite."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.errors import TooLarge
from tests.conftest import DOCKER_IMAGE, MINUTE
from tests.docker.test_sealed import Cell
from tests.support.servers.services import require_gvisor

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory with the socket of an echo server."""
    directory = tmp_path_factory.mktemp("s")
    directory.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "llm.sock"))
        (directory / "llm.sock").chmod(0o666)
        listener.listen()

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"you said " + connection.recv(100))

        threading.Thread(target=answer, daemon=True).start()
        yield directory
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def cell(docker_ready: None, sockets: Path) -> Iterator[Cell]:
    runtime = require_gvisor()
    provider, name = DockerProvider(), f"lhs-{uuid4().hex[:16]}"
    try:
        made = Cell(provider, provider.create(SandboxSpec(name, name, image=DOCKER_IMAGE, sockets=sockets, runtime=runtime)))
        provider.wait_ready(made.ref, timeout=MINUTE)
        yield made
    finally:
        provider.destroy(name)


def test_kernel_is_gvisor_and_tools_work(cell: Cell) -> None:
    assert cell.run("uname", "-r").stdout.decode().strip() != os.uname().release
    commit = "git init -q g; cd g; echo a > a; git add a; git commit -qm one; git log --format=%s"
    assert cell.run("sh", "-ec", f"python3 -c 'import sqlite3, ssl'; {commit}").stdout == b"one\n"


def test_only_the_mounted_socket_is_reachable(cell: Cell) -> None:
    ask = "s = socket.socket(socket.AF_UNIX); s.connect('/run/leasehold/llm.sock'); s.send(b'hi'); print(s.recv(99))"
    assert cell.run("python3", "-c", f"import socket; {ask}").stdout == b"b'you said hi'\n"
    out = cell.run("python3", "-c", "import socket; socket.create_connection(('1.1.1.1', 443), 2)")
    assert b"OSError" in out.stderr
    assert cell.run("python3", "-c", "import socket; print(socket.if_nameindex())").stdout in (b"[(1, 'lo')]\n", b"[]\n")


def test_root_is_read_only(cell: Cell) -> None:
    assert "ro" in cell.run("cat", "/proc/mounts").stdout.decode().splitlines()[0].split()[3].split(",")
    assert cell.run("sh", "-c", "echo x > /etc/x").exit_code != 0


def test_a_read_beyond_its_limit_ends_no_other_command(cell: Cell) -> None:
    cell.run("sh", "-c", "head -c 40000000 /dev/zero > /data/zeros")
    mark = uuid4().hex
    cell.provider.start(cell.ref, ["sleep", "300"], env={}, mark=mark)
    with pytest.raises(TooLarge):
        b"".join(cell.provider.get_files(cell.ref, "/data", max_bytes=1 << 20))
    assert cell.provider.processes(cell.ref, [mark])[mark].running


def test_a_suspended_sandbox_uses_no_cpu_time(cell: Cell) -> None:
    cell.provider.suspend(cell.ref)
    before = cell.provider.stats(cell.ref)
    assert before and cell.provider.inspect(cell.ref).suspended
    after = cell.provider.stats(cell.ref)
    assert after and after.cpu_micros == before.cpu_micros
    assert cell.run("true").exit_code == 0
