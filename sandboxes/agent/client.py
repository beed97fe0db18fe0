"""Connection of a control plane's process to the agent of one sandbox, through a gateway."""

import contextlib
import itertools
import os
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sandboxes.agent.addresses import (
    GREETING_TIMEOUT_SECONDS,
    AgentOutdated,
    GatewayAddress,
    GatewayDown,
    NotConnected,
    UnixGateway,
)
from sandboxes.agent.gateway import encode_control_frame
from sandboxes.agent.protocol import (
    Frame,
    FrameReader,
    ProtocolError,
    RawFrame,
    UnsupportedVersion,
    encode_frame,
    parse_hello,
)

CHUNK_BYTES = 1 << 18
MAX_IDLE_CONNECTIONS = 64  # of a process; the oldest is closed
RECONNECT_PAUSE_SECONDS = 0.1
# gateway -> monotonic time of the first and of the last refused connection, until one is accepted
_down_since: dict[str, tuple[float, float]] = {}


class ConnectionLost(Exception):
    """The connection ended, or a response did not arrive in time. Requests that were sent may have had their effect."""


class AgentConnection:
    """One connection, used by one thread at a time."""

    def __init__(self, gateway: GatewayAddress | Path, container: str, *, wait: float) -> None:
        """Connect, and wait up to `wait` seconds for the agent. Raise NotConnected.

        `container` is the id of a container of this host, or the ref of a sandbox elsewhere."""
        gateway = as_address(gateway)
        name = gateway.get_key(container)
        self.key = name, container
        self._reader, self._ids = FrameReader(), itertools.count(1)
        self._frames: list[RawFrame] = []
        self._awaited, self._ignored = deque[int](), set[int]()  # ids of requests without a response yet
        try:
            self._socket = gateway.open(container, wait=wait)
        except GatewayDown:
            _note_refusal(gateway, name)
            raise
        except OSError as error:
            raise NotConnected(f"No agent is connected: {error}") from error
        _down_since.pop(name, None)
        try:
            self.boot = parse_hello(self._receive(timeout=wait + GREETING_TIMEOUT_SECONDS))
        except (ConnectionLost, ProtocolError) as error:
            self._socket.close()
            kind = AgentOutdated if isinstance(error, UnsupportedVersion) else NotConnected
            raise kind(f"No agent is connected: {error}") from error

    def request(self, head: Mapping[str, Any], body: bytes = b"", *, timeout: float) -> Frame:
        """Send one request and wait up to `timeout` seconds for its response. Raise ConnectionLost, ProtocolError."""
        self._send(next(self._ids), head, body, timeout=timeout)
        return self._receive_response(timeout=timeout)

    def request_all(self, heads: Sequence[Mapping[str, Any]], *, timeout: float) -> list[Frame]:
        """Send several requests at once and wait up to `timeout` seconds for each response.

        The agent answers in the order of the requests if none of them waits. Raise ConnectionLost, ProtocolError."""
        for head in heads:
            self._send(next(self._ids), head, b"", timeout=timeout)
        return [self._receive_response(timeout=timeout) for _ in heads]

    def send(self, head: Mapping[str, Any]) -> None:
        """Send a request whose response is ignored. Raise ConnectionLost if the connection has ended."""
        request_id = next(self._ids)
        self._ignored.add(request_id)
        try:
            self._socket.sendall(encode_frame(request_id, head))
        except OSError as error:
            raise ConnectionLost(f"The request was not sent: {error}") from error

    def post(self, head: Mapping[str, Any]) -> int:
        """Send a request whose response `receive` returns. Return the request's id. Raise ConnectionLost."""
        request_id = next(self._ids)
        self._send(request_id, head, b"", timeout=GREETING_TIMEOUT_SECONDS)
        return request_id

    def receive(self, *, timeout: float) -> Frame:
        """Wait up to `timeout` seconds for the response to any posted request. Raise ConnectionLost, ProtocolError."""
        frame = self._receive(timeout=timeout)
        if frame.request_id not in self._awaited:
            raise ProtocolError("response to another request")
        self._awaited.remove(frame.request_id)
        return frame

    def interrupt(self) -> None:
        """End the connection from another thread. The thread that waits for a response gets ConnectionLost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def is_reusable(self) -> bool:
        """Return whether the connection is open, and every response that was waited for has arrived."""
        if self._awaited:
            return False
        try:
            self._socket.setblocking(False)
            while chunk := self._socket.recv(CHUNK_BYTES):  # also after ignored responses there may be the end
                if not self._feed(chunk) or self._frames:
                    return False
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def report(self, violation: str) -> None:
        """Make the gateway end the agent's session."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode_control_frame({"violation": violation}))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Keep the connection for later operations, unless one has failed."""
        if error is None and not self._awaited:
            idle_connections.put(self)
        else:
            self.close()

    def _send(self, request_id: int, head: Mapping[str, Any], body: bytes, *, timeout: float) -> None:
        self._awaited.append(request_id)
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(encode_frame(request_id, head, body))
        except OSError as error:
            raise ConnectionLost(f"The request was not sent: {error}") from error

    def _receive_response(self, *, timeout: float) -> Frame:
        """Return the response to the oldest awaited request."""
        frame = self._receive(timeout=timeout)
        if frame.request_id != self._awaited[0]:
            raise ProtocolError("response to another request")
        self._awaited.popleft()
        return frame

    def _feed(self, chunk: bytes) -> bool:
        """Add the frames of a chunk, without ignored responses. Return False if the agent violates the protocol."""
        try:
            frames = self._reader.feed(chunk)
        except ProtocolError:
            return False
        self._frames += [frame for frame in frames if frame.request_id not in self._ignored]
        self._ignored -= {frame.request_id for frame in frames}
        return True

    def _receive(self, *, timeout: float) -> Frame:
        deadline = time.monotonic() + timeout
        while not self._frames:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                chunk = self._socket.recv(CHUNK_BYTES)
            except OSError as error:
                raise ConnectionLost(f"No response: {error}") from error
            if not chunk:
                raise ConnectionLost("The connection has ended.")
            if not self._feed(chunk):
                raise ProtocolError("invalid frame")
        return self._frames.pop(0).parse()


