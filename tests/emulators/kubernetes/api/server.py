"""HTTPS server of the emulated API: requests, responses, chunked streams and upgraded connections."""

import base64
import hashlib
import json
import select
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.emulators.vendor import WEBSOCKET_GUID

HANDSHAKE_TIMEOUT_SECONDS = 10


@dataclass
class Request:
    """One request."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes

    def get(self, name: str, default: str = "") -> str:
        """Return the last value of a query parameter."""
        return self.query.get(name, [default])[-1]

    def is_true(self, name: str) -> bool:
        return self.get(name).lower() in {"true", "1"}

    @property
    def accept(self) -> str:
        return self.headers.get("Accept") or ""


@dataclass
class Stream:
    """Connection of a streamed response. `write` raises OSError once the client has closed it."""

    write: Callable[[bytes], None]
    connection: socket.socket

    def is_open(self) -> bool:
        """Return whether the client is still there. A client sends nothing while it reads a response."""
        return not select.select([self.connection], [], [], 0)[0]


@dataclass
class Response:
    """Response: a body, a stream of unknown length, or an upgraded connection with the chosen subprotocol."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    stream: Callable[[Stream], None] | None = None
    upgrade: Callable[[socket.socket], None] | None = None
    subprotocol: str = ""
    is_cut: bool = False  # the connection is closed without an answer


def as_json(content: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(content).encode())


class ApiServer(ThreadingHTTPServer):
    """HTTPS server on the loopback interface. `respond` answers each request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, context: ssl.SSLContext, respond: Callable[[Request], Response]) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.context, self.respond = context, respond

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer
    disable_nagle_algorithm = True

    def setup(self) -> None:
        self.request.settimeout(HANDSHAKE_TIMEOUT_SECONDS)
        self.request = self.server.context.wrap_socket(self.request, server_side=True)
        self.request.settimeout(None)
        super().setup()

    def finish(self) -> None:
        super().finish()
        self.request.close()  # the server only closes the socket below TLS, which has been detached

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        response = self.server.respond(Request(self.command, unquote(parts.path), query, self.headers, self._read_body()))
        if response.is_cut:
            self.close_connection = True
        elif response.upgrade is not None:
            self._upgrade(response, response.upgrade)
        elif response.stream is not None:
            self._stream(response, response.stream)
        else:
            self._send_head(response, {"Content-Length": str(len(response.body))})
            self.wfile.write(response.body)

    def _send_head(self, response: Response, more: Mapping[str, str]) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        for name, value in {**response.headers, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, response: Response, serve: Callable[[Stream], None]) -> None:
        self._send_head(response, {"Transfer-Encoding": "chunked"})
        try:
            serve(Stream(self._send_chunk, self.connection))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _upgrade(self, response: Response, serve: Callable[[socket.socket], None]) -> None:
        accept = base64.b64encode(hashlib.sha1(f"{self.headers['Sec-WebSocket-Key']}{WEBSOCKET_GUID}".encode()).digest())
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept.decode())):
            self.send_header(name, value)
        self.send_header("Sec-WebSocket-Protocol", response.subprotocol)
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            serve(self.connection)

    def _send_chunk(self, chunk: bytes) -> None:
        if chunk:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _serve

    def log_message(self, format: str, *args: object) -> None:
        return
