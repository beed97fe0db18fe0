"""Byte streams of one proxied connection: backpressure, limits and byte counts."""

import asyncio
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from sandboxes.egress.allow_list.connections import ConnectionResult
from sandboxes.egress.refusals import CallRefused
from sandboxes.redaction.streams import SecretRedactor

CHUNK_BYTES = 64 << 10
IDLE_SECONDS = 300.0  # without a byte in either direction
IDLE_SECONDS_AFTER_END = 10.0  # once the sandbox has ended its side: its program has probably gone
MAX_SECONDS = 3600.0  # of one connection


class ConnectionCut(Exception):
    """The proxy ends the connection: a limit is reached. `code` is stored in the row."""

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(code)


class Budget(Protocol):
    """Bytes that may still be transferred."""

    remaining: int


@dataclass
class Traffic:
    """Bytes and times of one connection."""

    result: ConnectionResult
    budget: Budget
    remaining: int  # bytes of this connection
    cut_reason: str = ""
    idle_limit: float = IDLE_SECONDS
    started: float = field(default_factory=time.monotonic)
    active: float = field(default_factory=time.monotonic)  # monotonic time of the last byte

    def count(self, sent: int = 0, received: int = 0) -> None:
        """Count a chunk before it is forwarded. Raise ConnectionCut if it exceeds a limit."""
        size = sent + received
        if size > self.remaining:
            raise ConnectionCut("connection_bytes_exceeded")
        if size > self.budget.remaining:
            raise ConnectionCut("lease_bytes_exceeded")
        self.remaining -= size
        self.budget.remaining -= size
        self.result.sent_bytes += sent
        self.result.received_bytes += received
        self.active = time.monotonic()

    def find_timeout(self) -> str:
        """Return the reason to end the connection now, or ""."""
        now = time.monotonic()
        if now - self.active > self.idle_limit:
            return "idle"
        return "too_long" if now - self.started > MAX_SECONDS else ""


@dataclass(frozen=True)
class TlsServer:
    """Server to which the proxy speaks TLS."""

    context: ssl.SSLContext
    name: str


@dataclass
class Tunnel:
    """Streams to the sandbox, and to the upstream once connected."""

    client_reader: asyncio.StreamReader
    client_writer: asyncio.StreamWriter
    upstream_reader: asyncio.StreamReader | None = None
    upstream_writer: asyncio.StreamWriter | None = None
    redactor: SecretRedactor = field(default_factory=SecretRedactor)  # of the responses

    async def connect(
        self, addresses: list[str], port: int, traffic: Traffic, *, timeout: float, server: TlsServer | None = None
    ) -> None:
        """Connect to the first address that accepts. Raise CallRefused if none does within `timeout` seconds.

        With `server` the proxy itself speaks TLS, and accepts only a certificate of this server."""
        context, name = (server.context, server.name) if server else (None, None)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for address in addresses:
                    traffic.result.address = address
                    with suppress(OSError):
                        self.upstream_reader, self.upstream_writer = await asyncio.open_connection(
                            address, port, limit=CHUNK_BYTES, ssl=context, server_hostname=name
                        )
                        return
        raise CallRefused(502, "upstream_unreachable", "The upstream could not be reached.")

    async def relay(self, traffic: Traffic, *, first: bytes, body_bytes: int | None = None) -> None:
        """Forward in both directions until both sides have ended, beginning with `first` to the upstream.

        With `body_bytes` the sandbox sends that many bytes, further ones are not read, and the upstream's end ends the relay.
        Each direction waits until the other side has read. Raise ConnectionCut or OSError."""
        assert self.upstream_reader
        assert self.upstream_writer
        traffic.count(sent=len(first))
        self.upstream_writer.write(first)
        upload = asyncio.create_task(self._upload(traffic, body_bytes))
        download = asyncio.create_task(self._download(traffic))
        try:
            if body_bytes is None:
                await asyncio.gather(upload, download)
            else:  # a server may answer before it has read the body
                await asyncio.wait([upload, download], return_when=asyncio.FIRST_EXCEPTION)
                if upload.done() and isinstance(upload.exception(), ConnectionCut):
                    await upload
                await download
        finally:
            for task in (upload, download):
                task.cancel()
            await asyncio.gather(upload, download, return_exceptions=True)

    async def _upload(self, traffic: Traffic, body_bytes: int | None) -> None:
        assert self.upstream_writer
        left = body_bytes
        while left is None or left > 0:
            chunk = b""
            with suppress(ConnectionError):  # the sandbox's program has ended
                chunk = await self.client_reader.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
            if not chunk:
                break
            traffic.count(sent=len(chunk))
            self.upstream_writer.write(chunk)
            await self.upstream_writer.drain()
            left = None if left is None else left - len(chunk)
        if body_bytes is None:
            traffic.idle_limit = IDLE_SECONDS_AFTER_END
            _end_writing(self.upstream_writer)

    async def _download(self, traffic: Traffic) -> None:
        assert self.upstream_reader
        is_ended = False
        while not is_ended:
            chunk = await self.upstream_reader.read(CHUNK_BYTES)
            is_ended = not chunk
            traffic.count(received=len(chunk))
            try:
                self.client_writer.write(self.redactor.end() if is_ended else self.redactor.feed(chunk))
                await self.client_writer.drain()
            except ConnectionError:  # the sandbox's program has ended
                return
        _end_writing(self.client_writer)
        await flush(self.client_writer)

    def close_upstream(self) -> None:
        if self.upstream_writer:
            self.upstream_writer.transport.abort()


async def flush(writer: asyncio.StreamWriter) -> None:
    """Wait until all written bytes are in the socket. `drain` alone returns while less than its limit is buffered."""
    writer.transport.set_write_buffer_limits(high=0)
    with suppress(ConnectionError):
        await writer.drain()


def _end_writing(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the other side has gone already
        if writer.can_write_eof():
            writer.write_eof()
