"""Terminals and previews through the stream server, with programs in real containers."""

import asyncio
import contextlib
import os
import signal
from typing import Any
from urllib.parse import urljoin

import aiohttp
import pytest

from tests.commands.manage import run_manage
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.event_stream import open_stream, parse_events
from tests.support.terminal import TerminalClient
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
PREVIEW_DOMAIN = "preview.example.com"
PROGRAM = """
from aiohttp import web

async def show(request):
    headers = {"Set-Cookie": "own=1", "X-Path": request.raw_path, "Connection": "x-hop", "Referrer-Policy": "unsafe-url"}
    seen = {"path": request.raw_path, "headers": dict(request.headers), "body": len(await request.read())}
    return web.json_response(seen, headers=headers)

async def echo(request):
    socket = web.WebSocketResponse(protocols=["p2"])
    await socket.prepare(request)
    async for message in socket:
        await (socket.send_str("text " + message.data) if message.type == 1 else socket.send_bytes(message.data))
    return socket

async def large(request):
    return web.Response(body=b"x" * 5_000_000)

app = web.Application(client_max_size=1 << 30)
app.add_routes([web.get("/ws", echo), web.get("/large", large), web.route("*", "/{path:.*}", show)])
web.run_app(app, host="127.0.0.1", port=8080)
"""


@pytest.fixture
def running(fleet: Fleet) -> Fleet:  # noqa: F811
    fleet.env["LEASEHOLD_PREVIEW_DOMAIN"] = PREVIEW_DOMAIN
    fleet.up("--no-worker")
    return fleet


def open_terminal(fleet: Fleet, lease: str, **fields: Any) -> dict[str, Any]:  # noqa: F811
    status, terminal = fleet.post(f"/leases/{lease}/terminals", fields)
    assert status == 201, terminal
    return terminal


async def fetch_status(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status


async def is_gone(url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):  # a response that had begun when the lease ended
        return await fetch_status(url) == 410
    return False


async def read_status_of_handshake(url: str) -> int:
    try:
        async with TerminalClient(url):
            return 101
    except aiohttp.WSServerHandshakeError as error:
        return error.status


def test_terminal_is_shared_resized_and_continued_after_a_kill_of_the_gateway(running: Fleet) -> None:
    lease = running.join(0)
    assert lease
    terminal = open_terminal(running, lease, argv=["/bin/sh"], rows=30, columns=100, env={"PS1": "$ "})
    status, viewing = running.post(f"/leases/{lease}/terminals/{terminal['process_id']}/url", {"view_only": True})
    assert (status, viewing["view_only"]) == (200, True)

    async def use() -> int:
        async with TerminalClient(terminal["url"]) as first, TerminalClient(viewing["url"]) as viewer:
            assert (await first.wait_for("start"))["offset"] == 0
            await first.type("stty size; echo $TERM; X=kept\n")
            await first.read_until("30 100\r\nxterm-256color\r\n")
            await first.send(type="resize", rows=40, columns=120)
            await first.type("stty size\n")
            await first.read_until("40 120\r\n")
            await viewer.read_until("40 120\r\n")
            await viewer.type("echo refused\n")
            assert (await viewer.wait_for("error"))["code"] == "read_only"
            return len(first.output)

    async def continue_at(offset: int) -> None:
        async with TerminalClient(terminal["url"], offset) as second:
            await second.type("echo $X-$X; exit 3\n")
            await second.read_until("kept-kept")
            assert b"stty" not in second.output  # nothing from before the offset
            assert (await second.wait_for("exit"))["exit_code"] == 3
            assert await second.read_to_end() == 1000

    received = asyncio.run(use())
    [gateway] = running.find_processes("egress")
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: running.find_processes("egress") - {gateway}, "the gateway was started again")
    wait_until(lambda: asyncio.run(is_reachable(terminal["url"])), "the agent is connected again")
    asyncio.run(continue_at(received))
    status, process = running.request("GET", f"/leases/{lease}/processes/{terminal['process_id']}")
    assert (process["state"], process["exit_code"], process["is_terminal"]) == ("exited", 3, True)
    assert asyncio.run(read_status_of_handshake(terminal["url"])) == 410


async def is_reachable(url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError, OSError):
        return await read_status_of_handshake(url) == 101
    return False


@pytest.mark.matrix("tests/unit/leases/stream_server has the end of terminals")
def test_terminal_ends_with_its_lease(running: Fleet) -> None:
    lease = running.join(0)
    assert lease
    terminal = open_terminal(running, lease)

    async def use() -> int:
        async with TerminalClient(terminal["url"]) as client:
            await client.type("echo rea''dy\n")
            await client.read_until("ready")
            status, _ = await asyncio.to_thread(running.post, f"/leases/{lease}/release")
            assert status == 200
            return await client.read_to_end()

    assert asyncio.run(use()) == 4410
    assert asyncio.run(read_status_of_handshake(terminal["url"])) == 410


