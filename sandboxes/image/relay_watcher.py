"""Relay client: prints one line per event of a relay subscription. Standard library only.

    relay_watcher.py [SUBSCRIPTION]    path below RELAY_URL, with its query

RELAY_URL is the relay's address, ws://HOST:PORT/PATH/. In a sandbox this is the address of the bridge; the egress proxy adds
the agent's identity. Prints "Connected to relay" after each connect. A broken connection is retried with a delay that grows to
30 s. Exits with code 1 and one line on stderr if retrying is useless: the relay refuses the sandbox, or the address is
wrong."""

import base64
import hashlib
import http.client
import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO
from urllib.parse import urlsplit

DEFAULT_SUBSCRIPTION = "com.atproto.sync.subscribeRepos"
MAX_EVENT_BYTES = 8 << 20
IDLE_TIMEOUT_SECONDS = 90.0  # without a frame; a relay sends pings more often
RETRY_DELAYS_SECONDS = (0.5, 1, 2, 4, 8, 15, 30)  # the last one is repeated
WEBSOCKET_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class RelayRefused(Exception):
    """The relay cannot be used. Retrying does not help."""


class ConnectionBroken(Exception):
    """The connection failed or was closed. It can be retried."""


class WebSocketConnection:
    """WebSocket client connection. Raises ConnectionBroken, or RelayRefused if retrying is useless."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "ws" or not parts.hostname:
            raise RelayRefused(f"RELAY_URL is not a ws:// address: {url}")
        try:
            self.socket = socket.create_connection((parts.hostname, parts.port or 80), timeout=IDLE_TIMEOUT_SECONDS)
        except OSError as error:
            raise ConnectionBroken(f"connection failed: {error}") from error
        self.reader: BinaryIO = self.socket.makefile("rb")
        try:
            self._perform_handshake(parts.netloc, f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ConnectionBroken(f"handshake failed: {error or type(error).__name__}") from error
        except BaseException:
            self.close()
            raise

    def _perform_handshake(self, host: str, target: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {target} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {key}",
        ]  # fmt: skip
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        words = self.reader.readline(4096).decode("latin-1").split(None, 2)
        if len(words) < 2 or not words[1].isdigit():
            raise ConnectionBroken("connection closed during the handshake")
        status, headers = int(words[1]), http.client.parse_headers(self.reader)
        if status == 101:
            expected = base64.b64encode(
                hashlib.sha1(f"{key}{WEBSOCKET_GUID}".encode(), usedforsecurity=False).digest()
            ).decode()
            if headers.get("Sec-WebSocket-Accept") != expected:
                raise ConnectionBroken("invalid WebSocket handshake")
            return
        length = headers.get("Content-Length", "0")
        message = extract_error_message(self.reader.read(min(int(length), 1 << 14) if length.isdigit() else 0))
        if 400 <= status < 500 and status not in (408, 409, 425, 429):
            raise RelayRefused(f"the relay is not available to this sandbox ({status}): {message}")
        raise ConnectionBroken(f"{status}: {message}")

    def events(self) -> Iterator[tuple[int, bytes]]:
        """Yield messages as (TEXT or BINARY, content). Raise ConnectionBroken at the end of the connection."""
        kind, content = 0, b""
        while True:
            try:
                final, code, piece = self._read_frame()
            except OSError as error:
                raise ConnectionBroken(str(error) or type(error).__name__) from error
            if code == CLOSE:
                reason = struct.unpack(">H", piece[:2])[0] if len(piece) > 1 else 1005
                raise ConnectionBroken(f"closed by the relay, {reason} {piece[2:].decode(errors='replace')}".strip())
            if code == PING:
                self._send(PONG, piece)
            elif code in (TEXT, BINARY, 0):
                kind, content = code or kind, (content if code == 0 else b"") + piece
                if len(content) > MAX_EVENT_BYTES:
                    raise ConnectionBroken("event too large")
                if final:
                    yield kind, content

    def _read_frame(self) -> tuple[bool, int, bytes]:
        """Read one frame as (final, opcode, payload). Frames of a server are not masked."""
        first, second = self._read_exactly(2)
        length = second & 127
        if length > 125:
            length = int.from_bytes(self._read_exactly(2 if length == 126 else 8))
        if second & 128 or length > MAX_EVENT_BYTES:
            raise ConnectionBroken("invalid or too large frame")
        return bool(first & 128), first & 15, self._read_exactly(length)

    def _read_exactly(self, length: int) -> bytes:
        content = self.reader.read(length)
        if len(content) < length:
            raise ConnectionBroken("connection closed")
        return content

    def _send(self, code: int, content: bytes) -> None:
        """Send a frame of at most 125 bytes. Only pongs are ever sent."""
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(content))
        self.socket.sendall(bytes([128 | code, 128 | len(content)]) + mask + masked)

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


def extract_error_message(body: bytes) -> str:
    """Extract the message of an error response, as one line of at most 300 characters."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:300]


def format_event(kind: int, content: bytes) -> str:
    """Format an event as one line: text unchanged, binary content in base64."""
    if kind == BINARY:
        return base64.b64encode(content).decode()
    return " ".join(content.decode(errors="replace").splitlines())


def watch_relay(url: str, write: Callable[[str], object], sleep: Callable[[float], object] = time.sleep) -> None:
    """Write one line per event and connection change, indefinitely. Raise RelayRefused."""
    failures = 0
    while True:
        try:
            connection = WebSocketConnection(url)
            try:
                write("Connected to relay")
                for event in connection.events():
                    failures = 0  # reset the delay after the first event
                    write(format_event(*event))
            finally:
                connection.close()
        except ConnectionBroken as error:
            delay = RETRY_DELAYS_SECONDS[min(failures, len(RETRY_DELAYS_SECONDS) - 1)] * random.uniform(0.8, 1.2)  # noqa: S311 - jitter: many clients lose their connection at once
            failures += 1
            write(f"Not connected to relay: {error}. Next try in {delay:.1f} s")
            sleep(delay)


def main(argv: list[str], env: dict[str, str]) -> int:
    relay = env.get("RELAY_URL", "")
    try:
        watch_relay(f"{relay.rstrip('/')}/{argv[0] if argv else DEFAULT_SUBSCRIPTION}", lambda line: print(line, flush=True))
    except RelayRefused as error:
        print(f"relay_watcher: {error}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
