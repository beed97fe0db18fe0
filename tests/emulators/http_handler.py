"""Base of the HTTP request handlers of emulators: bodies, chunks and WebSocket upgrades of HTTP/1.1."""

import base64
import hashlib
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler

WEBSOCKET_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3


class EmulatorHandler(BaseHTTPRequestHandler):
    """A subclass defines `respond`, which answers requests of all methods."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def respond(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.respond()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send_chunk(self, chunk: bytes) -> None:
        if chunk:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))

    def upgrade_to_websocket(self, headers: Mapping[str, str] | None = None) -> None:
        """Accept a WebSocket. The connection is not used for further requests."""
        accept = base64.b64encode(hashlib.sha1(f"{self.headers['Sec-WebSocket-Key']}{WEBSOCKET_GUID}".encode()).digest())
        fixed = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept.decode()}
        self.send_response(101)
        for name, value in {**fixed, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        return
