"""HTTPS server of the emulated API: requests, responses, chunked streams and upgraded connections."""

import json
import select
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.emulators.http_handler import EmulatorHandler

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


class _Handler(EmulatorHandler):
    server: ApiServer

    def setup(self) -> None:
        self.request.settimeout(HANDSHAKE_TIMEOUT_SECONDS)
        self.request = self.server.context.wrap_socket(self.request, server_side=True)
        self.request.settimeout(None)
        super().setup()

    def finish(self) -> None:
        super().finish()
        self.request.close()  # the server only closes the socket below TLS, which has been detached

    def respond(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        response = self.server.respond(Request(self.command, unquote(parts.path), query, self.headers, self.read_body()))
        if response.is_cut:
            self.close_connection = True
        elif response.upgrade is not None:
            self.upgrade_to_websocket({"Sec-WebSocket-Protocol": response.subprotocol})
            with suppress(OSError):
                response.upgrade(self.connection)
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
            serve(Stream(self.send_chunk, self.connection))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
