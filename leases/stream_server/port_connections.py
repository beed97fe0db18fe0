"""Connections to TCP ports in sandboxes, as unix sockets of this process for an HTTP client.

Each connection is an operation in the sandbox (image/agent/ports.py), whose stdin and stdout are the two directions."""

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import structlog

from leases.stream_server.agent_link import WAIT_SECONDS, AgentLink
from sandboxes.agent.client import ConnectionLost, NotConnected
from sandboxes.agent.gateway import AgentGateway
from sandboxes.agent.protocol import ProtocolError

log = structlog.get_logger(__name__)
CHUNK_BYTES = 1 << 18
ABANDONED_SECONDS = 60  # without a request, after which the agent ends the operation
MAX_CONNECTIONS_PER_PORT = 32  # processes in the sandbox
IDLE_SECONDS = 30.0  # of a port without a request, after which its socket and its connections are closed
KEEPALIVE_SECONDS = 10.0  # of an idle connection
ERROR_BYTES = 4096
AGENT_ERRORS = (ConnectionLost, NotConnected, ProtocolError, TimeoutError)


class Port:
    """One TCP port of one sandbox, with an HTTP client for it."""

    def __init__(self, gateway: AgentGateway, container: str, number: int, path: Path) -> None:
        self._gateway, self._container, self._number, self._path = gateway, container, number, path
        self.users, self.idle_since = 0, 0.0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._relay, self._path)
        os.chmod(self._path, 0o600)
        connector = aiohttp.UnixConnector(
            os.fspath(self._path), limit=MAX_CONNECTIONS_PER_PORT, keepalive_timeout=KEEPALIVE_SECONDS
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=300.0)
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        await self.session.close()
        if self._server:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until the program in the sandbox ends it, or the client has closed it."""
        run_id, link = f"ports/{uuid.uuid4().hex}", None
        try:
            link = await AgentLink.open(self._gateway, self._container)
            command = json.dumps({"words": ["connect", str(self._number)]}).encode()
            head = {"verb": "exec", "boot": link.boot, "timeout": 0, "idle": ABANDONED_SECONDS, "cap": ERROR_BYTES}
            head |= {"keep": "stream", "open": True, "command_bytes": len(command)}
            _, state = await link.request(run_id, head, command)
            if state.state == "running":
                await self._relay_both(link, run_id, reader, writer)
        except AGENT_ERRORS as error:
            log.info("connection to a port ended", port=self._number, error=f"{type(error).__name__}: {error}")
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the server stops
        finally:
            if link is not None:
                with contextlib.suppress(*AGENT_ERRORS, asyncio.CancelledError):
                    await link.request(run_id, {"verb": "kill", "forget": True})
                link.close()
            writer.close()

    async def _relay_both(
        self, link: AgentLink, run_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sending = asyncio.create_task(_send(link, run_id, reader))
        receiving = asyncio.create_task(_receive(link, run_id, writer))
        try:
            done, _ = await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_COMPLETED)
            if sending in done and not sending.exception():  # the client may still be reading
                await receiving
            for task in done:
                task.result()
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)


async def _send(link: AgentLink, run_id: str, reader: asyncio.StreamReader) -> None:
    """Send the client's bytes until its end of file. Return then; raise ConnectionResetError if the program has ended."""
    offset = 0
    while True:
        chunk = await reader.read(CHUNK_BYTES)
        sent_until = offset + len(chunk)
        while True:
            head = {"verb": "write", "offset": offset, "last": not chunk}
            _, state = await link.request(run_id, head, chunk, wait=WAIT_SECONDS)
            if state.state != "running":
                raise ConnectionResetError
            if state.written >= sent_until:
                break
        offset = sent_until
        if not chunk:
            return


async def _receive(link: AgentLink, run_id: str, writer: asyncio.StreamWriter) -> None:
    """Pass the program's bytes to the client until the program has ended its direction."""
    offset = 0
    while True:
        head = {"verb": "read", "stream": "stdout", "offset": offset}
        frame, state = await link.request(run_id, head, wait=WAIT_SECONDS)
        if state.state not in ("running", "ended") or state.offset != offset:
            raise ConnectionResetError
        if frame.body:
            writer.write(frame.body)
            await writer.drain()
            offset += len(frame.body)
        elif state.state == "ended" and not state.more:
            return


class Ports:
    """Ports in use, by the agent's id and the number of the port."""

    def __init__(self, gateway: AgentGateway, directory: Path) -> None:
        self._gateway, self._directory = gateway, directory
        self._ports: dict[tuple[str, int], Port] = {}
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def use(self, container: str, number: int) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield an HTTP client whose every connection leads to this port."""
        async with self._lock:
            port = self._ports.get((container, number))
            if port is None:
                port = Port(self._gateway, container, number, self._directory / f"{uuid.uuid4().hex[:8]}.sock")
                await port.open()
                self._ports[container, number] = port
            port.users += 1
        try:
            yield port.session
        finally:
            port.users -= 1
            port.idle_since = asyncio.get_running_loop().time()

    async def close_idle(self) -> None:
        """Close the ports that have had no request for IDLE_SECONDS."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            for key, port in [*self._ports.items()]:
                if not port.users and now > port.idle_since + IDLE_SECONDS:
                    del self._ports[key]
                    await port.close()

    async def close(self) -> None:
        """Close all ports."""
        for port in self._ports.values():
            await port.close()
        self._ports.clear()
