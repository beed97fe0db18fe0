"""Ways of a process of the control plane to the gateway that holds the connection of an agent."""

import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from django.utils.module_loading import import_string

from sandboxes.agent.gateway import encode_control_frame
from sandboxes.agent.internal import MAX_GREETING_BYTES, NONCE_BYTES, GatewayTrust, prove
from sandboxes.agent.protocol import HEADER, ProtocolError, RawFrame, UnsupportedVersion, is_spoken

GREETING_TIMEOUT_SECONDS = 2.0  # in addition to the time that the gateway is asked to wait
LOOKUP_PAUSE_SECONDS = 0.1  # between look-ups of an agent that is connecting


class NotConnected(Exception):
    """No agent or no gateway is there. Nothing was sent to an agent."""


class AgentOutdated(NotConnected):
    """The agent is there, and its protocol is not spoken by this version. Nothing was sent to it."""


class GatewayDown(NotConnected):
    """The gateway is being started again, or the agent is connecting to another one. Nothing was sent."""


class GatewayAddress(Protocol):
    """Way to a gateway."""

    restart_seconds: float  # for which an operation that begins waits while the gateway is down
    refusal_memory_seconds: float  # after the last refused connection, in which the gateway counts as down all the time
    check_seconds: float  # between checks of the sandbox during that wait: the sandbox may be gone, and not the gateway

    def get_key(self, agent: str) -> str:
        """Return a name of the gateway, under which its state is remembered."""

    def open(self, agent: str, *, wait: float) -> socket.socket:
        """Connect and send a greeting. The gateway's answer, after at most `wait` seconds, is the greeting of the agent.

        Raise GatewayDown, NotConnected or OSError."""


class UnixGateway:
    """Gateway of this host."""

    restart_seconds = 5.0
    refusal_memory_seconds = math.inf  # operations without a gateway use the engine, and do not wait again
    check_seconds = math.inf  # an agent does not stop the gateway

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)

    def get_key(self, agent: str) -> str:
        return self._path

    def open(self, agent: str, *, wait: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(GREETING_TIMEOUT_SECONDS)
            connection.connect(self._path)
            connection.sendall(encode_control_frame({"sandbox": agent, "wait": wait}))
        except ConnectionRefusedError as error:
            connection.close()
            raise GatewayDown("The gateway is not running.") from error
        except OSError:
            connection.close()
            raise
        return connection


class AgentLocation(NamedTuple):
    """Gateway that holds the connection of an agent. `number` is that of the connection."""

    address: str  # host:port; empty: none at the moment
    number: int
    refused_version: int | None = None  # of the protocol, in the last greeting if no gateway accepted it

    def require_spoken(self) -> None:
        """Raise AgentOutdated if no gateway holds a connection because this version does not speak with the agent."""
        if not self.address and self.refused_version is not None and not is_spoken(self.refused_version):
            error = UnsupportedVersion(self.refused_version)
            raise AgentOutdated(f"No agent is connected: {error}") from error


class RoutedGateway:
    """Gateway that holds the connection of an agent, on any machine. Each connection looks it up by the agent's ref."""

    restart_seconds = 15.0  # an agent whose gateway has died connects to another one
    refusal_memory_seconds = 60.0
    check_seconds = 2.0

    def __init__(self, locate: Callable[[str], AgentLocation | None], secret: bytes, trust: GatewayTrust | None = None) -> None:
        self._locate, self._secret, self._trust = locate, secret, trust

    def get_key(self, agent: str) -> str:
        return f"agent {agent}"

    def open(self, agent: str, *, wait: float) -> socket.socket:
        """Wait up to `wait` seconds for the agent's first connection, too. Raise GatewayDown once it has been connected.

        The connection of an outdated agent is brief: it connects again and again. So its row tells clients."""
        deadline = time.monotonic() + wait
        while True:
            location = self._locate(agent)
            error: Exception | None = None
            if location and location.address:
                try:
                    return self._connect(location, agent, wait)
                except (OSError, ProtocolError) as failed:
                    error = failed
            elif location:
                location.require_spoken()
            if time.monotonic() >= deadline:
                if location is None:
                    raise NotConnected("The agent has not connected yet.")
                raise GatewayDown(f"The agent is not connected at the moment: {error or 'no gateway has it'}") from error
            time.sleep(LOOKUP_PAUSE_SECONDS)

    def _connect(self, location: AgentLocation, agent: str, wait: float) -> socket.socket:
        host, _, port = location.address.rpartition(":")
        host = host.strip("[]")
        connection = socket.create_connection((host, int(port)), timeout=GREETING_TIMEOUT_SECONDS)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._trust:
                connection = self._trust.context.wrap_socket(connection, server_hostname=self._trust.get_name(host))
            gateway_nonce, nonce = str(_receive_control(connection).get("nonce", "")), secrets.token_hex(NONCE_BYTES)
            greeting = {"sandbox": agent, "wait": wait, "number": location.number, "nonce": nonce}
            greeting["proof"] = prove(self._secret, "client", gateway_nonce, nonce)
            connection.sendall(encode_control_frame(greeting))
            if _receive_control(connection).get("proof") != prove(self._secret, "gateway", gateway_nonce, nonce):
                raise ProtocolError("the gateway does not know the secret of this installation")
        except BaseException:
            connection.close()
            raise
        return connection


def _receive_control(connection: socket.socket) -> dict[str, Any]:
    """Return the head of a frame without a body, and read nothing after it. Raise OSError, ProtocolError."""
    request_id, head_bytes, body_bytes = HEADER.unpack(_receive_bytes(connection, HEADER.size))
    if request_id or body_bytes or head_bytes > MAX_GREETING_BYTES:
        raise ProtocolError("no greeting of a gateway")
    return RawFrame(0, _receive_bytes(connection, head_bytes), b"").parse().head


def _receive_bytes(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        chunk = connection.recv(count - len(content))
        if not chunk:
            raise ConnectionResetError("the gateway has closed the connection")
        content += chunk
    return content


_factory_path = ""


def register_factory(path: str) -> None:
    """Set the dotted path of the function behind `get_routed_gateway`, in an app that reads the database."""
    global _factory_path
    _factory_path = path


def get_routed_gateway() -> RoutedGateway:
    """Return this installation's way to agents that are connected over TLS. Look-ups query the database."""
    found: RoutedGateway = import_string(_factory_path)()
    return found
