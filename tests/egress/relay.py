"""Local relay that records its WebSocket connections."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import WSMsgType, web

from tests.support.servers.egress import EventLoopThread, serve_http

AUD, LXM = "did:web:relay.example", "com.atproto.sync.subscribeRepos"


class FakeRelay:
    """WebSocket server. Records the path and headers of connections, and received messages. `open` lists open connections."""

    def __init__(self) -> None:
        self.connections: list[tuple[str, dict[str, str]]] = []
        self.received: list[str | bytes] = []
        self.open: list[web.WebSocketResponse] = []
        self.redirect = ""  # redirect target; empty: accept connections
        self.port = 0

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/xrpc"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeRelay"]:
        """Listen for the duration of the block, always at the same port."""
        async with serve_http(self._any, self.port) as self.port:
            yield self

    async def _any(self, request: web.Request) -> web.StreamResponse:
        self.connections.append((request.path_qs, {name.lower(): value for name, value in request.headers.items()}))
        if self.redirect:
            raise web.HTTPFound(self.redirect)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open.append(socket)
        try:
            async for message in socket:
                if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                    self.received.append(message.data)
        finally:
            self.open.remove(socket)
        return socket

    async def send(self, *events: str | bytes) -> None:
        for socket in self.open:
            for event in events:
                await (socket.send_str(event) if isinstance(event, str) else socket.send_bytes(event))


@dataclass
class RelaySwitch:
    """A relay that can be stopped and started."""

    loop: EventLoopThread
    relay: FakeRelay = field(default_factory=FakeRelay)
    running: ExitStack = field(default_factory=ExitStack)

    def on(self) -> None:
        self.running.enter_context(self.loop.run_context(self.relay.listening()))

    def off(self) -> None:
        self.running.close()

    def send(self, *events: str | bytes) -> None:
        self.loop.run(self.relay.send(*events))

    def is_open(self) -> bool:
        return bool(self.relay.open)
