"""HTTP API of the gateway for agents on other machines: join, and the upgrade of a connection to an agent's session.

From the upgrade on the connection carries the frames of agent/protocol.py, as a unix socket does on the same machine."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime

import structlog
from aiohttp import web
from django.db import Error as DatabaseError

from sandboxes.agent import internal
from sandboxes.agent.addresses import AgentOutdated
from sandboxes.agent.gateway import AgentGateway, AgentSession, Session
from sandboxes.agent.protocol import RawFrame, UnsupportedVersion
from sandboxes.background import repeat
from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.egress import gateway_tokens
from sandboxes.egress.agent_sessions import routes
from sandboxes.egress.agent_sessions.routes import OpenConnection
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.egress.gateway_tokens import AgentIdentity
from sandboxes.egress.responses import build_error_response, read_bearer
from sandboxes.hosts import agent_routes

log = structlog.get_logger(__name__)
CHECK_SECONDS = 2.0  # between checks of all sessions: the longest time for which a revoked session is open
PING_SECONDS = (
    15.0  # between pings of each agent, which replaces a connection without a request for SILENCE_SECONDS (remote.py)
)
END_SECONDS = 2.0  # for the rows of all sessions at the end of the gateway
PING = RawFrame(0, b'{"verb":"ping"}', b"")
MAX_SESSIONS = 20_000
PROTOCOL_NAME = "leasehold-agent"
UPGRADE_RESPONSE = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL_NAME}\r\n\r\n".encode()


class RemoteSession(AgentSession):
    """Session of an agent whose connection began as an HTTP request.

    Pings notice that an agent's machine or network has gone without an end of the connection."""

    def __init__(self, server: "AgentSessionServer", agent: AgentIdentity, number: int, request: web.Request) -> None:
        super().__init__(server.gateway, agent.ref, number=number)
        self.agent, self.opened = agent, OpenConnection(number, agent.session_sha256)
        self._server, self._http = server, request.protocol
        self._is_pinged = False  # and has not responded yet
        self._pinger = asyncio.get_running_loop().call_later(PING_SECONDS, self._ping)

    def _ping(self) -> None:
        if self._is_pinged:
            self.end("no response to a ping")
            return
        self._pinger = asyncio.get_running_loop().call_later(PING_SECONDS, self._ping)
        self._is_pinged = True
        self.forward_request(_PingResponse(self), PING)

    def note_response(self) -> None:
        self._is_pinged = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pinger.cancel()
        super().connection_lost(exc)
        self._server.note_end(self)
        self._http.connection_lost(exc)  # ends the request


@dataclass(eq=False)
class _PingResponse:
    """Receiver of the response to one ping."""

    session: RemoteSession

    def send(self, content: bytes) -> None:
        self.session.note_response()

    def end(self) -> None:
        """Ignore the end of the session."""


