"""Webhook receiver on loopback: records requests, responds as configured, verifies signatures."""

import base64
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOLD_SECONDS = 15.0


@dataclass(frozen=True)
class ReceivedRequest:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def payload(self) -> Any:
        return json.loads(self.body)


class WebhookReceiver(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _WebhookHandler)
        self.reset()

    def reset(self) -> None:
        self.received: list[ReceivedRequest] = []
        self.status, self.headers = 204, {}
        self.answer: Callable[[BaseHTTPRequestHandler], None] | None = None  # replaces status and headers
        self.stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/events"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: tests close connections on purpose."""


class _WebhookHandler(BaseHTTPRequestHandler):
    server: WebhookReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.received.append(ReceivedRequest(self.path, headers, body))
        if self.server.answer:
            return self.server.answer(self)
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def run_receiver(tls: ssl.SSLContext | None = None) -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            server.shutdown()
            thread.join(10)


def never_respond(request: BaseHTTPRequestHandler) -> None:
    """Send no response."""
    request.server.stopping.wait(30)  # type: ignore[attr-defined]


def trickle_headers(request: BaseHTTPRequestHandler) -> None:
    """Send an endless header, one byte at a time."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not request.server.stopping.wait(0.02):  # type: ignore[attr-defined]
        request.wfile.write(b"a")


def trickle_body(request: BaseHTTPRequestHandler) -> None:
    """Send a response body that does not end, one byte at a time."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while not request.server.stopping.wait(0.02):  # type: ignore[attr-defined]
        request.wfile.write(b" ")


def stream_endlessly(request: BaseHTTPRequestHandler) -> None:
    """Send a response body that does not end."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not request.server.stopping.is_set():  # type: ignore[attr-defined]
        request.wfile.write(b"a" * 65536)


@contextmanager
def run_held_servers(is_released: Callable[[], object]) -> Iterator[tuple[WebhookReceiver, WebhookReceiver]]:
    """Run a silent server, and one that sends endless headers, until `is_released`. Then they close the connections.

    A request that they have held for HOLD_SECONDS fails the test at the end of the `with`."""
    held_in_vain: list[str] = []

    def hold(request: BaseHTTPRequestHandler, *, sent: bytes = b"") -> None:
        stopping, deadline = request.server.stopping, time.monotonic() + HOLD_SECONDS  # type: ignore[attr-defined]
        while not is_released() and not stopping.wait(0.02):
            if time.monotonic() > deadline:
                held_in_vain.append(request.path)
                break
            request.wfile.write(sent)
        request.close_connection = True

    with run_receiver() as silent, run_receiver() as dripping:
        silent.answer, dripping.answer = hold, partial(hold, sent=b"HTTP/1.1 200 OK\r\nX-Long: a")
        yield silent, dripping
    assert held_in_vain == []


def verify_signature(request: ReceivedRequest, secret: str) -> bool:
    """Verify a signature according to Standard Webhooks, independently of the code under test."""
    key = base64.b64decode(secret.split("_", 1)[1])
    signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
    digest = hmac.new(key, signed, hashlib.sha256).digest()
    expected = "v1," + base64.b64encode(digest).decode()
    return any(hmac.compare_digest(signature, expected) for signature in request.headers["webhook-signature"].split(" "))
