"""Agents that reach the gateway over TLS: join, session, revocation and limits, with the agent as a process."""

import json
import math
import signal
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.utils import timezone

from leases import leasing
from leases.models import Lease
from leases.stream_server.agent_link import AgentLink
from sandboxes.agent import internal, protocol, runs
from sandboxes.agent.addresses import AgentLocation, GatewayDown, RoutedGateway
from sandboxes.agent.client import AgentConnection, AgentOutdated, NotConnected
from sandboxes.agent.internal import GatewayTrust
from sandboxes.agent.operations import RepeatingConnection
from sandboxes.agent.runs import AgentClient, AgentResult, NotStarted
from sandboxes.egress import gateway_tokens, public_listener
from sandboxes.egress.agent_sessions import routes
from sandboxes.egress.agent_sessions import server as session_server
from sandboxes.egress.server import EgressServer
from sandboxes.failures import find_cause, needs_operator
from sandboxes.hosts import agent_routes
from sandboxes.models import AgentRoute, GatewayToken, LlmCall, Sandbox
from sandboxes.providers.errors import Missing
from sandboxes.sweeps import passes
from tests.egress.stack import run_in_thread
from tests.support.leases import get_sandbox
from tests.support.remote_agent import (
    Balancer,
    connect,
    is_listening,
    issue_token,
    running_agent,
    running_gateway,
    serving_gateway,
    write_gateway_file,
)
from tests.support.sandbox_agent import make_run
from tests.support.servers import ports
from tests.support.servers.egress import COMPLETION_REQUEST, COMPLETION_RESPONSE, EventLoopThread, FakeUpstream
from tests.support.servers.tls import TlsFiles, create_certificates
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
DIGEST = "0123456789abcdef" * 4


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


@pytest.fixture
def server(loop: EventLoopThread, port: int, files: TlsFiles) -> Iterator[EgressServer]:
    with serving_gateway(loop, port, files) as server:
        yield server