@pytest.mark.matrix("tests/unit/leases/stream_server and tests/api/leases/test_ended_keys.py have each end by a key")
def test_revoked_key_loses_what_it_has_opened(running: Fleet) -> None:
    lease = running.join(0)
    assert lease
    terminal = open_terminal(running, lease)
    body = {"argv": ["sh", "-c", "while sleep 0.2; do echo on; done"]}
    stream = open_stream(running.port, running.key, "POST", f"/leases/{lease}/exec/stream", body)
    events = parse_events(stream)
    assert [next(events).name for _ in range(2)] == ["start", "stdout"]

    async def use() -> int:
        async with TerminalClient(terminal["url"]) as client:
            await client.type("echo rea''dy\n")
            await client.read_until("ready")
            prefix = running.key.split("_")[1]
            revoked = await asyncio.to_thread(run_manage, running.path, "revoke_key", prefix, **running.env)
            assert revoked.stdout == f"{prefix} revoked\n"
            return await client.read_to_end()

    assert asyncio.run(use()) == 4403
    assert asyncio.run(read_status_of_handshake(terminal["url"])) == 403
    assert {event.name for event in events} <= {"stdout"}  # the command, and its stream until now, go on for minutes
    revoked = run_manage(running.path, "revoke_key", running.key.split("_")[1], "--end-leases", **running.env)
    assert revoked.stdout.endswith("was revoked before, 1 lease ended\n")


def test_preview_forwards_http_and_websocket_without_credentials(running: Fleet) -> None:
    lease = running.join(0)
    assert lease
    assert running.post(f"/leases/{lease}/previews", {"port": 8080})[1]["code"] == "previews_forbidden"
    script = "from leases.models import EnvironmentType as T; from sandboxes.models import Policy as P; "
    script += "T.objects.update(policy=P.objects.create(name='open', previews=True))"
    assert run_manage(running.path, "shell", "-c", script, **running.env).returncode == 0
    status, preview = running.post(f"/leases/{lease}/previews", {"port": 8080})
    assert (status, preview["port"]) == (201, 8080)
    url, host = split_preview_url(preview["url"])
    start = {"argv": ["python3", "-c", PROGRAM], "wait_for_port": 8080, "wait_seconds": 60}
    status, process = running.post(f"/leases/{lease}/processes", start)
    assert (status, process["found"]) == (201, True), process
    asyncio.run(check_http(url))
    asyncio.run(check_websocket(url))
    asyncio.run(check_own_host(url, host))
    other, _ = split_preview_url(running.post(f"/leases/{lease}/previews", {"port": 8081})[1]["url"])
    assert asyncio.run(fetch_status(other)) == 502
    assert running.post(f"/leases/{lease}/release")[0] == 200
    wait_until(lambda: asyncio.run(is_gone(url)), "the check of the lease is repeated")


def split_preview_url(url: str) -> tuple[str, str]:
    """Return the URL by path, and the host name of the URL by host."""
    host, _, port = url.removeprefix("http://").removesuffix("/").partition(":")
    label, _, domain = host.partition(".")
    assert domain == PREVIEW_DOMAIN
    return f"http://127.0.0.1:{port}/previews/{label}/", host


async def check_own_host(url: str, host: str) -> None:
    """Check a preview by its own host name, which needs no DNS here."""
    base = url.partition("/previews/")[0]
    async with aiohttp.ClientSession() as session:
        headers = {"Host": host, "Cookie": "sessionid=secret; csrftoken=secret; own=1"}
        async with session.get(f"{base}/previews/x?y", headers=headers) as response:
            assert (response.status, response.headers["X-Path"]) == (200, "/previews/x?y")
            assert response.headers["Set-Cookie"] == "own=1"
            assert "Content-Security-Policy" not in response.headers
            assert (await response.json())["headers"]["Cookie"] == "own=1"


async def check_http(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        headers = {"Cookie": "sessionid=secret", "X-Forwarded-For": "1.2.3.4", "X-Own": "passes", "Connection": "x"}
        async with session.post(f"{url}a%2Fb?q=%20", data=b"y" * 3_000_000, headers=headers) as response:
            assert response.status == 200
            assert not {"Set-Cookie", "X-Path"} & response.headers.keys()
            assert response.headers["Content-Security-Policy"].startswith("sandbox ")
            assert response.headers.getall("Referrer-Policy") == ["no-referrer"]
            seen = await response.json()
        assert (seen["body"], seen["path"]) == (3_000_000, "/a%2Fb?q=%20")
        assert "Cookie" not in seen["headers"]
        assert "X-Forwarded-For" not in seen["headers"]
        assert seen["headers"]["X-Own"] == "passes"
        assert seen["headers"]["X-Forwarded-Prefix"].startswith("/previews/")
        async with session.get(f"{url}large") as response:
            assert len(await response.read()) == 5_000_000
        async with session.head(f"{url}large") as response:
            assert (response.status, response.headers["Content-Length"]) == (200, "5000000")
        async with session.get(url.rstrip("/"), allow_redirects=False) as response:
            assert (response.status, urljoin(url.rstrip("/"), response.headers["Location"])) == (308, url)
        results = await asyncio.gather(*(fetch_status(f"{url}{number}") for number in range(24)))
        assert results == [200] * 24


async def check_websocket(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}ws", protocols=["p1", "p2"]) as socket:
        assert socket.protocol == "p2"
        await socket.send_str("hello")
        assert (await socket.receive(30)).data == "text hello"
        await socket.send_bytes(b"\0" * 1_000_000)
        assert (await socket.receive(30)).data == b"\0" * 1_000_000
