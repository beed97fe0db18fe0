"""The egress server in a thread of a test, an upstream on loopback that says what a test wants, and what a program in a
sandbox does to reach it."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from aiohttp import web
from django.db import connections

from sandboxes.egress import nginx, slots
from sandboxes.egress.server import EgressServer

CHAT_PATH = "/v1/chat/completions"
COMPLETION_RESPONSE = {"model": "gpt-4o-mini-2024-07-18", "choices": [{"message": {"content": "{}"}}],
        "usage": {"prompt_tokens": 120, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 100}}}  # fmt: skip
COMPLETION_REQUEST = {
    "model": "default",
    "messages": [{"role": "user", "content": "{}"}],
    "user": "somebody else",
    "api_base": "http://evil",
}


class EventLoopThread:
    """An event loop in a thread; `act` waits for a coroutine in it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def act(self, coroutine: Any, timeout: float = 30.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    @contextmanager
    def run_context(self, manager: Any) -> Iterator[Any]:
        """Be inside an asynchronous context manager, which is entered and left in the loop by one task."""
        leave, entered = asyncio.Event(), threading.Event()
        found: list[Any] = []

        async def stay() -> None:
            try:
                async with manager as value:
                    found.append(value)
                    entered.set()
                    await leave.wait()
            finally:
                entered.set()

        staying = asyncio.run_coroutine_threadsafe(stay(), self.loop)
        entered.wait(30)
        if not found:
            staying.result(30)
        try:
            yield found[0]
        finally:
            self.loop.call_soon_threadsafe(leave.set)
            staying.result(30)


class FakeUpstream:
    """An OpenAI-compatible server that notes what it is asked. `answer` may be replaced by any handler."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.status, self.headers, self.body = (
            200,
            {"x-litellm-response-cost": "0.0000123"},
            json.dumps(COMPLETION_RESPONSE).encode(),
        )
        self.answer = self._answer
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeUpstream"]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._any)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _any(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.path, headers, json.loads(content) if content else None))
        return await self.answer(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=self.status, headers={"Content-Type": "application/json", **self.headers}, body=self.body)


@contextmanager
def run_server(loop: EventLoopThread, *, slot: int, server: EgressServer | None = None) -> Iterator[Path]:
    """The server listens on one slot itself, and on nginx's socket; the path of the slot's."""
    path = slots.ensure_slot_directory(slot) / slots.SOCKET_NAME
    server = server or EgressServer()
    try:
        with loop.run_context(server.listening({path: slot, nginx.get_server_socket_path(): None})):
            yield path
    finally:
        loop.act(_close_connections(server))


async def _close_connections(server: EgressServer) -> None:
    connections.close_all()


def connect(path: Path) -> HTTPConnection:
    connection = HTTPConnection("sandbox", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(60)
    connection.sock.connect(str(path))
    return connection


def post(path: Path, body: Any, url: str = CHAT_PATH, **headers: str) -> tuple[int, Any]:
    """What a program in the sandbox does: status and decoded body, or the bytes where they are no JSON."""
    connection = connect(path)
    try:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", url, content, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(said)
    except ValueError:
        return answer.status, said
