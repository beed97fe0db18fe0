"""image/relay_watcher.py against a relay with scripted bytes."""

import base64
import hashlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandboxes.image.relay_watcher import RETRY_DELAYS_SECONDS, WEBSOCKET_GUID, RelayRefused, watch_relay

PING, CLOSE = 0x89, 0x88
FORBIDDEN = b'HTTP/1.1 403 Forbidden\r\nContent-Length: 39\r\n\r\n{"error": {"message": "Not for\\nyou."}}\n'
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"
STRANGER = b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: x\r\n\r\n"


class StopWatching(Exception):
    """Ends the watcher's loop."""


def frame(first: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x7f" + size.to_bytes(8)
    return bytes([first]) + length + content


class ScriptedRelay:
    """Relay that answers each connection with the next element of a script.

    Elements that do not begin with HTTP are sent after a handshake. `replied` contains the client's bytes after its own."""

    def __init__(self, *script: bytes) -> None:
        self.script, self.asked, self.replied = script, list[bytes](), list[bytes]()
        self.door = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self.door.getsockname()[1]}/x?y=1"

    def serve(self) -> None:
        for words in self.script:
            near, _ = self.door.accept()
            with near:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += near.recv(4096)
                self.asked.append(head)
                near.sendall(words if words.startswith(b"HTTP/") else self.accepted(head) + words)
                near.shutdown(socket.SHUT_WR)
                self.replied.append(near.makefile("rb").read())

    def accepted(self, head: bytes) -> bytes:
        key = re.search(rb"Sec-WebSocket-Key: (\S+)", head)
        assert key
        accept = base64.b64encode(hashlib.sha1(key[1] + WEBSOCKET_GUID.encode()).digest())
        return b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"


@contextmanager
def relay(*script: bytes) -> Iterator[ScriptedRelay]:
    scripted = ScriptedRelay(*script)
    thread = threading.Thread(target=scripted.serve, daemon=True)
    thread.start()
    try:
        yield scripted
    finally:
        thread.join(10)
        scripted.door.close()


def watched(url: str, connections: int) -> tuple[list[str], list[float]]:
    """Run the watcher. Return (lines written, delay after each connection)."""
    lines: list[str] = []
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == connections:
            raise StopWatching

    with pytest.raises(StopWatching):
        watch_relay(url, lines.append, sleep)
    return lines, pauses


def test_fragmented_events_are_reassembled() -> None:
    script = frame(0x01, b"one\n") + frame(PING, b"there?") + frame(0x00, b"and") + frame(0x80, b"\r\ntwo")
    with relay(script + frame(0x82, b"\0\xff") + frame(0x81, b"x" * 70_000) + frame(CLOSE, b"\x03\xe9bye")) as scripted:
        lines, _ = watched(scripted.url, len(scripted.script))
    assert lines[:4] == ["Connected to relay", "one and two", "AP8=", "x" * 70_000]
    assert lines[4].startswith("Not connected to relay: closed by the relay, 1001 bye. Next try in ")
    assert scripted.asked[0].startswith(b"GET /x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    pong = scripted.replied[0]
    assert pong[:2] == bytes([0x8A, 0x80 | 6])
    assert bytes(byte ^ pong[2 + at % 4] for at, byte in enumerate(pong[6:])) == b"there?"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"", "connection closed"),
        (b"\x81\x85abcdhello", "invalid or too large frame"),
        (b"\x82\x7f" + (1 << 40).to_bytes(8), "too large"),
        (frame(0x01, b"x" * (5 << 20)) + frame(0x80, b"x" * (4 << 20)), "too large"),
        (STRANGER, "invalid WebSocket handshake"),
        (BUSY, "429: busy"),
        (b"HTTP/1.1\r\n\r\n", "closed during the handshake"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "502: "),
    ],
)
def test_broken_connection_is_retried(words: bytes, reason: str) -> None:
    with relay(words, frame(0x81, b"news")) as scripted:
        lines, _ = watched(scripted.url, len(scripted.script))
    assert [line for line in lines if reason in line] and lines[-3:-1] == ["Connected to relay", "news"]


def test_retry_delay_grows_until_an_event_arrives() -> None:
    with relay(*[BUSY] * 8, frame(0x81, b"news"), BUSY) as scripted:
        _, pauses = watched(scripted.url, len(scripted.script))
    steps = [*RETRY_DELAYS_SECONDS, RETRY_DELAYS_SECONDS[-1], RETRY_DELAYS_SECONDS[0], RETRY_DELAYS_SECONDS[1]]
    assert all(0.8 * step <= pause <= 1.2 * step for pause, step in zip(pauses, steps, strict=True))


def test_refused_tcp_connection_is_retried() -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    url = f"ws://127.0.0.1:{closed.getsockname()[1]}/"
    closed.close()
    lines, _ = watched(url, 1)
    assert "connection failed" in lines[0]


def test_refusal_ends_the_watcher_with_the_reason() -> None:
    with relay(FORBIDDEN) as scripted, pytest.raises(RelayRefused, match=r"\(403\): Not for you\."):
        watch_relay(scripted.url, print)


@pytest.mark.parametrize("url", ["", "/x", "http://127.0.0.1/", "wss://127.0.0.1/", "ws:///x"])
def test_invalid_relay_url_ends_the_watcher(url: str) -> None:
    with pytest.raises(RelayRefused, match="not a ws:// address"):
        watch_relay(url, print)
