"""Egress server in a thread, scripted upstream on loopback, and client functions of a sandbox."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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
COMPLETION_REQUEST = {"model": "default", "messages": [{"role": "user", "content": "{}"}], "user": "somebody else",
        "api_base": "http://evil"}  # fmt: skip


class EventLoopThread:
    """Event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine: Any, timeout: float = 30.0) -> Any:
        """Run a coroutine in the loop. Return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    @contextmanager
    def run_context(self, manager: Any) -> Iterator[Any]:
        """Enter an asynchronous context manager in the loop for the duration of the block, in one task."""
        leave, entered = asyncio.Event(), threading.Event()
        values: list[Any] = []

        async def hold_open() -> None:
            try:
                async with manager as value:
                    values.append(value)
                    entered.set()
                    await leave.wait()
            finally:
                entered.set()

        task = asyncio.run_coroutine_threadsafe(hold_open(), self.loop)
        entered.wait(30)
        if not values:
            task.result(30)
        try:
            yield values[0]
        finally:
            self.loop.call_soon_threadsafe(leave.set)
            task.result(30)


@asynccontextmanager
async def serve_http(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0) -> AsyncIterator[int]:
    """Answer all requests on loopback with `handler`. Yield the port: by default a free one."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class FakeUpstream:
    """OpenAI-compatible server that records (path, headers, body) of requests. `answer` can be replaced by any handler."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.status, self.headers = 200, {"x-litellm-response-cost": "0.0000123"}
        self.body, self.content_type = json.dumps(COMPLETION_RESPONSE).encode(), "application/json"
        self.answer = self._answer
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeUpstream"]:
        async with serve_http(self._any) as port:
            self.url = f"http://127.0.0.1:{port}/v1"
            yield self

    async def _any(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path_qs, headers, json.loads(content) if content else None))
        return await self.answer(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=self.status, headers={"Content-Type": self.content_type, **self.headers}, body=self.body)


@contextmanager
def run_server(loop: EventLoopThread, *, slot: int, server: EgressServer | None = None) -> Iterator[Path]:
    """Run a server that listens on one slot and on nginx's socket. Yield the slot's path."""
    path = slots.ensure_slot_directory(slot) / slots.SOCKET_NAME
    server = server or EgressServer()
    try:
        with loop.run_context(server.listening({path: slot, nginx.get_server_socket_path(): None})):
            yield path
    finally:
        loop.run(_close_connections(server))


async def _close_connections(server: EgressServer) -> None:
    connections.close_all()


def connect(path: Path) -> HTTPConnection:
    connection = HTTPConnection("sandbox", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(60)
    connection.sock.connect(str(path))
    return connection


def get_status(path: Path, url: str) -> int:
    """Send a GET like a program in a sandbox. Return its status."""
    connection = connect(path)
    try:
        connection.request("GET", url)
        return connection.getresponse().status
    finally:
        connection.close()


def post(path: Path, body: Any, url: str = CHAT_PATH, **headers: str) -> tuple[int, Any]:
    """Send a request like a program in a sandbox. Return (status, JSON body, or bytes if it is not JSON)."""
    connection = connect(path)
    try:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", url, payload, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(content)
    except ValueError:
        return answer.status, content