def _note_refusal(gateway: GatewayAddress, name: str) -> None:
    """Note a refused connection. The time since the first one counts, unless the last one was too long ago."""
    now = time.monotonic()
    first, last = _down_since.get(name, (now, now))
    _down_since[name] = first if now - last < gateway.refusal_memory_seconds else now, now


def as_address(gateway: GatewayAddress | Path) -> GatewayAddress:
    return UnixGateway(gateway) if isinstance(gateway, Path) else gateway


def connect_through_restart(
    gateway: GatewayAddress | Path, container: str, *, wait: float, check: Callable[[], None]
) -> AgentConnection:
    """Connect, and wait for a gateway that is being started again, until it has been down for its `restart_seconds`.

    `check` is called every `check_seconds` of the gateway, and may raise an error that ends the wait. Raise NotConnected."""
    gateway = as_address(gateway)
    checked_at = time.monotonic()
    while True:
        try:
            return AgentConnection(gateway, container, wait=wait)
        except GatewayDown:
            first, last = _down_since.get(gateway.get_key(container), (0.0, time.monotonic()))
            if last - first > gateway.restart_seconds:
                raise
            if time.monotonic() - checked_at >= gateway.check_seconds:
                check()
                checked_at = time.monotonic()
            time.sleep(RECONNECT_PAUSE_SECONDS)


def report_fallback(gateway: Path, reason: str) -> None:
    """Let the gateway count an operation that no agent has started. A gateway that does not run counts nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(GREETING_TIMEOUT_SECONDS)
        connection.connect(os.fspath(gateway))
        connection.sendall(encode_control_frame({"fallback": reason}))


class IdleConnections:
    """Open connections of this process that no thread uses, by gateway and container."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections = OrderedDict[AgentConnection, None]()  # the least recently used first

    def take(self, gateway: GatewayAddress | Path, container: str) -> AgentConnection | None:
        """Return the most recently used connection to an agent, or None."""
        key = as_address(gateway).get_key(container), container
        while True:
            with self._lock:
                found = next((connection for connection in reversed(self._connections) if connection.key == key), None)
                if found is None:
                    return None
                del self._connections[found]
            if found.is_reusable():
                return found
            found.close()

    def put(self, connection: AgentConnection) -> None:
        with self._lock:
            self._connections[connection] = None
            excess = self._connections.popitem(last=False)[0] if len(self._connections) > MAX_IDLE_CONNECTIONS else None
        if excess:
            excess.close()

    def clear(self) -> None:
        """Forget all connections, in a process that has been forked."""
        self._lock = threading.Lock()
        for connection in self._connections:
            connection.close()
        self._connections.clear()


idle_connections = IdleConnections()
os.register_at_fork(after_in_child=idle_connections.clear)
