"""Gateway between the agents in the sandboxes of a host and the processes of the control plane.

Agents connect to a socket of their sandbox's slot. Web and worker processes connect to one private socket, and name a container
there. The gateway forwards requests to the agent of that container, under ids of its own, and each response to the client that
sent the request. It checks who an agent is and the frames that it sends, but not their content: that is up to the client."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import structlog

from sandboxes.agent.identity import UnknownPeer, identify_container
from sandboxes.agent.protocol import (
    HEADER,
    MAX_REQUEST_BODY_BYTES,
    MAX_REQUEST_HEAD_BYTES,
    FrameReader,
    ProtocolError,
    RawFrame,
    UnsupportedVersion,
    parse_hello,
)

log = structlog.get_logger(__name__)
OUTDATED_SECONDS = 30.0  # several times the longest pause of an agent between two connections
HELLO_TIMEOUT_SECONDS = 5.0
REJECTION_PAUSE_SECONDS = 0.2  # for which a slot accepts nothing after connections of other processes than its agent
REJECTION_LOG_SECONDS = 60.0  # between two lines about the rejections of a slot
BACKLOG = 64  # connections of a slot that wait to be accepted, all of them at once
MAX_UNSENT_BYTES = 2 * MAX_REQUEST_BODY_BYTES  # to one agent; beyond, it does not read, and the next request ends its session
MAX_PENDING_REQUESTS = 1024  # to one agent, without a response
MAX_WAIT_SECONDS = 0.5  # of a client for an agent to connect: the agent of a container that has just started
# After the gateway's start, for all agents to connect again. Longer than RECONNECT_SECONDS in image/agent/connection.py.
SETTLE_SECONDS = 3.0
EXEC_HEAD_START = b'{"verb":"exec",'  # as encoded by the client
# Why an operation was left to the engine: no agent was connected, its container did not run, it could not start a process or
# retains too many results, or the command is too long for a request.
FALLBACK_REASONS = ("not_connected", "not_running", "busy", "too_long")
IdentifyPeer = Callable[[socket.socket, Path], str]  # (connection, directory of the socket) -> container


def encode_control_frame(fields: Mapping[str, object]) -> bytes:
    """Encode a frame with the id 0, without a body."""
    head = json.dumps(fields).encode()
    return HEADER.pack(0, len(head), 0) + head


class ResponseReceiver(Protocol):
    """Sender of requests to an agent: another process, or a server in this one."""

    def send(self, content: bytes) -> None:
        """Accept one encoded response, under the id of the receiver's request."""

    def end(self) -> None:
        """The agent's session has ended."""


class Session(Protocol):
    """Way to the agent of one sandbox, for a server in this process."""

    hello: bytes  # greeting of the agent

    def attach(self, client: ResponseReceiver) -> None:
        """Add a client, whose `end` is called at the end of the session."""

    def detach(self, client: ResponseReceiver) -> None:
        """Remove a client. Idempotent."""

    def forward_request(self, client: ResponseReceiver, frame: RawFrame) -> None:
        """Send a client's request."""

    def end(self, violation: str = "") -> None:
        """End the session of an agent that has violated the protocol."""


class AgentSession(asyncio.Protocol):
    """Connection of the agent of one container, or of the sandbox with a ref.

    `number` is that of the connection if the gateway is one of several, so that clients do not reach an outdated one."""

    def __init__(self, gateway: "AgentGateway", container: str, *, number: int = 0) -> None:
        self.container, self.number, self.hello, self.violation = container, number, b"", ""
        self.refused_version: int | None = None  # of the protocol, if it is not spoken
        self.clients: set[ResponseReceiver] = set()
        self._gateway, self._reader, self._ids = gateway, FrameReader(), itertools.count(1)
        self._pending: dict[int, tuple[ResponseReceiver, int]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_SECONDS, self.end, "no greeting")

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                if self.hello:
                    self._forward_response(frame)
                else:
                    self._accept_hello(frame)
        except UnsupportedVersion as error:
            self.refused_version = error.version
            self._gateway.note_outdated(self.container, frame.encode(0), str(error))
            self._transport.abort()
        except ProtocolError as error:
            self.end(str(error))

    def attach(self, client: ResponseReceiver) -> None:
        self.clients.add(client)

    def detach(self, client: ResponseReceiver) -> None:
        self.clients.discard(client)

    def forward_request(self, client: ResponseReceiver, frame: RawFrame) -> None:
        """Send a client's request to the agent. End the session if the agent does not read or respond."""
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES or len(self._pending) >= MAX_PENDING_REQUESTS:
            self.end("requests are not read")
            return
        request_id = next(self._ids) % (1 << 32) or next(self._ids)
        self._pending[request_id] = client, frame.request_id
        self._gateway.counts["executions"] += frame.head.startswith(EXEC_HEAD_START)
        self._transport.write(frame.encode(request_id))

    def end(self, violation: str = "") -> None:
        """End the session and the connections of its clients."""
        if violation and not self.violation:
            self.violation = violation
            self._gateway.counts["violations"] += 1
            log.warning("agent disconnected", container=self.container[:12], reason=violation)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._gateway.remove_session(self)
        for client in [*self.clients]:
            client.end()

    def _accept_hello(self, frame: RawFrame) -> None:
        parse_hello(frame.parse())
        self._timer.cancel()
        self.hello = frame.encode(0)
        self._gateway.add_session(self)

    def _forward_response(self, frame: RawFrame) -> None:
        client, request_id = self._pending.pop(frame.request_id, (None, 0))
        if client is None:
            raise ProtocolError("response without a request")
        client.send(frame.encode(request_id))


