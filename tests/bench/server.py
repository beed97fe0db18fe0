"""Servers and clients of the benchmarks: a separate control plane, a minimal API client, raw Docker Engine calls."""

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.servers.ports import find_free_ports
from tests.support.waiting import wait_until

REPO_DIR = Path(__file__).resolve().parents[2]


@contextmanager
def run_control_plane(
    *, with_worker: bool = False, settings_module: str = "controlplane.settings"
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Run `manage.py up`, by default without the queue worker. Yield its process and its port."""
    [port] = find_free_ports()
    argv = [sys.executable, str(REPO_DIR / "manage.py"), "up", "--port", str(port)] + ["--no-worker"] * (not with_worker)
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": settings_module}
    up = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=environment)
    try:
        _wait_for(port, up)
        yield up, port
    finally:
        up.terminate()
        up.wait(60)


def _wait_for(port: int, up: "subprocess.Popen[bytes]") -> None:
    def responds() -> bool:
        if up.poll() is not None:
            raise SystemExit("The control plane did not start.")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except OSError:
            return False

    wait_until(responds, "the control plane responds")


class ApiClient:
    """API client with one key on a persistent connection. Each request is one send, to keep the client's own cost low."""

    def __init__(self, port: int, key: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=300)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.key = key

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(json.loads(self.calls(path, body)()))

    def calls(self, path: str, body: dict[str, Any] | None = None) -> Callable[[], bytes]:
        """Return a function that repeats one POST and returns the response body."""
        content = json.dumps(body).encode() if body else b""
        request = self.build_request("POST", f"/api/v1{path}", content)

        def call() -> bytes:
            return self._send(request, path).read()

        return call

    def get(self, path: str) -> http.client.HTTPResponse:
        """Send one GET and return the response with its body unread. Read the body before the next request."""
        return self._send(self.build_request("GET", f"/api/v1{path}"), path)

    def build_request(self, method: str, path: str, content: bytes = b"") -> bytes:
        header = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return header.encode() + content

    def _send(self, request: bytes, path: str) -> http.client.HTTPResponse:
        self.socket.sendall(request)
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        if response.status >= 400:
            raise SystemExit(f"{path}: {response.status} {response.read()[:300]!r}")
        return response


class FirstByte:
    """Reads responses up to their first byte and, apart from that, to their end. `size` is checked if given."""

    def __init__(self, open_response: Callable[[], http.client.HTTPResponse], size: int | None = None) -> None:
        self._open, self._size = open_response, size

    def receive(self, number: int) -> None:
        self._response = self._open()
        assert self._response.read(1)

    def drain(self, number: int) -> None:
        remaining = len(self._response.read())
        assert self._size is None or remaining == self._size - 1, remaining

    def read_all(self) -> None:
        self.receive(0)
        self.drain(0)


class _UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("/var/run/docker.sock")


def connect_engine() -> http.client.HTTPConnection:
    return _UnixConnection("localhost")


def call_engine(method: str, path: str, body: dict[str, Any] | None = None, *, archive: bytes = b"") -> bytes:
    """Send one request to the Docker Engine, with a JSON body or a tar."""
    connection = connect_engine()
    content: bytes | str | None = archive or (json.dumps(body) if body is not None else None)
    content_type = "application/x-tar" if archive else "application/json"
    connection.request(method, path, content, {"Content-Type": content_type})
    try:
        response = connection.getresponse()
        body_text = response.read()
        if response.status >= 400:
            raise SystemExit(f"{method} {path}: {response.status} {body_text[:300]!r}")
        return body_text
    finally:
        connection.close()


def start_raw_container(name: str, image: str) -> None:
    """Create and start a container like a sandbox, with the minimum of engine calls."""
    limits = {"Memory": 512 << 20, "MemorySwap": 512 << 20, "NanoCpus": 10**9, "PidsLimit": 256}
    hardened = {"NetworkMode": "none", "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges:true"], "Init": True}
    config = {"Image": image, "Entrypoint": ["sleep", "infinity"], "User": "10001:10001", "WorkingDir": "/workspace"}
    logs = {"LogConfig": {"Type": "none"}, "IpcMode": "private", "CgroupnsMode": "private"}
    call_engine("POST", f"/containers/create?name={name}", {**config, "HostConfig": {**limits, **hardened, **logs}})
    call_engine("POST", f"/containers/{name}/start")


def exec_raw(name: str, argv: list[str]) -> int:
    """Run a command with the minimum of engine calls: create the exec, start it and read its output, inspect it."""
    exec_config = {"Cmd": argv, "AttachStdout": True, "AttachStderr": True, "User": "10001:10001"}
    exec_id = json.loads(call_engine("POST", f"/containers/{name}/exec", exec_config))["Id"]
    call_engine("POST", f"/exec/{exec_id}/start", {"Detach": False, "Tty": False})
    return int(json.loads(call_engine("GET", f"/exec/{exec_id}/json"))["ExitCode"])


def destroy_raw_container(name: str) -> None:
    call_engine("DELETE", f"/containers/{name}?force=1&v=1")
