"""The stream server with a real agent as a process of this host. The checks in the database are replaced."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import aiohttp
import pytest
from aiohttp import web
from django.db import OperationalError

from leases.errors import GrantEnded, LeaseEnded
from leases.grants.issuers import Issuer
from leases.stream_server import access, address, agent_link, connections, server, terminals
from leases.stream_server.grants import PreviewGrant, TerminalGrant
from sandboxes.agent.gateway import ResponseReceiver
from sandboxes.agent.operations import AgentProcesses
from sandboxes.agent.protocol import PROTOCOL, VERSION, RawFrame, TerminalSize
from sandboxes.errors import SandboxAsleep
from tests.conftest import NOW
from tests.support.sandbox_agent import SANDBOX, Gateway, start_agent
from tests.support.servers.ports import find_free_ports
from tests.support.terminal import TerminalClient

LEASE, PROCESS = UUID(int=1), UUID(int=2)
END = int(NOW.timestamp()) + 3600
Check = Callable[[], Coroutine[Any, Any, None]]


class Uses:
    """Calls of `access.use_terminal`, which by default have no effect."""

    def __init__(self) -> None:
        self.count, self.effect = 0, lambda: None

    def __call__(self, grant: TerminalGrant, **options: Any) -> None:
        self.count += 1
        self.effect()


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path_factory: pytest.TempPathFactory) -> Uses:
    settings.RUNTIME_DIR = tmp_path_factory.mktemp("run")
    uses = Uses()
    monkeypatch.setattr(access, "open_terminal", lambda grant, **options: SANDBOX)
    monkeypatch.setattr(access, "find_preview_agent", lambda grant, **options: SANDBOX)
    monkeypatch.setattr(access, "use_terminal", uses)
    monkeypatch.setattr(access, "find_ended", lambda grants, **options: {})
    return uses


@pytest.fixture
def gateway(uses: Uses) -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@pytest.fixture
def agent(gateway: Gateway) -> Iterator["subprocess.Popen[bytes]"]:
    process = start_agent(gateway.path)
    gateway.boot()
    yield process
    process.kill()
    process.wait()


@dataclass
class Clock:
    """Clock of the stream server."""

    now: datetime = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(gateway: Gateway, clock: Clock) -> Callable[[Check], None]:
    """Run a check in the gateway's event loop, beside the stream server."""

    async def serve_and_check(check: Check) -> None:
        async with server.listening(gateway.gateway, clock):
            await _until_listening()
            await check()

    def run(check: Check) -> None:
        asyncio.run_coroutine_threadsafe(serve_and_check(check), gateway.loop).result(60)

    return run


async def _until_listening() -> None:
    async with asyncio.timeout(20):
        while (port := address.read_port()) is None or not await _accepts(port):
            await asyncio.sleep(0.01)


async def _accepts(port: int) -> bool:
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"{address.get_base_url()}/healthz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


@asynccontextmanager
async def connect(*, read_only: bool = False, offset: int = 0) -> AsyncIterator[TerminalClient]:
    grant = TerminalGrant(LEASE, PROCESS, END, read_only, "key 01234567", Issuer.of_key(1))
    async with TerminalClient(address.build_terminal_url(grant), offset) as client:
        yield client


def start_terminal(gateway: Gateway, *argv: str) -> None:
    processes = AgentProcesses(gateway.client, check=lambda: None)
    processes.start(str(PROCESS), argv, {"PS1": "$ "}, "/", terminal=TerminalSize(24, 80))


@pytest.mark.usefixtures("agent")
def test_output_that_the_agent_has_dropped_is_reported(gateway: Gateway, run: Callable[[Check], None]) -> None:
    start_terminal(gateway, "sh", "-c", "stty -opost; head -c 2000000 /dev/zero; echo last")

    async def check() -> None:
        async with connect() as ended:  # all output has been read once the program has ended
            assert await ended.read_to_end() == 1000
        async with connect() as client:
            assert await client.read_to_end() == 1000
            lost = (await client.wait_for("gap"))["lost_bytes"]
            assert lost + len(client.output) == 2_000_005
            assert client.output.endswith(b"last\n")
            assert (await client.wait_for("exit"))["exit_code"] == 0

    run(check)