@pytest.fixture
def start(port: int, files: TlsFiles, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Start the agent of a lease's sandbox, and return the file that names the gateway: start(lease, *bridges, host, port)."""
    with ExitStack() as agents:

        def start_agent(lease: Lease, *bridges: str, host: str = "127.0.0.1", port: int = port) -> Path:
            path = write_gateway_file(tmp_path, f"https://{host}:{port}", issue_token(lease), files.authority)
            agents.enter_context(running_agent(path, *bridges))
            return path

        yield start_agent


def test_agent_joins_over_tls_and_runs_commands(lease: Lease, server: EgressServer, start: Callable[..., Path]) -> None:
    start(lease, host="localhost")
    client = connect(lease)
    result = client.run(make_run("r1", "sh", "-c", "head -c 300000 /dev/zero; echo error >&2; exit 3"))
    assert (result.exit_code, len(result.stdout), result.stderr) == (3, 300_000, b"error\n")
    assert client.run(make_run("r1", "true")).exit_code == 3  # known: not started again
    content = bytes(range(256)) * 4000
    assert client.run(make_run("r2", "cat", stdin=content, cap=1 << 21)).stdout == content
    row = GatewayToken.objects.get()
    assert row.joined_at and row.refused_joins == 0


def test_token_is_exchanged_once(lease: Lease) -> None:
    token, now = issue_token(lease), timezone.now()
    assert not gateway_tokens.join(token[:-1], DIGEST, now=now)
    assert gateway_tokens.find_slot(token) is gateway_tokens.find_ref(token) is gateway_tokens.find_agent(token) is None
    assert gateway_tokens.join(token, DIGEST, now=now)
    assert gateway_tokens.join(token, DIGEST, now=now)  # the answer was lost
    assert not gateway_tokens.join(token, DIGEST[::-1], now=now)
    row = GatewayToken.objects.get()
    assert (row.session_sha256, row.refused_joins, row.refused_at) == (DIGEST, 1, now)
    sandbox = get_sandbox(lease)
    bearer = gateway_tokens.issue(sandbox, now=now)
    assert not gateway_tokens.join(bearer, DIGEST, now=now)  # of a sandbox without an agent
    fresh = gateway_tokens.issue_for_join(sandbox, now=now)
    Sandbox.objects.filter(pk=sandbox.pk).update(incarnation=sandbox.incarnation + 1)
    assert not gateway_tokens.join(fresh, DIGEST, now=now)
    with pytest.raises(ValueError, match="SHA-256"):
        gateway_tokens.join(fresh, "x", now=now)


def test_join_whose_answer_is_lost_is_repeated(
    lease: Lease, server: EgressServer, port: int, start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    balancer, joins = Balancer(port), list[str]()
    join = gateway_tokens.join

    def join_and_cut(token: str, digest: str, **more: Any) -> bool:
        joined = join(token, digest, **more)
        joins.append(digest)
        if len(joins) == 1:
            balancer.cut()
        return joined

    monkeypatch.setattr(gateway_tokens, "join", join_and_cut)
    start(lease, port=balancer.port)
    assert connect(lease).run(make_run("r1", "echo", "ok")).stdout == b"ok\n"
    assert len(joins) == 2 and len({*joins}) == 1
    assert GatewayToken.objects.get().refused_joins == 0
    balancer.close()


def test_session_ends_with_its_token_or_its_sandbox(
    lease: Lease, server: EgressServer, loop: EventLoopThread, start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_server, "CHECK_SECONDS", 3600.0)
    path = start(lease)
    client, first = connect(lease), GatewayToken.objects.get().session_sha256
    loop.run(server.sessions.check())
    assert client.responds(timeout=5.0)
    token = gateway_tokens.issue_for_join(get_sandbox(lease), now=timezone.now())
    loop.run(server.sessions.check())
    assert not client.responds(timeout=5.0)  # also by a kept connection, whose end may not have arrived yet
    with pytest.raises(NotConnected):
        client.open(0.0)
    # The agent joins again once it has the new token, with another secret.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"token": token}))
    wait_until(lambda: client.responds(timeout=2.0), "the agent is connected again", within=15)
    second = GatewayToken.objects.get().session_sha256
    assert first and second and first != second
    leasing.release(lease.pk, now=timezone.now())
    loop.run(server.sessions.check())
    assert client.responds(timeout=5.0)  # the last state of the sandbox is stored now
    passes.destroy_due(now=timezone.now())
    loop.run(server.sessions.check())
    assert not client.responds(timeout=5.0)


@contextmanager
def serving_tls(files: TlsFiles) -> Iterator[tuple[int, list[Exception]]]:
    """Accept TLS connections. Yield the port and the errors of handshakes."""
    context, errors = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[Exception]()
    context.load_cert_chain(files.certificate, files.key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(connection, server_side=True) as stream:
                    stream.recv(1)
            except OSError as error:
                errors.append(error)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1], errors
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize(
    ("name", "is_trusted", "alert"), [("127.0.0.1", False, "unknown ca"), ("example.org", True, "bad certificate")]
)
def test_agent_refuses_a_gateway_without_the_right_certificate(name: str, is_trusted: bool, alert: str, tmp_path: Path) -> None:
    files = create_certificates(tmp_path, name)
    with serving_tls(files) as (port, errors):
        path = write_gateway_file(tmp_path, f"https://127.0.0.1:{port}", "lhj_x", files.authority if is_trusted else None)
        with running_agent(path):
            wait_until(lambda: errors, "a handshake has failed")
    assert alert in str(errors[0]).lower()


def test_callers_that_do_not_authenticate_are_cut(
    lease: Lease, loop: EventLoopThread, port: int, files: TlsFiles, start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_listener, "AUTHENTICATION_SECONDS", 0.5)
    monkeypatch.setattr(public_listener, "MAX_UNAUTHENTICATED_PER_ADDRESS", 2)
    context = ssl.create_default_context(cafile=files.authority)
    with serving_gateway(loop, port, files):
        start(lease)
        client = connect(lease)

        def read_until_cut(*sent: bytes, tls: bool = True) -> float:
            began = time.monotonic()
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            try:
                if tls:
                    connection = context.wrap_socket(connection, server_hostname="localhost")
                for content in sent:
                    connection.sendall(content)
                assert not connection.recv(1)
            except (ConnectionError, ssl.SSLError):
                pass
            finally:
                connection.close()
            return time.monotonic() - began

        assert read_until_cut(tls=False) >= 0.4  # in the handshake
        assert read_until_cut(b"GET /agent/session HTTP/1.1\r\nHost: x\r\n") >= 0.4
        line = b"X-Header: " + b"x" * 4000 + b"\r\n"
        assert read_until_cut(b"GET / HTTP/1.1\r\n", *([line] * 9)) < 5  # at once, or with the time limit on a slow machine
        waiting = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(8)]
        closed = [connection for connection in waiting if is_closed_within(connection, 0.2)]
        assert len(closed) >= 4
        for connection in waiting:
            connection.close()
        assert client.run(make_run("r1", "echo", "still connected")).stdout == b"still connected\n"
        refused = HTTPSConnection("localhost", port, context=context, timeout=20)
        for body, status in ((b"{}", 400), (json.dumps({"session_sha256": DIGEST}).encode(), 401)):
            refused.request("POST", "/agent/join", body, {"Authorization": "Bearer lhj_x"})
            response = refused.getresponse()
            assert (response.status, bool(response.read())) == (status, True)
        refused.request("GET", "/agent/session", headers={"Upgrade": "leasehold-agent", "Authorization": "Bearer lhs_x"})
        assert refused.getresponse().status == 401


def is_closed_within(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_program_calls_the_model_through_the_agent(
    lease: Lease, server: EgressServer, loop: EventLoopThread, start: Callable[..., Path], settings: Any
) -> None:
    [bridge_port] = ports.find_free_ports()
    with loop.run_context(FakeUpstream().listening()) as upstream:
        settings.LLM_URL, settings.LLM_API_KEY = upstream.url, "sk-secret"
        start(lease, str(bridge_port), "gateway")
        connect(lease)
        url, headers = f"http://127.0.0.1:{bridge_port}/v1/chat/completions", {"Authorization": "Bearer sk-of-the-program"}
        headers["Content-Type"] = "application/json"
        for _ in range(2):
            request = urllib.request.Request(url, json.dumps(COMPLETION_REQUEST).encode(), headers)
            assert json.loads(urllib.request.urlopen(request, timeout=20).read()) == COMPLETION_RESPONSE
    wait_until(lambda: not LlmCall.objects.filter(outcome="open").exists(), "the calls are settled")
    assert [(call.holder, call.outcome) for call in LlmCall.objects.all()] == [(lease.pk, "ok")] * 2


def test_processes_need_the_secret_and_the_current_number(
    lease: Lease, server: EgressServer, start: Callable[..., Path]
) -> None:
    start(lease)
    client = connect(lease)
    row = AgentRoute.objects.get()
    assert row.ref == client.container and row.address == server.sessions.address
    secret = agent_routes.derive_gateway_secret()

    def find_error(location: AgentLocation, key: bytes) -> str:
        with pytest.raises(NotConnected) as failed:
            AgentConnection(RoutedGateway(lambda _: location, key), client.container, wait=0.0)
        return str(failed.value)

    current = AgentLocation(row.address, row.number)
    assert "closed" in find_error(current, b"x" * 32)
    assert find_error(current._replace(number=row.number - 1), secret)
    with AgentConnection(RoutedGateway(lambda _: current, secret), client.container, wait=0.0) as connection:
        assert connection.boot
    unknown = RoutedGateway(agent_routes.locate_agent, secret)
    with pytest.raises(NotConnected, match="not connected yet"):
        unknown.open("never", wait=0.0)
    routes.clear(row.sandbox_id, row.number)
    with pytest.raises(GatewayDown):
        unknown.open(client.container, wait=0.0)


def test_gateway_that_is_killed_costs_no_run(lease: Lease, files: TlsFiles, start: Callable[..., Path], tmp_path: Path) -> None:
    first, second = ports.find_free_ports(2)
    balancer, log = Balancer(first, second), tmp_path / "log"
    with running_gateway(tmp_path / "a", first, files) as victim, running_gateway(tmp_path / "b", second, files):
        wait_until(lambda: is_listening(first) and is_listening(second), "both gateways listen")
        start(lease, port=balancer.port)
        client = connect(lease)
        before = AgentRoute.objects.get()

        def execute(number: int) -> AgentResult:
            script = f"echo {number} >>{log}; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo {number}"
            try:
                return client.run(make_run(f"r{number}", "sh", "-c", script))
            finally:
                connections.close_all()  # of this thread, by look-ups of the gateway

        with ExitStack() as threads:
            results = [threads.enter_context(run_in_thread(lambda number=number: execute(number))) for number in range(4)]
            wait_until(lambda: log.exists() and len(log.read_text().split()) == 4, "the commands run")
            victim.kill()
            late = threads.enter_context(run_in_thread(lambda: execute(4)))  # begins without a gateway
            (tmp_path / "go").touch()
            stdout = [result.result(60).stdout for result in [*results, late]]
        assert stdout == [b"%d\n" % number for number in range(5)]
        assert sorted(log.read_text().split()) == ["0", "1", "2", "3", "4"]
        after = AgentRoute.objects.get()
        assert after.number > before.number and after.address != before.address
        found = client.find("r2", cap=1000)
        assert isinstance(found, AgentResult) and found.stdout == b"2\n"
    balancer.close()


def test_agent_of_another_version_is_named_to_every_process(
    lease: Lease,
    server: EgressServer,
    loop: EventLoopThread,
    port: int,
    files: TlsFiles,
    start: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(lease)
    client, ref = connect(lease), get_sandbox(lease).ref
    with monkeypatch.context() as upgrade:  # of the control plane: the agent in the sandbox stays
        upgrade.setattr(protocol, "OLDEST_VERSION", protocol.VERSION + 1)
        upgrade.setattr(protocol, "VERSION", protocol.VERSION + 1)
        session = loop.run(server.agents.wait_for_session(ref, 0.0))
        loop.loop.call_soon_threadsafe(session.end)
        refused = AgentRoute.objects.filter(refused_version=protocol.VERSION - 1, address="")
        wait_until(refused.exists, "the agent is refused and its connection has ended")
        locate = RoutedGateway(lambda _: AgentLocation("", 1, protocol.VERSION - 1), b"secret")  # between two connections
        with pytest.raises(AgentOutdated, match=f"protocol {protocol.VERSION - 1}, not {protocol.VERSION}"):
            locate.open(ref, wait=60.0)
        began = time.monotonic()
        with pytest.raises(NotStarted) as failed:
            client.run(make_run("r1", "true"))
        assert time.monotonic() - began < RoutedGateway.restart_seconds
        assert (find_cause(failed.value), needs_operator(failed.value)) == ("agent_outdated", True)
        with pytest.raises(AgentOutdated):
            loop.run(AgentLink.open(server.agents, ref))
        [other_port] = ports.find_free_ports()
        with serving_gateway(loop, other_port, files) as other:
            wait_until(refused.exists, "the agent has no connection")
            with pytest.raises(AgentOutdated):
                loop.run(AgentLink.open(other.agents, ref))
    assert connect(lease).run(make_run("r2", "echo", "ok")).stdout == b"ok\n"  # the agent of a version that is spoken
    assert AgentRoute.objects.get().refused_version is None


@pytest.mark.parametrize("act", [AgentClient.run, lambda client, run, check: RepeatingConnection(client, check)])
def test_wait_for_the_gateway_of_a_sandbox_ends_once_the_sandbox_is_gone(
    act: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "CONNECT_SECONDS", 0.0)
    monkeypatch.setattr(RoutedGateway, "restart_seconds", math.inf)
    monkeypatch.setattr(RoutedGateway, "check_seconds", 0.0)
    client = AgentClient(RoutedGateway(lambda _: AgentLocation("", 1), b"secret"), "pod-1")

    def check() -> None:
        raise Missing("pod-1 is gone.")

    with pytest.raises(Missing):
        act(client, make_run("r1", "true"), check=check)


def test_agent_that_stops_responding_loses_its_session(
    lease: Lease, server: EgressServer, port: int, files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_server, "PING_SECONDS", 0.5)
    path = write_gateway_file(tmp_path, f"https://127.0.0.1:{port}", issue_token(lease), files.authority)
    with running_agent(path) as agent:
        client = connect(lease)
        [number] = AgentRoute.objects.values_list("number", flat=True)
        agent.send_signal(signal.SIGSTOP)
        wait_until(lambda: AgentRoute.objects.get().address == "", "the session has ended")
        agent.send_signal(signal.SIGCONT)
        wait_until(lambda: AgentRoute.objects.get().address, "the agent is connected again")
        assert AgentRoute.objects.get().number == number + 1 and client.responds(timeout=5.0)


@pytest.fixture
def internal_files(tmp_path: Path, settings: Any) -> Iterator[TlsFiles]:
    """Certificate of internal ports, by a name that is not their address. All processes require it."""
    (directory := tmp_path / "internal").mkdir()
    files = create_certificates(directory, "gateway.internal")
    settings.GATEWAY_INTERNAL_AUTHORITY, settings.GATEWAY_INTERNAL_NAME = str(files.authority), "gateway.internal"
    caches = agent_routes.build_gateway_trust, agent_routes.build_routed_gateway
    for cache in caches:
        cache.cache_clear()
    yield files
    for cache in caches:
        cache.cache_clear()


def test_internal_port_over_tls_serves_processes_and_other_gateways(
    lease: Lease, loop: EventLoopThread, files: TlsFiles, internal_files: TlsFiles, port: int, start: Callable[..., Path]
) -> None:
    [other_port] = ports.find_free_ports()
    with (
        serving_gateway(loop, port, files, internal_files) as server,
        serving_gateway(loop, other_port, files, internal_files) as other,
    ):
        start(lease)
        client = connect(lease)
        content = bytes(range(256)) * 4000
        assert client.run(make_run("r1", "cat", stdin=content, cap=1 << 21)).stdout == content
        with client.open(0.0) as connection:
            assert isinstance(connection._socket, ssl.SSLSocket)
        with client.open(0.0) as again:
            assert again is connection  # an idle connection is used again
        assert loop.run(AgentLink.open(other.agents, client.container)).boot == connection.boot

        row, secret = AgentRoute.objects.get(), agent_routes.derive_gateway_secret()
        location = AgentLocation(server.sessions.address, row.number)
        strange = GatewayTrust(ssl.create_default_context(cafile=files.authority), "gateway.internal")
        misnamed = GatewayTrust(ssl.create_default_context(cafile=internal_files.authority))  # 127.0.0.1
        for trust in (strange, misnamed):
            with pytest.raises(NotConnected):
                AgentConnection(RoutedGateway(lambda _: location, secret, trust), client.container, wait=0.0)
            assert loop.run(internal.connect(location.address, secret, client.container, row.number, trust)) is None


def test_terminal_server_of_another_gateway_reaches_the_agent(
    lease: Lease, server: EgressServer, loop: EventLoopThread, files: TlsFiles, start: Callable[..., Path]
) -> None:
    [port] = ports.find_free_ports()
    with serving_gateway(loop, port, files) as other:
        start(lease)
        ref = connect(lease).container
        link = loop.run(AgentLink.open(other.agents, ref))
        command = json.dumps({"argv": ["cat"], "env": {}, "cwd": "/"}).encode()
        head = {"verb": "exec", "boot": link.boot, "timeout": 30, "cap": 1000, "command_bytes": len(command)}
        frame, state = loop.run(link.request("r1", head, command + b"content", wait=10.0))
        assert (state.exit_code, frame.body) == (0, b"content")
        session = loop.run(server.agents.wait_for_session(ref, 0.0))
        loop.loop.call_soon_threadsafe(session.end)
        wait_until(lambda: not link.is_open, "the link has ended with the session")
        with pytest.raises(NotConnected):
            loop.run(AgentLink.open(other.agents, "unknown"))
