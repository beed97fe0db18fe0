"""File operations and background processes through the agent in a sandbox.

Every request may be repeated: operations and processes have ids, output and stdin have byte offsets. A restart of the gateway
therefore interrupts nothing."""

import contextlib
import io
import json
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import BinaryIO, Self

from sandboxes.agent.client import RECONNECT_PAUSE_SECONDS, AgentConnection, ConnectionLost, GatewayDown, NotConnected
from sandboxes.agent.protocol import MAX_BODY_BYTES, Frame, ProtocolError, RunState, TerminalSize, parse_state
from sandboxes.agent.runs import (
    CONNECT_SECONDS,
    FIRST_RESPONSE_SECONDS,
    FIRST_WAIT_SECONDS,
    RESPONSE_SECONDS,
    AgentClient,
    NotStarted,
)

PATIENCE_SECONDS = 10.0  # with an agent that does not respond, in the middle of an operation
WAIT_SECONDS = 20.0  # of a request for output
ABANDONED_SECONDS = 60.0  # after which the agent ends an operation whose caller makes no request any more
MAX_INLINE_STDIN_BYTES = WRITE_BYTES = 1 << 20
MAX_ERROR_BYTES = 4096
PROCESS_LOG_BYTES = 1 << 18  # of each background process that are kept at least
MAX_LISTED_IDS = 64  # in one request


