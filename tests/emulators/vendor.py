"""Base of the emulators of vendors with an HTTP API: a server with routes."""

import json
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Ping, TextMessage

from tests.emulators.base import (
    CUT_AFTER,
    CUT_BEFORE,
    LOGIN_PAGE,
    NOT_FOUND_PAGE,
    Emulator,
    Fault,
    ForeignAnswer,
)
from tests.emulators.http_handler import EmulatorHandler


@dataclass
class Request:
    """One request. `groups` are those of the route's pattern."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    groups: tuple[str, ...] = ()

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def parse_form(self) -> dict[str, bytes]:
        """Return the parts of a multipart body by name."""
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        message = BytesParser(policy=HTTP).parsebytes(head + self.body)
        parts = {}
        for part in message.iter_parts():  # type: ignore[attr-defined]
            parts[part.get_param("name", header="content-disposition")] = part.get_payload(decode=True)
        return parts


@dataclass
class Response:
    """Response of a route.

    `stream` writes a body of unknown length to a function that sends one chunk. `websocket` serves an upgraded connection."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    stream: Callable[[Callable[[bytes], None]], None] | None = None
    websocket: Callable[["WebSocket"], None] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Rejected(Exception):
    """The request is answered with this status and JSON body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


Handler = Callable[[Any, Request], Response]
HandlerT = TypeVar("HandlerT", bound=Callable[..., Response])


def route(method: str, pattern: str) -> Callable[[HandlerT], HandlerT]:
    """Declare a method of an emulator as the handler of requests whose path matches `pattern` completely."""

    def declare(handler: HandlerT) -> HandlerT:
        handler.routes = [*getattr(handler, "routes", []), (method, re.compile(pattern))]  # type: ignore[attr-defined]
        return handler

    return declare


def as_json(content: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(content).encode())


def _as_foreign(answer: ForeignAnswer) -> Response:
    headers = {"Location": answer.location} if answer.location else {}
    return Response(answer.status, answer.body, answer.content_type, headers=headers)


class VendorEmulator(ThreadingHTTPServer, Emulator):
    """HTTP emulator of one vendor. A subclass declares routes and says how a key is stated."""

    daemon_threads = True
    request_queue_size = 128
    api_path: ClassVar[str] = ""
    rejection: ClassVar[Callable[[int, str], Any]] = staticmethod(lambda status, message: {"message": message})

    def __init__(self, directory: Path, port: int = 0) -> None:
        Emulator.__init__(self, directory)
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", port), _Handler)
        self.routes = [
            (method, pattern, getattr(self, name))
            for name in dir(type(self))
            for method, pattern in getattr(getattr(type(self), name), "routes", [])
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def api_url(self) -> str:
        return self.url + self.api_path

    def is_authorized(self, request: Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.key}"

    def stop_server(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a failed request, unless its client has cut the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def handle(self, request: Request) -> tuple[Response, Fault | None]:
        line = f"{request.method} {request.path}"
        fault = self.take_fault(line)
        if foreign := LOGIN_PAGE if request.path == "/login" else self.foreign_answer:
            return _as_foreign(foreign), None
        if fault:
            time.sleep(fault.seconds)
            if isinstance(fault.outcome, int):
                return as_json(self.rejection(fault.outcome, "fault"), fault.outcome), None
            if isinstance(fault.outcome, ForeignAnswer):
                return _as_foreign(fault.outcome), None
            if fault.outcome == CUT_BEFORE:
                return Response(), fault
        if not self.is_authorized(request):
            return as_json(self.rejection(401, "Unauthorized"), 401), None
        for method, pattern, handler in self.routes:
            if method == request.method and (match := pattern.fullmatch(request.path)):
                request.groups = match.groups()
                try:
                    response = handler(request)
                    if fault and callable(fault.outcome) and not (response.stream or response.websocket):
                        response.body = fault.outcome(response.body)
                    return response, fault if fault and fault.outcome == CUT_AFTER else None
                except Rejected as rejected:
                    return as_json(rejected.body, rejected.status), None
        return _as_foreign(NOT_FOUND_PAGE), None


class WebSocket:
    """Server side of one WebSocket with text messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._protocol = connection, Connection(ConnectionType.SERVER)
        self._events = iter(())

    def receive(self) -> str | None:
        """Return the next message, or None once the client has closed the connection."""
        text = ""
        while True:
            for event in self._events:
                if isinstance(event, TextMessage):
                    text += event.data
                    if event.message_finished:
                        return text
                elif isinstance(event, Ping):
                    self._socket.sendall(self._protocol.send(event.response()))
                elif isinstance(event, CloseConnection):
                    with suppress(OSError):
                        self._socket.sendall(self._protocol.send(event.response()))
                    return None
            content = self._socket.recv(65536)
            if not content:
                return None
            self._protocol.receive_data(content)
            self._events = self._protocol.events()

    def send(self, message: str) -> None:
        self._socket.sendall(self._protocol.send(TextMessage(message)))

    def close(self) -> None:
        self._socket.sendall(self._protocol.send(CloseConnection(1000)))


class _Handler(EmulatorHandler):
    server: VendorEmulator

    def respond(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.read_body()
        response, cut = self.server.handle(Request(self.command, unquote(parts.path), query, self.headers, body))
        if cut is not None:
            self.close_connection = True
            return
        if response.websocket is not None:
            self.upgrade_to_websocket()
            with suppress(OSError):
                response.websocket(WebSocket(self.connection))
            return
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        for name, value in response.headers.items():
            self.send_header(name, value)
        if response.stream is None:
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            response.stream(self.send_chunk)
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionError:
            self.close_connection = True
