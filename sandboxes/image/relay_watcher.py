"""Watch a relay: one line on stdout for each of its events, for as long as it lives. Standard library only.

    relay_watcher.py [SUBSCRIPTION]    what to subscribe to, a path below RELAY_URL with its query

RELAY_URL names the relay, as ws://HOST:PORT/PATH/; in a sandbox that is the bridge, and whoever passes the connection on
says in whose name it is. "Connected to relay" comes once it is; a connection that breaks is made again, after a while that
grows to half a minute. Exit code 1 and one line on stderr where there is no use in trying: the sandbox may not, or the
address is wrong."""

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
MAX_EVENT_BYTES = 8 << 20  # bytes of an event
IDLE_TIMEOUT_SECONDS = 90.0  # seconds without a word, in which a relay's own ping would have come
RETRY_DELAYS_SECONDS = (0.5, 1, 2, 4, 8, 15, 30)  # seconds before the next try, and then the last of them
WEBSOCKET_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


class RelayRefused(Exception):
    """There is no use in trying again. One line says why."""


class ConnectionBroken(Exception):
    """This connection is over."""


class WebSocketConnection:
    """A WebSocket, as the side that called. Broken if it is not to be had; Refused if it never will."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "ws" or not parts.hostname:
            raise RelayRefused(f"RELAY_URL is no ws:// address: {url}")
        try:
            self.socket = socket.create_connection((parts.hostname, parts.port or 80), timeout=IDLE_TIMEOUT_SECONDS)
        except OSError as failed:
            raise ConnectionBroken(f"nobody answers: {failed}") from failed
        self.reader: BinaryIO = self.socket.makefile("rb")
        try:
            self._perform_handshake(parts.netloc, f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}")
        except (OSError, http.client.HTTPException) as failed:
            self.close()
            raise ConnectionBroken(f"it broke off: {failed or type(failed).__name__}") from failed
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
            raise ConnectionBroken("it broke off before it answered")
        status, headers = int(words[1]), http.client.parse_headers(self.reader)
        if status == 101:
            expected = base64.b64encode(
                hashlib.sha1(f"{key}{WEBSOCKET_GUID}".encode(), usedforsecurity=False).digest()
            ).decode()
            if headers.get("Sec-WebSocket-Accept") != expected:
                raise ConnectionBroken("who answers does not speak WebSocket")
            return
        length = headers.get("Content-Length", "0")
        said = extract_error_message(self.reader.read(min(int(length), 1 << 14) if length.isdigit() else 0))
        if 400 <= status < 500 and status not in (408, 409, 425, 429):
            raise RelayRefused(f"the relay is not for this sandbox ({status}): {said}")
        raise ConnectionBroken(f"{status}: {said}")

    def events(self) -> Iterator[tuple[int, bytes]]:
        """Messages as they come, (TEXT or BINARY, content), until the connection breaks: then Broken."""
        kind, content = 0, b""
        while True:
            try:
                final, code, piece = self._read_frame()
            except OSError as failed:
                raise ConnectionBroken(str(failed) or type(failed).__name__) from failed
            if code == CLOSE:
                said = struct.unpack(">H", piece[:2])[0] if len(piece) > 1 else 1005
                raise ConnectionBroken(f"closed by the relay, {said} {piece[2:].decode(errors='replace')}".strip())
            if code == PING:
                self._send(PONG, piece)
            elif code in (TEXT, BINARY, 0):
                kind, content = code or kind, (content if code == 0 else b"") + piece
                if len(content) > MAX_EVENT_BYTES:
                    raise ConnectionBroken("an event is too large")
                if final:
                    yield kind, content

    def _read_frame(self) -> tuple[bool, int, bytes]:
        """One frame. A server's are not masked."""
        first, second = self._read_exactly(2)
        length = second & 127
        if length > 125:
            length = int.from_bytes(self._read_exactly(2 if length == 126 else 8))
        if second & 128 or length > MAX_EVENT_BYTES:
            raise ConnectionBroken("this is no frame of a server, or too large")
        return bool(first & 128), first & 15, self._read_exactly(length)

    def _read_exactly(self, length: int) -> bytes:
        content = self.reader.read(length)
        if len(content) < length:
            raise ConnectionBroken("the connection is gone")
        return content

    def _send(self, code: int, content: bytes) -> None:
        """A frame of at most 125 bytes: answers to pings are all that is ever said."""
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(content))
        self.socket.sendall(bytes([128 | code, 128 | len(content)]) + mask + masked)

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


def extract_error_message(said: bytes) -> str:
    """What an error's body says, on one line."""
    try:
        text = str(json.loads(said)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = said.decode(errors="replace")
    return " ".join(text.split())[:300]


def format_event(kind: int, content: bytes) -> str:
    """An event: a text as it is, other bytes in base64."""
    if kind == BINARY:
        return base64.b64encode(content).decode()
    return " ".join(content.decode(errors="replace").splitlines())


def watch_relay(url: str, say: Callable[[str], object], sleep: Callable[[float], object] = time.sleep) -> None:
    """Say what the relay says, for ever. Refused ends it."""
    tries = 0
    while True:
        try:
            connection = WebSocketConnection(url)
            try:
                say("Connected to relay")
                for event in connection.events():
                    tries = 0  # it works: the next break begins anew
                    say(format_event(*event))
            finally:
                connection.close()
        except ConnectionBroken as broken:
            pause = RETRY_DELAYS_SECONDS[min(tries, len(RETRY_DELAYS_SECONDS) - 1)] * random.uniform(0.8, 1.2)  # noqa: S311 - many were cut off at once
            tries += 1
            say(f"Not connected to relay: {broken}. Next try in {pause:.1f} s")
            sleep(pause)


def main(argv: list[str], env: dict[str, str]) -> int:
    relay = env.get("RELAY_URL", "")
    try:
        watch_relay(f"{relay.rstrip('/')}/{argv[0] if argv else DEFAULT_SUBSCRIPTION}", lambda said: print(said, flush=True))
    except RelayRefused as refused:
        print(f"relay_watcher: {refused}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
