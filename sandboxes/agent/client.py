"""Connection of a control plane's process to the agent of one container, through the gateway of the host."""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sandboxes.agent.gateway import encode_control_frame
from sandboxes.agent.protocol import Frame, FrameReader, ProtocolError, RawFrame, encode_frame, parse_hello

CHUNK_BYTES = 1 << 18
GREETING_TIMEOUT_SECONDS = 2.0  # in addition to the time that the gateway is asked to wait


class NotConnected(Exception):
    """No agent or no gateway is there. Nothing was sent to an agent."""


class GatewayDown(NotConnected):
    """No process listens on the gateway's socket: the gateway is being started again."""


class ConnectionLost(Exception):
    """The connection ended, or a response did not arrive in time. Requests that were sent may have had their effect."""


class AgentConnection:
    """One connection, used by one thread."""

    def __init__(self, gateway: Path, container: str, *, wait: float) -> None:
        """Connect, and wait up to `wait` seconds for the container's agent. Raise NotConnected."""
        self._reader, self._ids = FrameReader(), itertools.count(1)
        self._frames: list[RawFrame] = []
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(GREETING_TIMEOUT_SECONDS)
            self._socket.connect(os.fspath(gateway))
            self._socket.sendall(encode_control_frame({"sandbox": container, "wait": wait}))
            self.boot = parse_hello(self._receive(timeout=wait + GREETING_TIMEOUT_SECONDS))
        except ConnectionRefusedError as error:
            self._socket.close()
            raise GatewayDown("The gateway is not running.") from error
        except (OSError, ConnectionLost, ProtocolError) as error:
            self._socket.close()
            raise NotConnected(f"No agent is connected: {error}") from error

    def request(self, head: Mapping[str, Any], body: bytes = b"", *, timeout: float) -> Frame:
        """Send one request and wait up to `timeout` seconds for its response. Raise ConnectionLost, ProtocolError."""
        request_id = next(self._ids)
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(encode_frame(request_id, head, body))
        except OSError as error:
            raise ConnectionLost(f"The request was not sent: {error}") from error
        frame = self._receive(timeout=timeout)
        if frame.request_id != request_id:
            raise ProtocolError("response to another request")
        return frame

    def send(self, head: Mapping[str, Any]) -> None:
        """Send a request whose response is not waited for. The connection is closed afterwards. Raise nothing."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode_frame(next(self._ids), head))

    def report(self, violation: str) -> None:
        """Make the gateway end the agent's session."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode_control_frame({"violation": violation}))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

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
            self._frames = self._reader.feed(chunk)
        return self._frames.pop(0).parse()
