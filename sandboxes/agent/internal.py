"""Access of the control plane's processes to a gateway on another machine: TCP, authenticated in both directions.

The gateway sends a nonce. The client answers with its greeting (protocol.py), a nonce of its own, and an HMAC of both under a
secret that all processes of the installation have. The gateway proves the same before its first response. With TLS the content
is encrypted, and the certificate names the gateways."""

import asyncio
import hmac
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from sandboxes.agent.gateway import AgentGateway, ClientSession, ResponseReceiver, encode_control_frame
from sandboxes.agent.protocol import Frame, FrameReader, ProtocolError, RawFrame, UnsupportedVersion, parse_hello

log = structlog.get_logger(__name__)
AUTHENTICATION_SECONDS = 5.0
MAX_UNAUTHENTICATED = 256  # connections
MAX_GREETING_BYTES = 1024
NONCE_BYTES = 16


@dataclass(frozen=True)
class GatewayTrust:
    """Authority of the certificates of internal ports. All of them have the same name, or else each its own address."""

    context: ssl.SSLContext
    name: str = ""

    def get_name(self, host: str) -> str:
        """Return the name that the certificate of the gateway at `host` must have."""
        return self.name or host


def prove(secret: bytes, role: str, gateway_nonce: str, client_nonce: str) -> str:
    """Return the proof that "gateway" or "client" knows the secret."""
    return hmac.new(secret, f"{role} {gateway_nonce} {client_nonce}".encode(), "sha256").hexdigest()


class InternalSession(ClientSession):
    """Connection of a process on another machine, as yet unauthenticated."""

    def __init__(self, gateway: AgentGateway, secret: bytes, unauthenticated: "set[InternalSession]") -> None:
        super().__init__(gateway)
        self._requests, self._reader = self._reader, FrameReader(max_head_bytes=MAX_GREETING_BYTES, max_body_bytes=0)
        self._secret, self._unauthenticated, self._nonce = secret, unauthenticated, secrets.token_hex(NONCE_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = asyncio.get_running_loop().call_later(AUTHENTICATION_SECONDS, self.end)
        self._unauthenticated.add(self)
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            self.end()
            return
        self.send(encode_control_frame({"nonce": self._nonce}))

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._unauthenticated.discard(self)
        super().connection_lost(exc)

    def _handle(self, frame: RawFrame) -> None:
        if self in self._unauthenticated:
            self._authenticate(frame)
        super()._handle(frame)

    def _authenticate(self, frame: RawFrame) -> None:
        """Accept the greeting, or raise ProtocolError."""
        head = frame.parse().head
        nonce, proof = str(head.get("nonce", "")), str(head.get("proof", ""))
        expected = prove(self._secret, "client", self._nonce, nonce)
        if frame.request_id or not nonce or not hmac.compare_digest(expected.encode(), proof.encode()):
            raise ProtocolError("a client does not know the secret of this installation")
        self._timer.cancel()
        self._unauthenticated.discard(self)
        self._reader = self._requests
        self.send(encode_control_frame({"proof": prove(self._secret, "gateway", self._nonce, nonce)}))


class RelayedSession(asyncio.Protocol):
    """Way of one client in a gateway's process to an agent that another gateway holds."""

    def __init__(self) -> None:
        self.hello = b""
        self._client: ResponseReceiver | None = None
        self._reader = FrameReader()
        self._frames: asyncio.Queue[RawFrame | None] = asyncio.Queue()  # until the greeting

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                if self._client is not None:
                    self._client.send(frame.encode(frame.request_id))
                else:
                    self._frames.put_nowait(frame)
        except ProtocolError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._frames.put_nowait(None)
        if self._client is not None:
            self._client.end()

    async def authenticate(self, secret: bytes, agent: str, number: int) -> None:
        """Exchange greetings with the other gateway. Raise ProtocolError."""
        gateway_nonce, nonce = str((await self._receive()).head.get("nonce", "")), secrets.token_hex(NONCE_BYTES)
        greeting = {"sandbox": agent, "wait": 0, "number": number, "nonce": nonce}
        self._transport.write(encode_control_frame(greeting | {"proof": prove(secret, "client", gateway_nonce, nonce)}))
        if (await self._receive()).head.get("proof") != prove(secret, "gateway", gateway_nonce, nonce):
            raise ProtocolError("the gateway does not know the secret of this installation")
        hello = await self._frames.get()
        if hello is None:
            raise ProtocolError("the connection has ended")
        parse_hello(hello.parse())
        self.hello = hello.encode(0)

    async def _receive(self) -> Frame:
        frame = await self._frames.get()
        if frame is None or frame.request_id:
            raise ProtocolError("no greeting of a gateway")
        return frame.parse()

    def attach(self, client: ResponseReceiver) -> None:
        self._client = client
        if self._transport.is_closing():
            client.end()

    def detach(self, client: ResponseReceiver) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def forward_request(self, client: ResponseReceiver, frame: RawFrame) -> None:
        self._transport.write(frame.encode(frame.request_id))

    def end(self, violation: str = "") -> None:
        """Make the other gateway end the agent's session."""
        self._transport.write(encode_control_frame({"violation": violation}))
        self._transport.close()


async def connect(
    address: str, secret: bytes, agent: str, number: int, trust: GatewayTrust | None = None
) -> RelayedSession | None:
    """Connect to an agent through the gateway at an internal address. Return None if the agent is not there.

    Raise UnsupportedVersion if this version does not speak with the agent."""
    host, _, port = address.rpartition(":")
    host, session = host.strip("[]"), None
    context, name = (trust.context, trust.get_name(host)) if trust else (None, None)
    try:
        async with asyncio.timeout(AUTHENTICATION_SECONDS):
            _, session = await asyncio.get_running_loop().create_connection(
                RelayedSession, host, int(port), ssl=context, server_hostname=name
            )
            await session.authenticate(secret, agent, number)
            return session
    except UnsupportedVersion:
        if session is not None:
            session.close()
        raise
    except (OSError, TimeoutError, ProtocolError) as error:
        log.info("agent not reached through its gateway", address=address, error=str(error))
        if session is not None:
            session.close()
        return None


@asynccontextmanager
async def listening(
    gateway: AgentGateway, host: str, port: int, secret: bytes, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve processes on other machines during the block. Yield the port, which the kernel chooses for 0."""
    unauthenticated: set[InternalSession] = set()
    server = await asyncio.get_running_loop().create_server(
        lambda: InternalSession(gateway, secret, unauthenticated),
        host,
        port,
        ssl=context,
        ssl_handshake_timeout=AUTHENTICATION_SECONDS if context else None,
        backlog=512,
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