class OperationFailed(Exception):
    """The operation ended with an error. `exit_code` is that of image/files.py."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RepeatingConnection:
    """Connection that is opened again after a loss, while the sandbox runs and the agent is the same.

    `check` is called after a loss and while a remote gateway is waited for, and may raise an error that ends the operation. One
    thread uses the connection."""

    def __init__(self, client: AgentClient, check: Callable[[], None]) -> None:
        """Connect. Raise NotStarted."""
        self._client, self._check = client, check
        try:
            self._connection: AgentConnection | None = client.open_to_start(check)
        except NotConnected as error:
            raise NotStarted(str(error), "not_connected") from error
        self.boot = self._connection.boot

    def request(self, run_id: str, head: Mapping[str, object], body: bytes = b"", *, timeout: float) -> tuple[Frame, RunState]:
        """Send a request for a run, and return its response. Raise ConnectionLost, ProtocolError."""
        until = time.monotonic() + timeout + PATIENCE_SECONDS
        while True:
            try:
                self._connection = self._connection or self._client.open(CONNECT_SECONDS)
                frame = self._connection.request({**head, "run": run_id}, body, timeout=timeout)
                return frame, parse_state(run_id, frame)
            except (ConnectionLost, NotConnected) as error:
                self.close()
                if time.monotonic() > until:
                    raise ConnectionLost(str(error)) from error
                self._check()
                if isinstance(error, GatewayDown):
                    time.sleep(RECONNECT_PAUSE_SECONDS)
                timeout = max(timeout, RESPONSE_SECONDS)
            except ProtocolError as error:
                if self._connection:
                    self._connection.report(str(error))
                raise

    def send(self, run_id: str, head: Mapping[str, object]) -> None:
        """Send a request whose effect is not waited for, if the connection is open."""
        if self._connection:
            with contextlib.suppress(ConnectionLost):
                self._connection.send({**head, "run": run_id})

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._connection:
            self._connection.__exit__(kind, error, traceback)
            self._connection = None


class FileOperation:
    """One operation of image/files.py in the sandbox, and the stream of its output.

    `idle_timeout`: seconds without progress, after which TimeoutError is raised."""

    def __init__(self, client: AgentClient, words: Sequence[str], *, idle_timeout: float, check: Callable[[], None]) -> None:
        """Connect. Raise NotStarted."""
        self._connection, self._words, self._idle_timeout = RepeatingConnection(client, check), words, idle_timeout
        self._id = f"files/{uuid.uuid4().hex}"
        self._progress_at = time.monotonic()

    def run(self, stdin: BinaryIO | None) -> Iterator[bytes]:
        """Yield the output. Raise NotStarted, OperationFailed, TimeoutError, ConnectionLost or ProtocolError."""
        with self._connection:
            frame, state = self._start(stdin)
            is_done = False
            try:
                if state.inline:
                    is_done = True
                    yield from self._finish(state, frame.body[: state.retained[0]], frame.body[state.retained[0] :])
                    return
                state = yield from self._read_output()
                error = self._read(self._connection, "stderr", 0)[0].body if state.exit_code else b""
                yield from self._finish(state, b"", error)
            finally:
                # A kill also if the caller reads no further.
                self._connection.send(self._id, {"verb": "ack"} if is_done else {"verb": "kill", "forget": True})

    def _start(self, stdin: BinaryIO | None) -> tuple[Frame, RunState]:
        content, follows = _read_first_bytes(stdin)
        command = json.dumps({"words": [*self._words]}).encode()
        head = {"verb": "exec", "boot": self._connection.boot, "timeout": 0, "idle": ABANDONED_SECONDS, "cap": MAX_ERROR_BYTES}
        head |= {"keep": "stream", "open": follows, "command_bytes": len(command)}
        head["wait"] = 0 if follows else FIRST_WAIT_SECONDS
        timeout = FIRST_WAIT_SECONDS + FIRST_RESPONSE_SECONDS
        try:
            frame, state = self._connection.request(self._id, head, command + content, timeout=timeout)
            if state.state == "busy":  # its helper may have been killed before it began, and another one is started now
                frame, state = self._connection.request(self._id, head, command + content, timeout=timeout)
            if state.state == "busy":
                raise NotStarted("The agent cannot start a process.", "busy")
        except NotStarted:
            if stdin is not None and content:
                stdin.seek(-len(content), io.SEEK_CUR)
            raise
        if follows and stdin is not None and state.state == "running":
            frame, state = self._write(stdin, len(content))
        self._require_known(state)
        return frame, state

    def _write(self, stdin: BinaryIO, offset: int) -> tuple[Frame, RunState]:
        """Send stdin until its end, or until the operation ends."""
        while True:
            chunk = stdin.read(WRITE_BYTES)
            head = {"verb": "write", "offset": offset, "last": not chunk, "wait": self._idle_timeout}
            frame, state = self._connection.request(self._id, head, chunk, timeout=self._idle_timeout + RESPONSE_SECONDS)
            self._require_known(state)
            offset += len(chunk)
            if state.state == "ended" or not chunk:
                return frame, state

    def _read_output(self) -> Generator[bytes, None, RunState]:
        offset, self._progress_at = 0, time.monotonic()
        while True:
            frame, state = self._read(self._connection, "stdout", offset)
            if state.offset != offset:
                raise ProtocolError("output with a gap")
            if frame.body:
                offset, self._progress_at = offset + len(frame.body), time.monotonic()
                yield frame.body
                self._progress_at = time.monotonic()
            if state.state == "ended" and not state.more:
                return state
            if time.monotonic() - self._progress_at > self._idle_timeout:
                raise TimeoutError

    def _read(self, connection: RepeatingConnection, stream: str, offset: int) -> tuple[Frame, RunState]:
        head = {"verb": "read", "stream": stream, "offset": offset, "wait": WAIT_SECONDS}
        frame, state = connection.request(self._id, head, timeout=WAIT_SECONDS + RESPONSE_SECONDS)
        self._require_known(state)
        return frame, state

    def _finish(self, state: RunState, content: bytes, error: bytes) -> Iterator[bytes]:
        if state.exit_code:
            raise OperationFailed(state.exit_code, error[:MAX_ERROR_BYTES].decode(errors="replace").strip())
        if content:
            yield content

    def _require_known(self, state: RunState) -> None:
        if state.state not in ("running", "ended"):
            raise ConnectionLost(f"The agent has no result of this operation: {state.state}")


def _read_first_bytes(stdin: BinaryIO | None) -> tuple[bytes, bool]:
    """Return the bytes of stdin that fit into the first request, and whether more follow.

    None are read of a file whose position cannot be set back for another way to execute the operation, as of a request body."""
    if stdin is None:
        return b"", False
    if not stdin.seekable():
        return b"", True
    content = stdin.read(MAX_INLINE_STDIN_BYTES)
    return content, len(content) == MAX_INLINE_STDIN_BYTES


class AgentProcesses:
    """Background processes in one sandbox. Methods raise NotStarted if no agent is connected, ConnectionLost, ProtocolError."""

    def __init__(self, client: AgentClient, *, check: Callable[[], None]) -> None:
        self._client, self._check = client, check

    def start(
        self,
        run_id: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
    ) -> int | None:
        """Start a process unless its id is known. Return its exit code, or None if it runs. Raise NotStarted if refused."""
        fields: dict[str, object] = {"argv": [*argv], "env": {**env}, "cwd": cwd}
        if terminal is not None:
            fields["terminal"] = [*terminal]
        command = json.dumps(fields).encode()
        head = {"verb": "exec", "timeout": 0, "cap": PROCESS_LOG_BYTES, "keep": "tail", "wait": WAIT_SECONDS}
        head["open"] = stdin or terminal is not None
        with RepeatingConnection(self._client, self._check) as connection:
            head |= {"boot": connection.boot, "command_bytes": len(command)}
            _, state = connection.request(run_id, head, command, timeout=WAIT_SECONDS + RESPONSE_SECONDS)
        if state.state == "acknowledged":  # it ended long ago
            return self.list_exit_codes([run_id])[run_id]
        if state.state not in ("running", "ended"):
            raise NotStarted("The agent cannot start a process.", "busy")
        return state.exit_code

    def send_signal(self, run_id: str, number: int) -> None:
        """Send a signal to a process and its process group. One that has ended, or is not known, is left alone."""
        with RepeatingConnection(self._client, self._check) as connection:
            connection.request(run_id, {"verb": "signal", "signal": number}, timeout=RESPONSE_SECONDS)

    def write_stdin(self, run_id: str, content: bytes, *, offset: int, last: bool) -> int | None:
        """Write to stdin from an offset. Return the number of bytes received in all, or None if the offset is above it.

        The agent ends its connection after a request with a higher offset, so the number is requested first."""
        head = {"verb": "write", "offset": 0, "last": False, "wait": 0}
        with RepeatingConnection(self._client, self._check) as connection:
            _, state = connection.request(run_id, head, timeout=RESPONSE_SECONDS)
            if state.state not in ("running", "ended") or offset > state.written:
                return None
            head |= {"offset": offset, "last": last, "wait": WAIT_SECONDS}
            _, state = connection.request(run_id, head, content, timeout=WAIT_SECONDS + RESPONSE_SECONDS)
        return state.written

    def list_exit_codes(self, run_ids: Sequence[str]) -> dict[str, int | None]:
        """Return the exit codes of the processes that the agent knows, None for those that run."""
        found = dict[str, int | None]()
        with self._client.open(CONNECT_SECONDS) as connection:
            for first in range(0, len(run_ids), MAX_LISTED_IDS):
                asked = run_ids[first : first + MAX_LISTED_IDS]
                frame = connection.request({"verb": "list", "runs": [*asked]}, timeout=RESPONSE_SECONDS)
                found |= _parse_exit_codes(frame.body, asked)
        return found

    def read_log(self, run_id: str, *, start: int, length: int) -> tuple[bytes, int] | None:
        """Return at most `length` bytes of output from the offset `start`, and the offset after them. None if unknown."""
        content, offset = bytearray(), start
        with RepeatingConnection(self._client, self._check) as connection:
            while True:
                head = {"verb": "read", "stream": "stdout", "offset": offset, "wait": 0, "limit": length - len(content)}
                frame, state = connection.request(run_id, head, timeout=RESPONSE_SECONDS)
                if state.state not in ("running", "ended"):
                    return None
                if len(frame.body) > length - len(content):
                    raise ProtocolError("more output than requested")
                if content and state.offset != offset:  # output in between was dropped meanwhile
                    return bytes(content), offset
                offset = state.offset + len(frame.body)
                content += frame.body
                if len(frame.body) < MAX_BODY_BYTES or len(content) >= length:
                    return bytes(content), offset


def _parse_exit_codes(content: bytes, asked: Sequence[str]) -> dict[str, int | None]:
    try:
        codes = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("invalid list") from error
    if not isinstance(codes, dict) or not codes.keys() <= {*asked}:
        raise ProtocolError("invalid list")
    if not all(code is None or (type(code) is int and 0 <= code <= 255) for code in codes.values()):
        raise ProtocolError("invalid exit code")
    return codes
