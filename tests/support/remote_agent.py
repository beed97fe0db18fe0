"""The sandbox agent as a process that reaches the gateway over TLS, and the gateway in an event loop of this process."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from django.db import connection
from django.utils import timezone

from leases.models import Lease
from sandboxes.agent import addresses
from sandboxes.agent.runs import AgentClient
from sandboxes.egress import gateway_tokens
from sandboxes.egress.server import EgressServer, GatewayListener
from sandboxes.models import Sandbox
from tests.commands.manage import MANAGE, build_environment, get_runtime_dir
from tests.support.leases import run
from tests.support.sandbox_agent import AGENT, build_shim
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.tls import TlsFiles
from tests.support.waiting import wait_until


@contextmanager
def serving_gateway(
    loop: EventLoopThread, port: int, files: TlsFiles, internal: TlsFiles | None = None, *, host: str = "127.0.0.1"
) -> Iterator[EgressServer]:
    """Serve the gateway over TLS, and with `internal` its internal port, too."""
    server, listener = EgressServer(), GatewayListener(host, port, str(files.certificate), str(files.key))
    if internal:
        listener = replace(listener, internal_certificate=str(internal.certificate), internal_key=str(internal.key))
    with loop.run_context(server.listening({}, listener)):
        yield server


def issue_token(lease: Lease) -> str:
    """Start the sandbox of a lease, and return a join token for it."""
    run(lease)
    return gateway_tokens.issue_for_join(Sandbox.objects.get(holder=lease.pk), now=timezone.now())


def write_gateway_file(directory: Path, url: str, token: str, authority: Path | None) -> Path:
    """Write the file that names the gateway to an agent."""
    path = directory / "gateway.json"
    path.write_text(json.dumps({"url": url, "token": token, "ca": authority.read_text() if authority else ""}))
    return path


@contextmanager
def running_agent(gateway_file: Path, *bridges: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the agent as a process of this machine. `bridges` are pairs of a port and its upstream."""
    agent = subprocess.Popen(
        [sys.executable, "-I", "-S", AGENT, str(gateway_file), build_shim(), *bridges], start_new_session=True
    )
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait(10)


def connect(lease: Lease) -> AgentClient:
    """Return a client for the agent of a lease's sandbox, once the agent answers."""
    client = AgentClient(addresses.get_routed_gateway(), Sandbox.objects.get(holder=lease.pk).ref)
    wait_until(lambda: client.responds(timeout=2.0), "the agent answers", within=10.0)
    return client


class Balancer:
    """TCP proxy in front of several gateways: each connection goes to the first one that accepts it."""

    def __init__(self, *ports: int) -> None:
        self.ports, self._clients = [*ports], set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """End all connections."""
        for client in [*self._clients]:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        self._clients.add(client)
        with client, suppress(OSError):
            if server := self._connect():
                with server:
                    forward = threading.Thread(target=_copy, args=(client, server), daemon=True)
                    forward.start()
                    _copy(server, client)
                    forward.join()
        self._clients.discard(client)

    def _connect(self) -> socket.socket | None:
        for port in self.ports:
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", port), timeout=5)
        return None


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        source.settimeout(None)
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def running_gateway(home: Path, port: int, files: TlsFiles) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `manage.py egress` as on a machine of its own, on the database of the tests, and kill it at the end."""
    home.mkdir()
    environment = build_environment(
        home,
        DATABASE_URL=build_database_url(),
        LEASEHOLD_EGRESS_SLOTS="1",
        LEASEHOLD_GATEWAY_LISTEN=f"127.0.0.1:{port}",
        LEASEHOLD_GATEWAY_CERTIFICATE=str(files.certificate),
        LEASEHOLD_GATEWAY_CERTIFICATE_KEY=str(files.key),
        LEASEHOLD_LOG_LEVEL="WARNING",
    )
    process = subprocess.Popen(
        [sys.executable, MANAGE, "egress", "--proxy", "none"], env=environment, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        shutil.rmtree(get_runtime_dir(home), ignore_errors=True)


def build_database_url() -> str:
    """Return the URL of the database of this process, for another one."""
    name = str(connection.settings_dict["NAME"])
    return f"sqlite:///{name}" if connection.vendor == "sqlite" else f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{name}"


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
