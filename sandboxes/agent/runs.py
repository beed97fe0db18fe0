"""Runs of commands by the agent in a sandbox: started at most once, repeated safely, read by offset."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes.agent.addresses import GatewayAddress
from sandboxes.agent.client import (
    RECONNECT_PAUSE_SECONDS,
    AgentConnection,
    AgentOutdated,
    ConnectionLost,
    NotConnected,
    connect_through_restart,
    idle_connections,
)
from sandboxes.agent.protocol import MAX_BODY_BYTES, MAX_REQUEST_BODY_BYTES, Frame, ProtocolError, RunState, parse_state

CONNECT_SECONDS = 3.0  # for an agent to connect; the gateway waits less unless it has just started
FIRST_WAIT_SECONDS = FIRST_RESPONSE_SECONDS = 0.5  # of the first request: a container that does not respond is noticed early
WAIT_SECONDS = 30.0  # of each further request
RESPONSE_SECONDS = 5.0  # for a response, in addition to the time that the agent is asked to wait
STDIN_PART_BYTES = 1 << 20  # of one request, if the input is sent in several
END_SECONDS = 5.0  # for the agent's own kill after the run's timeout


class NotStarted(Exception):
    """No agent was reached, or the agent refused the run: nothing was started, and the caller may use another way.

    `reason` is one of `gateway.FALLBACK_REASONS`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OutcomeUnknown(Exception):
    """The run may have been started, and its result cannot be obtained. It must not be started again."""


@dataclass(frozen=True)
class AgentRun:
    """Command to run. `id` is the run's id in the control plane."""

    id: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    timeout: float  # seconds
    stdin: bytes = b""
    cap: int = 1 << 20  # bytes per stream
    digest: str = ""  # directory whose digest is part of the result, if it is small
    may_stream: bool = False  # input that is too long for one request is sent in several, instead of refused

    def encode(self) -> tuple[bytes, bytes]:
        """Return (command as JSON, stdin or its first part)."""
        command = json.dumps({"argv": list(self.argv), "env": dict(self.env), "cwd": self.cwd}).encode()
        is_long = self.may_stream and len(command) + len(self.stdin) > MAX_REQUEST_BODY_BYTES
        return command, self.stdin[:STDIN_PART_BYTES] if is_long else self.stdin


