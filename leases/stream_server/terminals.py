"""Terminals over WebSocket.

Binary messages are the output and the input of the terminal. Text messages are JSON objects with a `type`: the server sends
`start` (offset of the first byte of output), `gap` (lost_bytes that are not available any more), `exit` (exit_code) and `error`
(code, detail); the client sends `resize` (rows, columns). A client that reconnects continues with `?offset=` and the number of
bytes that it has received. Several clients may be connected to one terminal."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import structlog
from aiohttp import WSMsgType, web
from django.db import Error as DatabaseError

from leases.errors import GrantEnded
from leases.stream_server import access
from leases.stream_server.agent_link import WAIT_SECONDS, AgentLink
from leases.stream_server.connections import Connections
from leases.stream_server.grants import TerminalGrant
from sandboxes.agent.client import AgentOutdated, ConnectionLost, NotConnected
from sandboxes.agent.gateway import AgentGateway
from sandboxes.agent.protocol import ProtocolError, RunState
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.errors import SandboxError

log = structlog.get_logger(__name__)
HEARTBEAT_SECONDS = 30.0
MAX_INPUT_BYTES = 1 << 18  # of one message
MAX_SIZE = 1000  # rows or columns
USE_INTERVAL_SECONDS = 15.0  # between renewals of the lease because of input
RECONNECT_SECONDS = 5.0  # for the agent to connect again
RECONNECT_PAUSE_SECONDS = 0.1
WRITE_WAIT_SECONDS = 5.0  # for room in the input of the program
MAX_REASON_BYTES = 123  # of a close frame (RFC 6455, section 5.5)
AGENT_OUTDATED_REASON = "agent_outdated: the sandbox runs the agent of another version until it has slept and woken."
# Close codes of RFC 6455 for applications: 4000 plus a status of HTTP.
CODE_ENDED, CODE_FORBIDDEN, CODE_INVALID, CODE_UNAVAILABLE = 4410, 4403, 4400, 4503


class TerminalClosed(Exception):
    """The connection ends with a close code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class TerminalAgent:
    """The terminal of one process, by requests to its agent. The link is opened again after a loss.

    `resume` is awaited if the agent does not respond to input: its sandbox may have been suspended."""

    def __init__(self, gateway: AgentGateway, container: str, process: UUID, resume: Callable[[], Awaitable[None]]) -> None:
        self._gateway, self._container, self._run, self._resume = gateway, container, str(process), resume
        self._link: AgentLink | None = None

    async def request(self, head: dict[str, Any], body: bytes = b"", *, wait: float = 0.0) -> tuple[bytes, RunState]:
        """Send a request that may be repeated, and return the body and the state of the response. Raise TerminalClosed."""
        lost_at = 0.0
        while True:
            try:
                if self._link is None or not self._link.is_open:
                    self._link = await AgentLink.open(self._gateway, self._container)
                frame, state = await self._link.request(self._run, head, body, wait=wait)
            except TimeoutError:
                if head["verb"] != "read":  # output waits as long as the sandbox is suspended
                    await self._resume()
                continue
            except AgentOutdated as error:
                raise TerminalClosed(CODE_UNAVAILABLE, AGENT_OUTDATED_REASON) from error
            except (ConnectionLost, NotConnected, ProtocolError) as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() > lost_at + RECONNECT_SECONDS:
                    raise TerminalClosed(CODE_UNAVAILABLE, "The sandbox does not respond.") from error
                await asyncio.sleep(RECONNECT_PAUSE_SECONDS)
                continue
            if state.state not in ("running", "ended"):
                raise TerminalClosed(CODE_ENDED, "The terminal has ended.")
            return frame.body, state

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


class TerminalInput:
    """Input of one terminal from all of its connections: each byte is written once, in the order of the calls."""

    def __init__(self) -> None:
        self._lock, self._offset, self.users = asyncio.Lock(), -1, 0

    async def write(self, agent: TerminalAgent, content: bytes) -> None:
        """Write, and return once there is room for more. Raise TerminalClosed.

        A request is repeated with the same offset after a lost response, and the agent skips bytes that it has received."""
        async with self._lock:
            if self._offset < 0:
                _, state = await agent.request({"verb": "write", "offset": 0, "last": False})
                self._offset = state.written
            head = {"verb": "write", "offset": self._offset, "last": False}
            try:
                _, state = await agent.request(head, content, wait=WRITE_WAIT_SECONDS)
            except BaseException:
                self._offset = -1  # the agent may have received the bytes
                raise
            self._offset = state.written


