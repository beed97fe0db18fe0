"""Agents that reach the gateway over TLS: join, session, revocation and limits, with the agent as a process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leases.models import Lease
from sandboxes.models import GatewayToken
from tests.support.remote_agent import connect, issue_token, running_agent, serving_gateway, write_gateway_file
from tests.support.sandbox_agent import make_run
from tests.support.servers import ports
from tests.support.servers.egress import EventLoopThread
from tests.support.servers.tls import TlsFiles, create_certificates

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return create_certificates(tmp_path_factory.mktemp("tls"), "localhost", "127.0.0.1")


@pytest.fixture
def port() -> int:
    [port] = ports.find_free_ports()
    return port


def test_agent_joins_over_tls_and_runs_commands(
    grant: Callable[..., Lease], loop: EventLoopThread, port: int, files: TlsFiles, tmp_path: Path
) -> None:
    lease = grant()
    token = issue_token(lease)
    gateway_file = write_gateway_file(tmp_path, f"https://localhost:{port}", token, files.authority)
    with serving_gateway(loop, port, files), running_agent(gateway_file):
        client = connect(lease)
        result = client.run(make_run("r1", "sh", "-c", "head -c 300000 /dev/zero; echo error >&2; exit 3"))
        assert (result.exit_code, len(result.stdout), result.stderr) == (3, 300_000, b"error\n")
        assert client.run(make_run("r1", "true")).exit_code == 3  # known: not started again
        content = bytes(range(256)) * 4000
        assert client.run(make_run("r2", "cat", stdin=content, cap=1 << 21)).stdout == content
    [row] = GatewayToken.objects.all()
    assert row.joined_at and row.refused_joins == 0 and row.session_sha256
