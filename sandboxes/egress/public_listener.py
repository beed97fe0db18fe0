"""Listener of the gateway for connections from other networks, with limits until a caller is authenticated.

A connection that is not authenticated in time is closed, whether it waits in the TLS handshake, in the headers of its first
request or for the database. Their number is limited, in all and for each address."""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from aiohttp import web

log = structlog.get_logger(__name__)
AUTHENTICATION_SECONDS = 10.0  # from the connection to an authenticated request, with the TLS handshake
MAX_UNAUTHENTICATED = 2048
MAX_UNAUTHENTICATED_PER_ADDRESS = 512  # a proxy that ends TLS has one address
MAX_HEADER_BYTES = 32 << 10  # of the first request
ACCEPT_PAUSE_SECONDS = 0.2  # while there are too many open files
BACKLOG = 512


class PublicConnection(asyncio.Protocol):
    """One connection, forwarded to aiohttp's protocol. `is_settled` once it is authenticated or has ended."""

    def __init__(self, http: Any) -> None:
        self._http, self.is_settled = http, asyncio.Event()
        self._head: bytearray | None = bytearray()  # of the first request, until it is complete
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            if b"\r\n\r\n" in self._head:
                self._head = None
            elif len(self._head) > MAX_HEADER_BYTES:
                self.cut()
                return
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        result: bool | None = self._http.eof_received()
        return result

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_settled.set()
        self._http.connection_lost(exc)

    def cut(self) -> None:
        if self._transport:
            self._transport.abort()


class PublicListener:
    """Listener of one address. `confirm` is called when the caller of a request is known."""

    def __init__(self, server: web.Server, context: ssl.SSLContext | None) -> None:
        self._server, self._context = server, context
        self._unauthenticated: dict[Any, PublicConnection] = {}  # by aiohttp's protocol
        self._by_address = Counter[str]()
        self._tasks: set[asyncio.Task[None]] = set()

    def confirm(self, request: web.BaseRequest) -> None:
        """Lift the limits of a request's connection."""
        if connection := self._unauthenticated.get(request.protocol):
            connection.is_settled.set()

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listeners = [self._bind(family, address) for family, _, _, _, address in found]
        try:
            for listener in listeners:
                loop.add_reader(listener, self._accept, listener)
            yield
        finally:
            for listener in listeners:
                loop.remove_reader(listener)
                listener.close()
            for task in self._tasks:
                task.cancel()

    def _bind(self, family: int, address: Any) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, peer = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has gone
            return
        except OSError as error:  # too many open files
            log.error("gateway accepts no connection", error=str(error))
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_PAUSE_SECONDS, self._resume, listener)
            return
        address = str(peer[0])
        is_full = len(self._unauthenticated) >= MAX_UNAUTHENTICATED
        if is_full or self._by_address[address] >= MAX_UNAUTHENTICATED_PER_ADDRESS:
            connection.close()
            return
        connection.setblocking(False)
        task = loop.create_task(self._admit(connection, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() != -1:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _admit(self, connection: socket.socket, address: str) -> None:
        """Open a connection, and close it unless it is authenticated in time."""
        http = self._server()
        protocol = self._unauthenticated[http] = PublicConnection(http)
        self._by_address[address] += 1
        handshake: dict[str, Any] = {}
        if self._context:
            handshake = {"ssl": self._context, "ssl_handshake_timeout": AUTHENTICATION_SECONDS}
        try:
            async with asyncio.timeout(AUTHENTICATION_SECONDS):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection, **handshake)
                await protocol.is_settled.wait()
        except (TimeoutError, OSError, asyncio.CancelledError):  # OSError: no TLS, or the peer has gone
            protocol.cut()
        finally:
            del self._unauthenticated[http]
            self._by_address -= Counter([address])
