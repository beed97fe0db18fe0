"""Streaming of an exec's stdin and output over one connection to a Docker Engine."""

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from sandboxes.providers.docker.engine import CALL_TIMEOUT_SECONDS, Conflict, Engine, build_unavailable
from sandboxes.providers.errors import Missing
from sandboxes.providers.streams import BoundedBuffer

CHUNK_BYTES = 1 << 18
CHECK_SECONDS = 5.0
DRAIN_INTERVAL_SECONDS = 0.1  # between two looks whether the reader is still needed


class EngineExec:
    """Running exec. Transfers stdin and output over one connection, in one loop with a deadline (monotonic seconds)."""

    def __init__(
        self,
        engine: Engine,
        connection: socket.socket,
        ref: str,
        exec_id: str,
        stdin: BinaryIO | None,
        mark: str,
        gid: int | None = None,
    ) -> None:
        self.ref, self.mark, self.gid = ref, mark, gid
        self.deadline = time.monotonic() + CALL_TIMEOUT_SECONDS
        self.idle_timeout: float | None = None  # seconds; if set, any progress moves the deadline to this far ahead
        self.check: Callable[[], object] = bool  # called every CHECK_SECONDS without output; may raise
        self.first_chunk = b""  # of output: the engine's message, if the program could not be started
        self._engine, self._connection, self._exec_id, self._stdin = engine, connection, exec_id, stdin
        self._unsent = memoryview(b"")
        self._read = bytearray()
        self._open = False  # the engine has upgraded the connection; stdin sent earlier would be lost
        body = '{"Detach":false,"Tty":false}'
        head = (
            f"POST /v{engine.client.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\n"
            "Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            connection.sendall((head + body).encode())
        except OSError as error:
            raise build_unavailable(error) from error
        connection.setblocking(False)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield (1 for stdout or 2 for stderr, chunk) until the connection ends.

        Raise TimeoutError at the deadline. May be called again afterwards."""
        poll = select.poll()  # select() is limited to descriptors below 1024
        while True:
            sending = self._open and self._stdin is not None
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if sending else 0))
            remaining = self.deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ready = poll.poll(min(remaining, CHECK_SECONDS) * 1000)
            if not ready and remaining > CHECK_SECONDS:  # under gVisor a stream may stay open after its container is gone
                self.check()
            if ready and self.idle_timeout:
                self.deadline = time.monotonic() + self.idle_timeout
            for _, event in ready:
                if event & ~select.POLLOUT:
                    if not self._receive():
                        return
                    yield from self._parse_frames()
                if event & select.POLLOUT:
                    self._send()

    def collect(self, out: "BoundedBuffer", err: "BoundedBuffer") -> None:
        """Read both streams to their end into size-limited buffers. Raise TimeoutError at the deadline."""
        for stream, chunk in self.frames():
            (err if stream == 2 else out).add(chunk)

    @contextlib.contextmanager
    def draining(self, out: "BoundedBuffer", err: "BoundedBuffer") -> Iterator[None]:
        """Read both streams during the block, in a thread.

        The engine reports no end of another exec in the container before it has passed on the output of a program that was
        killed."""
        if not self._open:  # there may never be any output
            yield
            return
        ended = threading.Event()
        self.idle_timeout = None

        def drain() -> None:
            while not ended.is_set():
                self.deadline = time.monotonic() + DRAIN_INTERVAL_SECONDS
                with contextlib.suppress(TimeoutError):
                    self.collect(out, err)
                    return

        thread = threading.Thread(target=drain, name="drain-exec", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def wait(self) -> tuple[int, bool]:
        """Wait for the exit. Return (exit code, whether the program was started). Raise TimeoutError at the deadline."""
        pause = 0.002
        while (state := self._inspect())["Running"]:  # the streams may end before the process
            if time.monotonic() > self.deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        code = state["ExitCode"]
        return (137, True) if code is None else (code, bool(state["Pid"]))

    def is_alive(self) -> bool:
        """Return whether the exec is running, or may still be started: a busy engine may not have begun with the start."""
        state = self._inspect()
        if state["Running"] or state["ExitCode"] is not None or state.get("gone"):
            return bool(state["Running"])
        try:
            return self._open or self._receive()
        except Conflict:  # the engine has refused the start
            return False

    def _inspect(self) -> dict[str, Any]:
        try:
            return dict(self._engine.call("GET", f"/exec/{self._exec_id}/json"))
        except Missing:  # the container has stopped, or is gone
            self._engine.call("GET", f"/containers/{self.ref}/json")
            return {"Running": False, "ExitCode": None, "gone": True}

    def _receive(self) -> bool:
        try:
            received = self._connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._read += received
        if not self._open and b"\r\n\r\n" in self._read:
            self._accept_upgrade(*self._read.split(b"\r\n\r\n", 1))
        return bool(received)

    def _accept_upgrade(self, head: bytearray, rest: bytearray) -> None:
        status = int(head.split(maxsplit=2)[1])
        if status not in (101, 200):  # 404, 409 or 500: the container has stopped or was removed
            raise Conflict(rest.decode(errors="replace").strip())
        self._open, self._read = True, rest

    def _parse_frames(self) -> Iterator[tuple[int, bytes]]:
        offset = 0
        while self._open and len(self._read) - offset >= 8:
            stream, length = struct.unpack_from(">BxxxI", self._read, offset)
            if len(self._read) - offset - 8 < length:
                break  # incomplete frame; the engine's frames have at most 32 KiB
            chunk = bytes(self._read[offset + 8 : offset + 8 + length])
            self.first_chunk = self.first_chunk or chunk
            yield stream, chunk
            offset += 8 + length
        del self._read[:offset]

    def _send(self) -> None:
        assert self._stdin is not None
        if not self._unsent:
            self._unsent = memoryview(self._stdin.read(CHUNK_BYTES))
        try:
            if self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
                return
            self._connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except ConnectionError:
            pass  # the program closed its stdin without reading everything
        self._stdin = None