@pytest.mark.usefixtures("agent")
def test_program_that_ends_with_its_lease_is_closed_as_ended(
    gateway: Gateway, run: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = LeaseEnded("released")
    start_terminal(gateway, "sh", "-c", "read line")

    async def check() -> None:
        async with connect() as client:
            await client.wait_for("start")
            monkeypatch.setattr(access, "find_ended", lambda grants, **options: dict.fromkeys(grants, ended))
            await client.type("\n")
            assert await client.read_to_end() == terminals.CODE_ENDED
            assert (await client.wait_for("exit"))["exit_code"] == 0

    run(check)


@pytest.mark.usefixtures("agent")
def test_input_of_two_connections_is_written_once_each(gateway: Gateway, run: Callable[[Check], None]) -> None:
    start_terminal(gateway, "sh", "-c", "stty raw -echo; echo ready; exec cat")

    async def check() -> None:
        async with connect() as first, connect() as second:
            await first.read_until("ready\n")
            for number in range(50):
                await first.type(f"<a{number}>")
                await second.type(f"<b{number}>")
            for name in "ab":
                await first.read_until(f"<{name}49>")
            assert all(first.output.count(f"<{name}{number}>".encode()) == 1 for name in "ab" for number in range(50))

    run(check)


@pytest.mark.usefixtures("agent")
def test_invalid_message_closes_the_connection(gateway: Gateway, run: Callable[[Check], None]) -> None:
    start_terminal(gateway, "cat")

    async def check() -> None:
        for fields in (
            {"type": "resize", "rows": 0, "columns": 80},
            {"type": "resize", "rows": True, "columns": 80},
            {"type": "resize", "rows": 24},
            {"type": "other", "rows": 24, "columns": 80},
        ):
            async with connect() as client:
                await client.send(**fields)
                assert await client.read_to_end() == terminals.CODE_INVALID

    run(check)


def test_input_resumes_a_suspended_sandbox(
    gateway: Gateway,
    agent: "subprocess.Popen[bytes]",
    run: Callable[[Check], None],
    uses: Uses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_link, "RESPONSE_SECONDS", 0.2)
    monkeypatch.setattr(terminals, "WRITE_WAIT_SECONDS", 0.2)
    start_terminal(gateway, "sh", "-c", "stty raw -echo; echo ready; exec cat")
    uses.effect = lambda: os.kill(agent.pid, signal.SIGCONT)

    async def check() -> None:
        async with connect() as client:
            await client.read_until("ready\n")
            os.kill(agent.pid, signal.SIGSTOP)
            await client.type("<input>")
            await client.read_until("<input>")
            assert client.output.count(b"<input>") == 1
        assert uses.count > 0

    run(check)


@pytest.mark.usefixtures("agent")
def test_connection_ends_with_its_lease_and_beyond_a_limit_none_begins(
    gateway: Gateway, run: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CHECK_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS_PER_LEASE", 1)
    start_terminal(gateway, "cat")

    async def check() -> None:
        async with connect() as client:
            await client.wait_for("start")
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with connect():
                    pass
            assert refused.value.status == 429
            monkeypatch.setattr(access, "find_ended", lambda grants, **options: dict.fromkeys(grants, LeaseEnded()))
            assert await client.read_to_end() == terminals.CODE_ENDED

    run(check)


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("read_only", [True, False])
def test_open_terminal_ends_with_the_right_of_its_issuer(
    gateway: Gateway, run: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    monkeypatch.setattr(connections, "CHECK_INTERVAL_SECONDS", 0.05)
    start_terminal(gateway, "cat")

    async def check() -> None:
        async with connect(read_only=read_only) as client:
            await client.wait_for("start")
            monkeypatch.setattr(access, "find_ended", lambda grants, **options: dict.fromkeys(grants, GrantEnded()))
            assert await client.read_to_end() == terminals.CODE_FORBIDDEN

    run(check)


def lose_database(*args: Any, **options: Any) -> None:
    raise OperationalError("no connection")


@pytest.mark.usefixtures("agent")
def test_open_terminal_ends_with_its_url_also_without_the_database(
    gateway: Gateway, run: Callable[[Check], None], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CHECK_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(access, "find_ended", lose_database)
    start_terminal(gateway, "sh", "-c", "stty raw -echo; echo ready; exec cat")

    async def check() -> None:
        async with connect() as client:
            await client.read_until("ready\n")
            clock.now = NOW + timedelta(seconds=3599)
            await client.type("<input>")
            await client.read_until("<input>")
            clock.now = NOW + timedelta(seconds=3600)
            assert await client.read_to_end() == terminals.CODE_FORBIDDEN
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with connect():
                pass
        assert refused.value.status == 403

    run(check)


@pytest.mark.usefixtures("agent")
def test_input_that_the_issuer_may_not_send_any_more_closes_the_terminal(
    gateway: Gateway, run: Callable[[Check], None], uses: Uses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminals, "USE_INTERVAL_SECONDS", -1.0)
    start_terminal(gateway, "sh", "-c", "stty raw -echo; echo ready; exec cat")

    def refuse() -> None:
        raise GrantEnded

    uses.effect = refuse

    async def check() -> None:
        async with connect() as client:
            await client.read_until("ready\n")
            await client.type("<input>")
            assert await client.read_to_end() == terminals.CODE_FORBIDDEN
            assert b"<input>" not in client.output

    run(check)


@asynccontextmanager
async def serve_program() -> AsyncIterator[int]:
    """Run a program that sends the beginning of a response at /, and a message over WebSocket at /ws. Yield its port.

    At /length and /chunked it closes the connection in the middle of a response."""

    async def begin(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"beginning")
        await asyncio.Event().wait()
        return response

    async def greet(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str("hello")
        await socket.receive()
        return socket

    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if request.path == "/length":
            response.content_length = 200
        await response.prepare(request)
        await response.write(b"z" * 100)
        assert request.transport
        request.transport.close()
        return response

    application = web.Application()
    application.router.add_get("/", begin)
    application.router.add_get("/length", break_off)
    application.router.add_get("/chunked", break_off)
    application.router.add_get("/ws", greet)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def end_right(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "find_ended", lambda grants, **options: dict.fromkeys(grants, GrantEnded()))


def expire_url(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "find_ended", lose_database)
    clock.now = NOW + timedelta(seconds=3600)


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("end", [end_right, expire_url])
def test_open_preview_ends_with_its_grant(
    run: Callable[[Check], None], clock: Clock, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:
    monkeypatch.setattr(connections, "CHECK_INTERVAL_SECONDS", 0.05)

    async def check() -> None:
        async with serve_program() as port, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            url = address.build_preview_url(PreviewGrant(LEASE, port, END, key_id=1))
            async with session.get(url) as response, session.ws_connect(f"{url}ws") as socket:
                assert await response.content.readexactly(9) == b"beginning"
                assert (await socket.receive()).data == "hello"
                end(clock, monkeypatch)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.content.read()
                assert (await socket.receive()).type in (
                    aiohttp.WSMsgType.CLOSE,
                    aiohttp.WSMsgType.CLOSED,
                    aiohttp.WSMsgType.ERROR,
                )

    run(check)


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("path", ["length", "chunked"])
def test_response_that_the_program_breaks_off_is_incomplete(run: Callable[[Check], None], path: str) -> None:
    """The client gets the beginning and the end of the connection: no second response, and no proper end of the first."""

    async def check() -> None:
        async with serve_program() as port:
            url = urlsplit(address.build_preview_url(PreviewGrant(LEASE, port, END, key_id=1)))
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(f"GET {url.path}{path} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
            received = b""
            with suppress(ConnectionResetError):
                while chunk := await asyncio.wait_for(reader.read(1 << 16), 60):
                    received += chunk
            writer.close()
            assert received.startswith(b"HTTP/1.1 200") and received.count(b"HTTP/1.1") == 1
            assert received.count(b"z") == 100 and not received.endswith(b"0\r\n\r\n")

    run(check)


def test_terminal_of_an_agent_that_has_gone_is_unavailable(
    gateway: Gateway,
    agent: "subprocess.Popen[bytes]",
    run: Callable[[Check], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminals, "RECONNECT_SECONDS", 0.0)
    start_terminal(gateway, "cat")

    async def check() -> None:
        async with connect() as client:
            await client.wait_for("start")
            agent.kill()
            assert await client.read_to_end() == terminals.CODE_UNAVAILABLE

    run(check)


@pytest.mark.usefixtures("uses")
def test_problem_documents_of_refused_requests(run: Callable[[Check], None]) -> None:
    expired = PreviewGrant(LEASE, 80, int(NOW.timestamp()), key_id=1).encode()

    async def check() -> None:
        base = address.get_base_url()
        async with aiohttp.ClientSession() as session:
            for path, status in (
                ("/", 404), ("/terminals/x", 403), ("/previews/x/", 403), (f"/previews/{expired}/", 403), ("/terminals/", 404),
            ):  # fmt: skip
                async with session.get(base + path) as response:
                    problem = await response.json(content_type="application/problem+json")
                    assert (response.status, problem["status"]) == (status, status), path

    run(check)


@pytest.mark.usefixtures("uses")
def test_visitor_of_a_sleeping_sandbox_is_told_so_and_when_to_come_back(
    run: Callable[[Check], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_none(grant: PreviewGrant, **options: Any) -> str:
        raise SandboxAsleep("asleep <b>")

    monkeypatch.setattr(access, "find_preview_agent", find_none)
    url = PreviewGrant(LEASE, 80, END, key_id=1).encode()

    async def check() -> None:
        async with aiohttp.ClientSession(address.get_base_url()) as session:
            async with session.get(f"/previews/{url}/") as response:
                problem = await response.json(content_type="application/problem+json")
                assert (response.status, response.headers["Retry-After"]) == (503, "10")
                assert (problem["type"], problem["code"]) == ("urn:leasehold:problem:sandbox_asleep", "sandbox_asleep")
            async with session.get(f"/previews/{url}/", headers={"Accept": "text/html,*/*;q=0.8"}) as response:
                page = await response.text()
                assert (response.status, response.content_type, response.headers["Retry-After"]) == (503, "text/html", "10")
                assert "asleep &lt;b&gt;" in page and 'http-equiv="refresh" content="10"' in page
                assert "sandbox" in response.headers["Content-Security-Policy"]

    run(check)


@pytest.mark.usefixtures("uses")
def test_server_listens_where_it_is_configured_to(run: Callable[[Check], None], settings: Any) -> None:
    settings.STREAM_HOST, [settings.STREAM_PORT] = "127.0.0.2", find_free_ports()

    async def check() -> None:
        assert address.get_base_url() == f"http://127.0.0.2:{settings.STREAM_PORT}"

    run(check)


@pytest.mark.usefixtures("uses")
def test_port_stays_the_same_after_a_restart_unless_it_is_taken(run: Callable[[Check], None]) -> None:
    ports = []

    async def check() -> None:
        ports.append(address.read_port())

    run(check)
    run(check)
    taken = asyncio.run(_hold_port(ports[0], lambda: run(check)))
    assert taken is None
    assert ports[0] == ports[1] != ports[2]


async def _hold_port(port: int | None, action: Callable[[], None]) -> None:
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
    async with listener:
        await asyncio.to_thread(action)


def test_cancellation_at_the_time_of_the_response_is_not_lost() -> None:
    """A lost one would leave the connection of a terminal open that the server is closing."""

    class Session:
        hello = encode_greeting()

        def attach(self, client: ResponseReceiver) -> None:
            """Accept the only client."""

        def detach(self, client: ResponseReceiver) -> None:
            """Accept its end."""

        def end(self, violation: str = "") -> None:
            raise AssertionError(violation)

        def forward_request(self, client: ResponseReceiver, frame: RawFrame) -> None:
            content = json.dumps({"run": "r", "state": "unknown"}).encode()

            def respond() -> None:
                client.send(RawFrame(frame.request_id, content, b"").encode(frame.request_id))
                request.cancel()

            asyncio.get_running_loop().call_soon(respond)

    async def check() -> None:
        nonlocal request
        link = agent_link.AgentLink(Session())
        request = asyncio.create_task(link.request("r", {"verb": "read"}, wait=20))
        with pytest.raises(asyncio.CancelledError):
            await request

    request: asyncio.Task[Any]
    asyncio.run(check())


def encode_greeting() -> bytes:
    head = json.dumps({"protocol": PROTOCOL, "version": VERSION, "boot": "b" * 16}).encode()
    return RawFrame(0, head, b"").encode(0)
