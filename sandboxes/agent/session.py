"""Connections of sandbox agents: requests on one connection, and the current connection of each sandbox."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from sandboxes.agent.protocol import Frame, FrameReader, ProtocolError, encode_frame, parse_hello

HELLO_TIMEOUT_SECONDS = 5.0
SEND_TIMEOUT_SECONDS = 5.0  # an agent that does not read for this long is disconnected
CHUNK_BYTES = 1 << 18


class SessionLost(Exception):
    """The connection ended, or the agent did not respond. Requests in progress may have had their effect."""


class AgentSession:
    """One connection of an agent. Threads may send requests concurrently.

    Any violation of the protocol ends the session: a response without a request, a second response, an invalid frame."""

    def __init__(self, connection: socket.socket) -> None:
        """Read the greeting. Raise ProtocolError or SessionLost, with the connection closed."""
        self._connection, self._reader = connection, FrameReader()
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[Frame]] = {}
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self.violation = ""  # reason for which the session was ended by this side
        try:
            self.boot = parse_hello(self._receive_hello())
        except BaseException:
            connection.close()
            raise
        connection.settimeout(SEND_TIMEOUT_SECONDS)
        self.alive = True
        threading.Thread(target=self._receive, name="agent-session", daemon=True).start()

    def request(self, head: Mapping[str, Any], body: bytes = b"", *, timeout: float) -> Frame:
        """Send one request and wait for its response. Raise SessionLost after `timeout` seconds or if the connection ends."""
        future: Future[Frame] = Future()
        request_id = next(self._ids) % (1 << 32)
        frame = encode_frame(request_id, head, body)
        with self._lock:
            if not self.alive:
                raise SessionLost("The connection has ended.")
            self._pending[request_id] = future
        try:
            with self._send_lock:
                self._connection.sendall(frame)
            return future.result(timeout)
        except FutureTimeoutError as error:
            self.close("no response")
            raise SessionLost("The agent does not respond.") from error
        except OSError as error:
            self.close()
            raise SessionLost(f"The connection failed: {error}") from error

    def reject(self, error: ProtocolError) -> None:
        """End the session because of the content of a response."""
        self.close(str(error))

    def close(self, violation: str = "") -> None:
        """End the session. Requests in progress raise SessionLost."""
        with self._lock:
            if not self.alive:
                return
            self.alive, self.violation = False, violation
            pending, self._pending = self._pending, {}
        with contextlib.suppress(OSError):  # the agent has closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        for future in pending.values():
            future.set_exception(SessionLost(violation or "The connection has ended."))

    def _receive_hello(self) -> Frame:
        deadline = time.monotonic() + HELLO_TIMEOUT_SECONDS
        while True:
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                chunk = self._connection.recv(CHUNK_BYTES)
            except OSError as error:
                raise SessionLost(f"No greeting: {error}") from error
            if not chunk:
                raise SessionLost("No greeting.")
            frames = self._reader.feed(chunk)
            if len(frames) > 1:
                raise ProtocolError("response without a request")
            if frames:
                return frames[0]

    def _receive(self) -> None:
        try:
            while self.alive:
                try:
                    chunk = self._connection.recv(CHUNK_BYTES)
                except TimeoutError:
                    continue
                if not chunk:
                    break
                for frame in self._reader.feed(chunk):
                    self._resolve(frame)
        except ProtocolError as error:
            self.close(str(error))
        except OSError:
            pass
        finally:
            self.close()
            self._connection.close()

    def _resolve(self, frame: Frame) -> None:
        with self._lock:
            future = self._pending.pop(frame.request_id, None)
        if future is None:
            if not self.alive:
                return
            raise ProtocolError("response without a request")
        future.set_result(frame)


class SessionRegistry:
    """Current session of each sandbox of this process. A new connection replaces the previous one."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._changed = threading.Condition()

    def add(self, sandbox: str, session: AgentSession) -> None:
        with self._changed:
            previous, self._sessions[sandbox] = self._sessions.get(sandbox), session
            self._changed.notify_all()
        if previous is not None:
            previous.close("replaced by a new connection")

    def find(self, sandbox: str, *, timeout: float = 0.0) -> AgentSession | None:
        """Return the live session of a sandbox, waiting up to `timeout` seconds for one."""

        def live() -> AgentSession | None:
            session = self._sessions.get(sandbox)
            return session if session is not None and session.alive else None

        with self._changed:
            self._changed.wait_for(lambda: live() is not None, timeout)
            return live()
