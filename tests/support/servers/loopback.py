"""Scripted HTTP server on the loopback interface, for slow, wrong and missing responses."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer

Responder = Callable[["Handler"], None]


class ThreadingUnixStreamServer(ThreadingMixIn, UnixStreamServer):
    """socketserver has this class since Python 3.12."""


@dataclass(frozen=True)
class RecordedRequest:
    """A received request."""

    verb: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedServer:
    """Answers requests with the responders of `script` in order; the last one answers all further requests."""

    url: str
    script: list[Responder] = field(default_factory=list)
    seen: list[RecordedRequest] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def calls(self) -> list[str]:
        return [f"{request.verb} {request.path}" for request in self.seen]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    loopback: ScriptedServer

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            super().handle_one_request()

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.loopback.seen.append(RecordedRequest(self.command, self.path, dict(self.headers), body))
        script = self.loopback.script
        (script.pop(0) if len(script) > 1 else script[0])(self)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass

    def hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def respond(status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> Responder:
    """Return a responder. If `length` differs from the body's, the connection is closed after the body."""

    def answer(handler: Handler) -> None:
        send = handler.send_response_only if "Date" in headers else handler.send_response  # which adds a Date
        send(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)
        if length is not None:
            handler.hang_up()

    return answer


def drop_connection(handler: Handler) -> None:
    handler.hang_up()


def stall_response(handler: Handler) -> None:
    """Send nothing until the test ends."""
    handler.loopback.closing.wait(60)
    handler.hang_up()


def stall_after_body(body: bytes, *, length: int) -> Responder:
    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.wfile.write(body)
        handler.wfile.flush()
        stall_response(handler)

    return answer


@contextmanager
def run_scripted_server(*script: Responder, unix: Path | None = None) -> Iterator[ScriptedServer]:
    """Run the server on a free port, or on a unix socket."""
    handler = type("Scripted", (Handler,), {})
    server = ThreadingUnixStreamServer(str(unix), handler) if unix else ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.loopback = ScriptedServer("" if unix else f"http://127.0.0.1:{server.server_address[1]}", [*script])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield handler.loopback
    finally:
        handler.loopback.closing.set()
        server.shutdown()
        server.server_close()
