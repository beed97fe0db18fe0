"""Bodies above their limit, against the web server as manage.py up starts it."""

import http.client
import json
import socket
from contextlib import closing

import pytest

from tests.commands.manage import run_manage
from tests.e2e.conftest import HEALTHY, Home

pytestmark = pytest.mark.e2e
BLOCK = b" " * (1 << 16)
MAX_BODY_BYTES = {
    ("POST", "exec"): 16 << 20, ("PUT", "files/a"): 64 << 20, ("PUT", "artifacts/a"): 64 << 20, ("POST", "chat"): 256 << 10,
    ("PUT", "sessions/s"): 64 << 10, ("POST", "renew"): 64 << 10,
}  # fmt: skip
EXCESS_BYTES = 3 << 20  # more than the socket buffers hold


class Connection:
    """Persistent HTTP connection that sends a whole request before it reads, as most clients do."""

    def __init__(self, port: int, key: str) -> None:
        self.socket, self.key = socket.create_connection(("127.0.0.1", port), timeout=HEALTHY), key

    def send(self, method: str, path: str, *headers: str) -> None:
        lines = [f"{method} /api/v1/{path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {self.key}", *headers]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def send_body(self, size: int, *, chunked: bool) -> None:
        for begin in range(0, size, len(BLOCK)):
            part = BLOCK[: size - begin]
            self.socket.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        if chunked:
            self.socket.sendall(b"0\r\n\r\n")

    def read(self) -> tuple[int, str, dict[str, object]]:
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        return response.status, response.headers["Content-Type"], json.loads(response.read())


@pytest.fixture
def lease_and_key(home: Home) -> tuple[str, str]:
    home.up("--no-worker")
    lease = home.acquire_lease()
    return lease, json.loads(run_manage(home.path, "create_key", "--agent", "did:plc:ada", "--json").stdout)["key"]


def test_a_body_above_its_limit_is_answered_413_and_the_connection_stays_open(
    home: Home, lease_and_key: tuple[str, str]
) -> None:
    lease, key = lease_and_key
    for (method, path), limit in MAX_BODY_BYTES.items():
        for chunked in (False, True):
            connection, size = Connection(home.port, key), limit + EXCESS_BYTES
            with closing(connection.socket):
                length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
                connection.send(method, f"leases/{lease}/{path}", "Content-Type: application/json", length)
                connection.send_body(size, chunked=chunked)
                status, kind, problem = connection.read()
                assert (status, kind, problem["code"]) == (413, "application/problem+json", "too_large")
                connection.send("GET", f"leases/{lease}")
                assert connection.read()[0] == 200

    # A client that waits for "100 Continue" sends no body. A body without end is not read to its end.
    for header in ("Expect: 100-continue", "X-Ignored: 1"):
        connection = Connection(home.port, key)
        with closing(connection.socket):
            connection.send("PUT", f"leases/{lease}/files/a", f"Content-Length: {1 << 30}", header)
            assert connection.read()[0] == 413

    assert run_manage(home.path, "release", lease).returncode == 0
    connection, size = Connection(home.port, key), 10 << 20
    with closing(connection.socket):
        connection.send("PUT", f"leases/{lease}/files/a", f"Content-Length: {size}")
        connection.send_body(size, chunked=False)
        assert connection.read()[0] == 410