@dataclass
class AgentSessionServer:
    """Handlers of /agent/join and /agent/session. `address` is the one of this gateway's internal listener."""

    gateway: AgentGateway
    database: DatabaseThreads
    now: Callable[[], datetime]
    confirm: Callable[[web.BaseRequest], None]  # called once a request is authenticated
    address: str = ""
    _sessions: dict[uuid.UUID, RemoteSession] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def build_routes(self) -> list[web.RouteDef]:
        return [web.post("/agent/join", self._join), web.get("/agent/session", self._open_session)]

    @asynccontextmanager
    async def serving(self, address: str) -> AsyncIterator[None]:
        """Check sessions during the block, and end all of them after it."""
        self.address, self.gateway.connect_elsewhere = address, self._connect_elsewhere
        watcher = asyncio.create_task(repeat(self.check, "agents' sessions not checked", seconds=CHECK_SECONDS))
        try:
            yield
        finally:
            watcher.cancel()
            for session in [*self._sessions.values()]:
                session.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    while self._sessions:
                        await asyncio.sleep(0)  # the ends of the connections
                    await asyncio.gather(*self._tasks)

    async def _join(self, request: web.Request) -> web.StreamResponse:
        try:
            content = await request.json()
            digest = str(content["session_sha256"])
            joined = await self.database.run(gateway_tokens.join, read_bearer(request), digest, now=self.now())
        except (ValueError, KeyError, TypeError, RecursionError):
            return build_error_response(400, "invalid_request", "session_sha256 must be a SHA-256 in hexadecimal.")
        except DatabaseError as error:
            return _build_unavailable(error)
        if not joined:
            return build_error_response(401, "invalid_token", "The token is unknown, or has been used.")
        self.confirm(request)
        return web.Response(text=json.dumps({"session": digest}), content_type="application/json")

    async def _open_session(self, request: web.Request) -> web.StreamResponse:
        """Upgrade the connection. Return when it has ended."""
        if request.headers.get("Upgrade", "").lower() != PROTOCOL_NAME:
            return build_error_response(426, "upgrade_required", f"The request needs the header Upgrade: {PROTOCOL_NAME}.")
        try:
            agent = await self.database.run(gateway_tokens.find_agent, read_bearer(request))
            if agent is None:
                return build_error_response(401, "invalid_token", "The session is unknown, or its sandbox is gone.")
            if len(self._sessions) >= MAX_SESSIONS:
                return build_error_response(503, "too_many_sessions", "This gateway has no place for a further session.")
            number = await self.database.run(routes.record, agent, self.address, now=self.now())
        except DatabaseError as error:
            return _build_unavailable(error)
        self.confirm(request)
        session = RemoteSession(self, agent, number, request)
        if not self._take_over(request, session):
            self.note_end(session)
        await asyncio.Event().wait()  # cancelled with the connection
        raise AssertionError

    def _take_over(self, request: web.Request, session: RemoteSession) -> bool:
        transport = request.transport
        if transport is None or transport.is_closing():
            return False
        self._sessions[session.agent.sandbox] = session
        transport.set_protocol(session)
        session.connection_made(transport)
        transport.write(UPGRADE_RESPONSE)
        return True

    async def _connect_elsewhere(self, ref: str) -> Session | None:
        """Connect to an agent that another gateway holds. Return None if there is none, or if the database does not respond.

        Raise AgentOutdated."""
        try:
            location = await self.database.run(agent_routes.locate_agent, ref)
        except DatabaseError as error:
            log.error("agent not looked up", ref=ref, error=str(error))
            return None
        if location is not None:
            location.require_spoken()
        if location is None or location.address in ("", self.address):
            return None
        secret, trust = agent_routes.derive_gateway_secret(), agent_routes.build_gateway_trust()
        try:
            return await internal.connect(location.address, secret, ref, location.number, trust)
        except UnsupportedVersion as error:
            raise AgentOutdated(f"No agent is connected: {error}") from error

    def note_end(self, session: RemoteSession) -> None:
        """Record the end of a session's connection."""
        if self._sessions.get(session.agent.sandbox) is session:
            del self._sessions[session.agent.sandbox]
        task = asyncio.get_running_loop().create_task(self._clear(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _clear(self, session: RemoteSession) -> None:
        with contextlib.suppress(DatabaseError, RuntimeError):  # RuntimeError: this process ends. A client is refused then.
            await self.database.run(routes.clear, session.agent.sandbox, session.opened.number, session.refused_version)

    async def check(self) -> None:
        """End sessions that were revoked, or whose agent has connected to another gateway. Raise DatabaseError."""
        sessions = dict(self._sessions)
        if not sessions:
            return
        opened = {pk: session.opened for pk, session in sessions.items()}
        valid = await self.database.run(routes.find_valid, opened, self.address, now=self.now())
        for pk, session in sessions.items():
            if pk not in valid:
                log.info("agent's session ended", ref=session.agent.ref, reason="revoked or replaced")
                session.end()


def _build_unavailable(error: DatabaseError) -> web.Response:
    if not isinstance(error, CONNECTION_ERRORS):
        log.error("agent not admitted", exc_info=error)
        return build_error_response(500, "internal_error", "Internal error in the control plane. It was logged.")
    log.error("agent not admitted", error=str(error))
    return build_error_response(503, "database_unavailable", "The database does not respond. Try again.")
