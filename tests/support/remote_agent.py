"""The sandbox agent as a process that reaches the gateway over TLS, and the gateway in an event loop of this process."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.utils import timezone

from leases.models import Lease
from sandboxes.agent import addresses
from sandboxes.agent.runs import AgentClient
from sandboxes.egress import gateway_tokens
from sandboxes.egress.server import EgressServer, GatewayListener
from sandboxes.models import Sandbox
from tests.support.leases import run
from tests.support.sandbox_agent import AGENT, build_shim
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.tls import TlsFiles
from tests.support.waiting import wait_until


@contextmanager
def serving_gateway(loop: EventLoopThread, port: int, files: TlsFiles) -> Iterator[EgressServer]:
    """Serve the gateway on a port of 127.0.0.1, over TLS."""
    server = EgressServer()
    with loop.run_context(server.listening({}, GatewayListener("127.0.0.1", port, str(files.certificate), str(files.key)))):
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