@dataclass
class Terminals:
    """Handler of /terminals/GRANT."""

    gateway: AgentGateway
    database: DatabaseThreads
    connections: Connections
    now: Callable[[], datetime]
    _inputs: dict[UUID, TerminalInput] = field(default_factory=dict)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one connection until the terminal, the lease or the connection ends. Raise the errors of `open_terminal`."""
        grant = TerminalGrant.decode(request.match_info["grant"], now=self.now())
        offset = _parse_offset(request)
        with self.connections.track(grant) as connection:
            container = await self.database.run(access.open_terminal, grant, now=self.now())
            socket = web.WebSocketResponse(max_msg_size=MAX_INPUT_BYTES, heartbeat=HEARTBEAT_SECONDS)
            await socket.prepare(request)
            names = {"lease": str(grant.lease), "process": str(grant.process), "actor": grant.actor}
            log.info("terminal connected", **names, read_only=grant.read_only)
            agent = TerminalAgent(self.gateway, container, grant.process, lambda: self._use(grant))
            code, reason = 1000, ""
            try:
                await self._serve(socket, agent, grant, offset)
                code, reason = await self._find_close(grant)
            except TerminalClosed as closed:
                code, reason = closed.code, str(closed)
            except asyncio.CancelledError:
                if connection.ended is None:
                    raise
                code, reason = _build_close(connection.ended)
            finally:
                agent.close()
                log.info("terminal disconnected", **names)
                with suppress(ConnectionError, RuntimeError, TimeoutError):
                    await socket.close(code=code, message=reason.encode()[:MAX_REASON_BYTES])
            return socket

    async def _serve(self, socket: web.WebSocketResponse, agent: TerminalAgent, grant: TerminalGrant, offset: int) -> None:
        """Relay output and input until the first of both ends. Raise TerminalClosed."""
        tasks = [
            asyncio.create_task(_send_output(socket, agent, offset)),
            asyncio.create_task(self._receive(socket, agent, grant)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) and not isinstance(error, ConnectionError):
                    raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, socket: web.WebSocketResponse, agent: TerminalAgent, grant: TerminalGrant) -> None:
        terminal_input = self._inputs.setdefault(grant.process, TerminalInput())
        terminal_input.users += 1
        used_at = time.monotonic()  # `open_terminal` has just renewed the lease
        try:
            async for message in socket:
                if message.type == WSMsgType.BINARY and not grant.read_only:
                    if time.monotonic() - used_at > USE_INTERVAL_SECONDS:
                        await self._use(grant)
                        used_at = time.monotonic()
                    await terminal_input.write(agent, message.data)
                elif message.type == WSMsgType.TEXT and not grant.read_only:
                    await agent.request({"verb": "resize", **_parse_resize(message.data)})
                elif message.type in (WSMsgType.BINARY, WSMsgType.TEXT):
                    await _send_json(socket, type="error", code="read_only", detail="This connection is read-only.")
        finally:
            terminal_input.users -= 1
            if not terminal_input.users:
                self._inputs.pop(grant.process, None)

    async def _find_close(self, grant: TerminalGrant) -> tuple[int, str]:
        """Return the close code and the reason after the end of the program, which may be due to the end of the lease."""
        try:
            ended = await self.database.run(access.find_ended, [grant], now=self.now())
        except DatabaseError as error:
            log.warning("lease of a terminal not read", lease=str(grant.lease), error=str(error))
            ended = {}
        return _build_close(ended[grant]) if grant in ended else (1000, "")

    async def _use(self, grant: TerminalGrant) -> None:
        try:
            await self.database.run(access.use_terminal, grant, now=self.now())
        except SandboxError as refused:
            raise TerminalClosed(*_build_close(refused)) from refused
        except DatabaseError as error:  # input goes on, and the next one renews the lease
            log.warning("lease not renewed by a terminal", lease=str(grant.lease), error=str(error))


def _build_close(refused: SandboxError) -> tuple[int, str]:
    """Return the close code and the reason. After CODE_FORBIDDEN a client may continue with a new URL."""
    return CODE_FORBIDDEN if isinstance(refused, GrantEnded) else CODE_ENDED, str(refused)


async def _send_output(socket: web.WebSocketResponse, agent: TerminalAgent, offset: int) -> None:
    """Send output from an offset until the program has ended. A slow client misses output that the agent drops meanwhile."""
    is_first = True
    while True:
        head = {"verb": "read", "stream": "stdout", "offset": offset}
        content, state = await agent.request(head, wait=0 if is_first else WAIT_SECONDS)
        if is_first:
            await _send_json(socket, type="start", offset=offset)
            is_first = False
        if state.offset > offset:
            await _send_json(socket, type="gap", lost_bytes=state.offset - offset)
        offset = max(offset, state.offset + len(content))
        if content:
            await socket.send_bytes(content)
        elif state.exit_code is not None and not state.more:
            await _send_json(socket, type="exit", exit_code=state.exit_code)
            return


async def _send_json(socket: web.WebSocketResponse, **fields: Any) -> None:
    await socket.send_str(json.dumps(fields))


def _parse_offset(request: web.Request) -> int:
    text = request.query.get("offset", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise web.HTTPBadRequest(text="offset must be a number of bytes.")
    return int(text)


def _parse_resize(text: str) -> dict[str, int]:
    """Return rows and columns. Raise TerminalClosed for another message."""
    try:
        fields = json.loads(text)
        rows, columns = fields["rows"], fields["columns"]
        is_valid = fields["type"] == "resize" and all(type(size) is int and 0 < size <= MAX_SIZE for size in (rows, columns))
    except (ValueError, TypeError, KeyError, RecursionError):
        is_valid = False
    if not is_valid:
        raise TerminalClosed(CODE_INVALID, "A text message must be a resize with rows and columns from 1 to 1000.")
    return {"rows": rows, "columns": columns}