class ClientSession(asyncio.Protocol):
    """Connection of a process of the control plane, to the agent of one container."""

    def __init__(self, gateway: "AgentGateway") -> None:
        self._gateway = gateway
        self._reader = FrameReader(max_head_bytes=MAX_REQUEST_HEAD_BYTES, max_body_bytes=MAX_REQUEST_BODY_BYTES)
        self._session: AgentSession | None = None
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._handle(frame)
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            log.error("invalid request to the gateway", error=str(error))
            self.end()

    def _handle(self, frame: RawFrame) -> None:
        if self._session is not None and frame.request_id:
            self._session.forward_request(self, frame)
        elif self._session is not None:
            self._session.end(str(frame.parse().head["violation"]))
        elif self._opening is None:
            head = frame.parse().head
            if "fallback" in head:
                self._gateway.count_fallback(str(head["fallback"]))
                return
            opening = self._open(str(head["sandbox"]), float(head["wait"]), int(head.get("number", 0)))
            self._opening = asyncio.get_running_loop().create_task(opening)
        else:
            raise ProtocolError("request before the greeting")

    async def _open(self, container: str, wait: float, number: int) -> None:
        session = await self._gateway.wait_for_session(container, wait)
        if session is None or session.number != number:
            self.send(self._gateway.find_outdated(container) or encode_control_frame({"error": "not_connected"}))
            self._transport.close()
            return
        self._session = session
        session.clients.add(self)
        self.send(session.hello)

    def send(self, content: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(content)

    def end(self) -> None:
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._session is not None:
            self._session.clients.discard(self)


class AgentGateway:
    """Sessions of the agents of this host. All methods run in the event loop of `listening`.

    `counts` has the numbers of sessions begun (`sessions`), of requests to start a command or file operation (`executions`), of
    operations left to the engine (`fallbacks REASON`), of violations of the protocol (`violations`) and of connections by other
    processes than an agent (`rejections`), since the start of this process."""

    def __init__(self, identify: IdentifyPeer = identify_container) -> None:
        self.counts = Counter[str]()
        self._identify = identify
        self._sessions: dict[str, AgentSession] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}  # of clients, by container
        self._tasks: set[asyncio.Task[object]] = set()
        self._outdated: dict[str, tuple[bytes, float]] = {}  # by container: greeting of its agent, and when
        self._rejections: dict[Path, tuple[int, float]] = {}  # by socket: number since the last line in the log, and its time
        self._settled_at = 0.0
        self.connect_elsewhere: Callable[[str], Awaitable[Session | None]] | None = None  # to the gateway that has an agent

    @contextlib.asynccontextmanager
    async def listening(self, slot_sockets: list[Path], client_socket: Path) -> AsyncIterator[None]:
        """Serve for the duration of the block. At its end all sessions end.

        The client socket is left. A process whose connection to it is refused waits for the gateway's next start before it
        gives up the result of a run."""
        loop = asyncio.get_running_loop()
        self._settled_at = loop.time() + SETTLE_SECONDS
        listeners = {bind_listener(path, mode=0o666): path for path in slot_sockets}
        server = await loop.create_unix_server(lambda: ClientSession(self), sock=bind_listener(client_socket, mode=0o600))
        try:
            for listener, path in listeners.items():
                loop.add_reader(listener, self._accept, listener, path)
            yield
        finally:
            for listener in listeners:
                loop.remove_reader(listener)
                listener.close()
            server.close()
            for session in [*self._sessions.values()]:
                session.end()
            for path in slot_sockets:
                path.unlink(missing_ok=True)

    def count_fallback(self, reason: str) -> None:
        """Count an operation left to the engine. Raise ValueError for an unknown reason."""
        if reason not in FALLBACK_REASONS:
            raise ValueError(reason)
        self.counts[f"fallbacks {reason}"] += 1

    def read_counts(self) -> dict[str, int]:
        """Return the counts, and the numbers of agents that are connected now (`connected`) and not spoken to (`outdated`)."""
        self._forget_outdated()
        return {**self.counts, "connected": len(self._sessions), "outdated": len(self._outdated)}

    def note_outdated(self, container: str, greeting: bytes, reason: str) -> None:
        """Note an agent whose version is not spoken. It connects again and again. Clients get its greeting."""
        if container not in self._outdated:
            log.warning("agent of another version", container=container[:12], reason=reason)
        self._outdated[container] = greeting, time.monotonic()
        self._wake_waiters(container)

    def find_outdated(self, container: str) -> bytes:
        """Return the greeting of an agent that is not spoken to, b"" if there is none."""
        self._forget_outdated()
        return self._outdated.get(container, (b"", 0.0))[0]

    def _forget_outdated(self) -> None:
        """Forget agents that have not connected for a while: their sandboxes have ended."""
        since = time.monotonic() - OUTDATED_SECONDS
        self._outdated = {container: noted for container, noted in self._outdated.items() if noted[1] > since}

    def _accept(self, listener: socket.socket, path: Path) -> None:
        """Accept all connections that wait, so that those which are rejected do not delay the agent behind them."""
        rejected = False
        for _ in range(BACKLOG + 1):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                break
            except ConnectionAbortedError:  # the peer has gone
                continue
            except OSError as error:  # too many open files
                log.error("gateway accepts no connection", error=str(error))
                rejected = True
                break
            rejected = not self._begin_session(connection, path) or rejected
        if rejected:
            self._pause(listener, path)

    def _begin_session(self, connection: socket.socket, path: Path) -> bool:
        """Serve the agent of a container. Return False if the process that connected is none of this slot."""
        try:
            container = self._identify(connection, path.parent)
        except UnknownPeer as refused:
            self._note_rejection(path, str(refused))
            connection.close()
            return False
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        task = loop.create_task(loop.connect_accepted_socket(lambda: AgentSession(self, container), connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _note_rejection(self, path: Path, reason: str) -> None:
        """Count a rejected connection. Log the first one of a slot, and a line with their number each minute."""
        self.counts["rejections"] += 1
        now = asyncio.get_running_loop().time()
        count, logged_at = self._rejections.get(path, (0, -REJECTION_LOG_SECONDS))
        if now < logged_at + REJECTION_LOG_SECONDS:
            self._rejections[path] = count + 1, logged_at
            return
        log.info("connection to the gateway rejected", slot=path.parent.name, reason=reason, further=count)
        self._rejections[path] = 0, now

    def _pause(self, listener: socket.socket, path: Path) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(REJECTION_PAUSE_SECONDS, self._resume, listener, path)

    def _resume(self, listener: socket.socket, path: Path) -> None:
        if listener.fileno() != -1:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener, path)

    def add_session(self, session: AgentSession) -> None:
        previous, self._sessions[session.container] = self._sessions.get(session.container), session
        self.counts["sessions"] += 1
        self._outdated.pop(session.container, None)
        if previous is not None:
            previous.end()
        self._wake_waiters(session.container)

    def _wake_waiters(self, container: str) -> None:
        for waiter in self._waiters.get(container, ()):
            if not waiter.done():
                waiter.set_result(None)

    def remove_session(self, session: AgentSession) -> None:
        if self._sessions.get(session.container) is session:
            del self._sessions[session.container]

    async def open_session(self, container: str, seconds: float) -> Session | None:
        """Like `wait_for_session`, and also connect to an agent that is connected to another gateway."""
        found = None
        if container not in self._sessions and self.connect_elsewhere is not None:
            found = await self.connect_elsewhere(container)
        return found or await self.wait_for_session(container, seconds)

    async def wait_for_session(self, container: str, seconds: float) -> AgentSession | None:
        """Return the session of a container's agent, or None if there is none within `seconds`, or one of another version.

        Waits at most MAX_WAIT_SECONDS, but after the gateway's start until all agents have had the time to connect."""
        seconds = min(seconds, max(MAX_WAIT_SECONDS, self._settled_at - asyncio.get_running_loop().time()))
        if container not in self._sessions and not self.find_outdated(container) and seconds > 0:
            waiter = asyncio.get_running_loop().create_future()
            waiters = self._waiters.setdefault(container, set())
            waiters.add(waiter)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):  # wait_for of Python 3.11 may lose a cancellation
                        await waiter
            finally:
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(container, None)
        return self._sessions.get(container)


def bind_listener(path: Path, *, mode: int) -> socket.socket:
    """Bind a listening unix socket at `path`, replacing an existing one. No other user may write in its directory."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    listener.bind(str(path))
    os.chmod(path, mode)
    listener.listen(BACKLOG)
    return listener