@dataclass(frozen=True)
class AgentResult:
    """Result as reported by the agent. `dropped` counts the bytes of stdout and stderr that were not retained."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    dropped: tuple[int, int]
    digest: str = ""  # SHA-256 in hexadecimal, as by state.changes.digest_manifest
    oom: bool = False  # killed by the agent or the kernel for lack of memory, as far as the agent can tell
    age: float | None = field(default=None, compare=False)  # seconds since the end


class AgentClient:
    """Runs in one sandbox, over connections of their own to the gateway.

    `gateway` is a unix socket of this host, with the id of a container, or another address, with the ref of a sandbox."""

    def __init__(self, gateway: GatewayAddress | Path, container: str) -> None:
        self._gateway, self.container = gateway, container

    def run(
        self, run: AgentRun, *, boot: str = "", check: Callable[[], None] = lambda: None,
        on_connect: Callable[[], None] = lambda: None,
    ) -> AgentResult:  # fmt: skip
        """Start a run, unless its id is known, and wait for its result. The result is retained until `acknowledge`.

        `boot` is the agent's boot id of an earlier request for this run; an agent with another one starts nothing. `check` is
        called whenever a response does not arrive and while a remote gateway is waited for. An error that it raises ends the
        wait. `on_connect` is called before the request is first sent, to an agent that runs. Raise NotStarted, or
        OutcomeUnknown if the agent restarted, violated the protocol or does not respond before the deadline."""
        command, stdin = run.encode()
        if len(command) + len(stdin) > MAX_REQUEST_BODY_BYTES:
            raise NotStarted("The command and its input are too long.", "too_long")
        deadline, sent = time.monotonic() + run.timeout + END_SECONDS, bool(boot)
        while True:
            try:
                with self._keep(self.open(CONNECT_SECONDS) if sent else self.open_to_start(check)) as connection:
                    if not sent:
                        on_connect()
                    boot, sent = boot or connection.boot, True
                    return self._run_on(connection, run, boot, command, stdin, deadline)
            except NotConnected as error:
                if not sent:
                    raise NotStarted(str(error), "not_connected") from error
                check()
                time.sleep(RECONNECT_PAUSE_SECONDS)
            except ConnectionLost:
                check()
            except ProtocolError as error:
                raise OutcomeUnknown(f"The agent violated the protocol: {error}") from error
            if time.monotonic() > deadline:
                raise OutcomeUnknown("The agent does not respond.")

    def _run_on(
        self, connection: AgentConnection, run: AgentRun, boot: str, command: bytes, stdin: bytes, deadline: float
    ) -> AgentResult:
        """Request the run and wait for its result. Raise NotStarted, OutcomeUnknown, ConnectionLost, ProtocolError."""
        wait, grace = FIRST_WAIT_SECONDS, FIRST_RESPONSE_SECONDS
        head = {"verb": "exec", "run": run.id, "boot": boot, "timeout": run.timeout, "cap": run.cap}
        head, body = head | {"command_bytes": len(command), "digest": run.digest}, command + stdin
        if has_more := len(stdin) < len(run.stdin):
            head |= {"open": True}
        while True:
            wait = min(wait, max(deadline - time.monotonic(), 0.0)) if not has_more else 0.0
            frame, state = self._request(connection, run.id, head | {"wait": wait}, body, timeout=wait + grace)
            if state.state == "ended":
                return self._collect(connection, run, frame, state)
            if state.state == "busy":
                raise NotStarted("The agent cannot start a process, or retains too many results.", "busy")
            if state.state != "running":
                raise OutcomeUnknown(f"The agent has no result of this run: {state.state}")
            if has_more:
                self._write_stdin(connection, run, deadline)
                has_more = False
            if time.monotonic() > deadline:
                raise OutcomeUnknown("The run has not ended by its deadline.")
            head, body = {"verb": "wait", "run": run.id, "digest": run.digest}, b""
            wait, grace = WAIT_SECONDS, RESPONSE_SECONDS

    def _write_stdin(self, connection: AgentConnection, run: AgentRun, deadline: float) -> None:
        """Send the input that the agent has not received yet. Raise ConnectionLost, ProtocolError.

        The agent answers when it has room for more. Bytes that it received before a loss of the connection are not repeated."""
        head: dict[str, object] = {"verb": "write", "run": run.id, "offset": 0, "last": False, "wait": 0}
        _, state = self._request(connection, run.id, head)
        while state.state == "running" and time.monotonic() < deadline:
            part = run.stdin[state.written : state.written + STDIN_PART_BYTES]
            is_last = state.written + len(part) == len(run.stdin)
            wait = min(WAIT_SECONDS, max(deadline - time.monotonic(), 0.0))
            head = {"verb": "write", "run": run.id, "offset": state.written, "last": is_last, "wait": wait}
            _, state = self._request(connection, run.id, head, part, timeout=wait + RESPONSE_SECONDS)
            if is_last:
                return

    def find(self, run_id: str, *, cap: int) -> AgentResult | RunState:
        """Return the result of an ended run, or another state. Raise NotConnected, ConnectionLost, ProtocolError."""
        with self._connect(CONNECT_SECONDS) as connection:
            head = {"verb": "wait", "run": run_id, "wait": 0}
            frame, state = self._request(connection, run_id, head)
            if state.state != "ended":
                return state
            return self._collect(connection, AgentRun(run_id, (), {}, "/", 0.0, cap=cap), frame, state)

    def acknowledge(self, run_id: str) -> None:
        """Let the agent drop a recorded result, without waiting for it. Raise NotConnected, ConnectionLost."""
        with self._connect(0.0) as connection:
            connection.send({"verb": "ack", "run": run_id})

    def kill(self, run_id: str) -> str:
        """Kill all processes of a run. Return its state once the agent reports them gone, "unknown" if there is no such run.

        Raise NotConnected, ConnectionLost, ProtocolError."""
        with self._connect(0.0) as connection:
            return self._request(connection, run_id, {"verb": "kill", "run": run_id})[1].state

    def read(
        self, run_id: str, stream: str, offset: int, *, wait: float = 0.0, timeout: float = RESPONSE_SECONDS
    ) -> tuple[bytes, RunState]:
        """Return at most 256 KiB of output from a byte offset, and the run's state, within `wait` and `timeout` seconds.

        Raise NotConnected, ConnectionLost, ProtocolError."""
        with self._connect(0.0) as connection:
            frame, state = self._read(connection, run_id, stream, offset, wait, timeout)
            return frame.body, state

    def responds(self, *, timeout: float, prepare: bool = False) -> bool:
        """Return whether a connected agent answers a ping within `timeout` seconds.

        With `prepare` the agent, which may be about to connect, also starts its helper for file operations, and keeps it until
        its first command."""
        try:
            self.ping(timeout=timeout, prepare=prepare)
        except (NotConnected, ConnectionLost, ProtocolError):
            return False
        return True

    def ping(self, *, timeout: float, prepare: bool = False) -> None:
        """Like `responds`. Raise NotConnected, ConnectionLost or ProtocolError if the agent does not."""
        with self._connect(CONNECT_SECONDS if prepare else 0.0) as connection:
            connection.request({"verb": "ping", "prepare": prepare}, timeout=timeout)

    def is_outdated(self, *, wait: float) -> bool:
        """Return whether the agent is of a version that is not spoken. Wait up to `wait` seconds for it to connect."""
        try:
            with self._connect(wait):
                return False
        except AgentOutdated:
            return True
        except (NotConnected, ConnectionLost, ProtocolError):
            return False

    def is_silent(self, *, timeout: float) -> bool:
        """Return whether the connected agent answers neither of two pings, each within half of `timeout` (seconds).

        False if no agent is connected. The second ping has a connection of its own, in case that the first one is at fault."""
        for _ in range(2):
            try:
                with AgentConnection(self._gateway, self.container, wait=0.0) as connection:
                    connection.request({"verb": "ping"}, timeout=timeout / 2)
                    return False
            except ConnectionLost as error:
                if not isinstance(error.__cause__, TimeoutError):
                    return False
            except (NotConnected, ProtocolError):
                return False
        return True

    def open(self, wait: float) -> AgentConnection:
        """Return an idle connection, or open one and wait up to `wait` seconds for the agent. Raise NotConnected."""
        idle = idle_connections.take(self._gateway, self.container)
        return idle or AgentConnection(self._gateway, self.container, wait=wait)

    def open_to_start(self, check: Callable[[], None]) -> AgentConnection:
        """Like `open`, for an operation that begins: also wait for the gateway, if it is being started again.

        `check` may raise an error that ends this wait."""
        idle = idle_connections.take(self._gateway, self.container)
        return idle or connect_through_restart(self._gateway, self.container, wait=CONNECT_SECONDS, check=check)

    def _connect(self, wait: float) -> AbstractContextManager[AgentConnection]:
        return self._keep(self.open(wait))

    @contextmanager
    def _keep(self, opened: AgentConnection) -> Iterator[AgentConnection]:
        """Keep the connection for later operations. Report a violation of the protocol."""
        with opened as connection:
            try:
                yield connection
            except ProtocolError as error:
                connection.report(str(error))
                raise

    def _collect(self, connection: AgentConnection, run: AgentRun, frame: Frame, state: RunState) -> AgentResult:
        """Fetch the output of an ended run. Raise ConnectionLost, ProtocolError."""
        assert state.exit_code is not None
        if max(state.retained) > run.cap + ERROR_MESSAGE_BYTES:
            raise ProtocolError("more output than the cap")
        if state.inline:
            stdout, stderr = frame.body[: state.retained[0]], frame.body[state.retained[0] :]
        else:
            stdout, stderr = self._read_streams(connection, run.id, state)
        return AgentResult(state.exit_code, stdout, stderr, state.timed_out, state.dropped, state.digest, state.oom, state.age)

    def _read_streams(self, connection: AgentConnection, run_id: str, ended: RunState) -> tuple[bytes, bytes]:
        """Return stdout and stderr of an ended run."""
        pieces = [
            (stream, offset, min(size - offset, MAX_BODY_BYTES))
            for stream, size in zip(("stdout", "stderr"), ended.retained, strict=True)
            for offset in range(0, size, MAX_BODY_BYTES)
        ]
        heads = [{"verb": "read", "run": run_id, "stream": stream, "offset": offset, "wait": 0} for stream, offset, _ in pieces]
        contents: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        for (stream, offset, size), frame in zip(pieces, connection.request_all(heads, timeout=RESPONSE_SECONDS), strict=True):
            state = parse_state(run_id, frame)
            if state.retained != ended.retained or state.exit_code != ended.exit_code:
                raise ProtocolError("the result has changed")
            if state.offset != offset or len(frame.body) != size:
                raise ProtocolError("less or more output than stated")
            contents[stream].append(frame.body)
        return b"".join(contents["stdout"]), b"".join(contents["stderr"])

    def _read(
        self, connection: AgentConnection, run_id: str, stream: str, offset: int, wait: float, timeout: float = 0.0
    ) -> tuple[Frame, RunState]:
        head = {"verb": "read", "run": run_id, "stream": stream, "offset": offset, "wait": wait}
        return self._request(connection, run_id, head, timeout=wait + (timeout or RESPONSE_SECONDS))

    def _request(
        self, connection: AgentConnection, run_id: str, head: Mapping[str, object], body: bytes = b"", *, timeout: float = 0.0
    ) -> tuple[Frame, RunState]:
        frame = connection.request(head, body, timeout=timeout or RESPONSE_SECONDS)
        return frame, parse_state(run_id, frame)


ERROR_MESSAGE_BYTES = 4 << 10  # the agent's message about a program that it could not start comes on top of the cap
