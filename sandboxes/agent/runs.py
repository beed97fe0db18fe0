"""Runs of commands by the agent in a sandbox: started at most once, repeated safely, read by offset."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandboxes.agent.protocol import Frame, ProtocolError, RunState, parse_state
from sandboxes.agent.session import AgentSession, SessionLost, SessionRegistry

ANSWER_TIMEOUT_SECONDS = 5.0  # for a response, in addition to the time that the agent is asked to wait
WAIT_SECONDS = 30.0  # of one request
END_TIMEOUT_SECONDS = 5.0  # for the agent's own kill after the run's timeout
RECONNECT_TIMEOUT_SECONDS = 10.0


class NotStarted(Exception):
    """No agent was reached: no request for this run was sent, and the caller may use another way."""


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

    def encode(self) -> tuple[bytes, bytes]:
        """Return (command as JSON, stdin)."""
        return json.dumps({"argv": list(self.argv), "env": dict(self.env), "cwd": self.cwd}).encode(), self.stdin


@dataclass(frozen=True)
class AgentResult:
    """Result as reported by the agent. `dropped` counts the bytes of stdout and stderr that were not retained."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    dropped: tuple[int, int]


class AgentClient:
    """Runs of one sandbox. Finds the sandbox's session anew for each request, so a run survives a reconnection."""

    def __init__(self, registry: SessionRegistry, sandbox: str) -> None:
        self._registry, self._sandbox = registry, sandbox

    def run(self, run: AgentRun, *, boot: str | None = None) -> AgentResult:
        """Start a run, unless its id is known, and wait for its result. The result is retained until `acknowledge`.

        `boot` is the agent's boot id of an earlier request for this run; an agent with another one starts nothing. Raise
        NotStarted if no request was sent, OutcomeUnknown if the agent restarted, violated the protocol or does not respond."""
        deadline = time.monotonic() + run.timeout + END_TIMEOUT_SECONDS
        command, stdin = run.encode()
        while True:
            session = self._registry.find(self._sandbox, timeout=RECONNECT_TIMEOUT_SECONDS if boot else 0.0)
            if session is None and boot is None:
                raise NotStarted("No agent is connected.")
            if session is None or time.monotonic() > deadline:
                raise OutcomeUnknown("The agent does not respond.")
            boot = boot or session.boot
            head = {"verb": "exec", "run": run.id, "boot": boot, "timeout": run.timeout, "cap": run.cap}
            wait = min(max(deadline - time.monotonic(), 0.0), WAIT_SECONDS)
            try:
                head |= {"command_bytes": len(command), "wait": wait}
                frame, state = self._request(session, run.id, head, command + stdin, timeout=wait + ANSWER_TIMEOUT_SECONDS)
                if state.state == "ended":
                    return self._collect(session, run, frame, state)
            except SessionLost:
                continue
            except ProtocolError as error:
                raise OutcomeUnknown(f"The agent violated the protocol: {error}") from error
            if state.state == "busy":
                raise NotStarted("The agent retains too many results.")
            if state.state != "running":
                raise OutcomeUnknown("The agent has no result of this run.")

    def acknowledge(self, run_id: str) -> None:
        """Let the agent drop a recorded result. Idempotent. Raise SessionLost."""
        self._connected().request({"verb": "ack", "run": run_id}, timeout=ANSWER_TIMEOUT_SECONDS)

    def kill(self, run_id: str) -> None:
        """Kill all processes of a run, and return once the agent reports them gone. Raise SessionLost, ProtocolError."""
        self._request(self._connected(), run_id, {"verb": "kill", "run": run_id}, timeout=ANSWER_TIMEOUT_SECONDS)

    def read(self, run_id: str, stream: str, offset: int, *, wait: float = 0.0) -> tuple[bytes, RunState]:
        """Return at most 64 KiB of output from a byte offset, and the run's state. Raise SessionLost, ProtocolError."""
        session = self._connected()
        frame, state = self._read(session, run_id, stream, offset, wait)
        return frame.body, state

    def _collect(self, session: AgentSession, run: AgentRun, frame: Frame, state: RunState) -> AgentResult:
        """Fetch the output of an ended run. Raise SessionLost, ProtocolError."""
        assert state.exit_code is not None
        if max(state.retained) > run.cap + ERROR_MESSAGE_BYTES:
            self._reject(session, "more output than the cap")
        if state.inline:
            stdout, stderr = frame.body[: state.retained[0]], frame.body[state.retained[0] :]
        else:
            stdout = self._read_stream(session, run.id, "stdout", state)
            stderr = self._read_stream(session, run.id, "stderr", state)
        return AgentResult(state.exit_code, stdout, stderr, state.timed_out, state.dropped)

    def _read_stream(self, session: AgentSession, run_id: str, stream: str, ended: RunState) -> bytes:
        size, content = ended.retained[stream == "stderr"], bytearray()
        while len(content) < size:
            frame, state = self._read(session, run_id, stream, len(content), 0.0)
            if not frame.body or state.retained != ended.retained or state.exit_code != ended.exit_code:
                self._reject(session, "the result has changed")
            content += frame.body
        if len(content) > size:
            self._reject(session, "more output than stated")
        return bytes(content)

    def _read(self, session: AgentSession, run_id: str, stream: str, offset: int, wait: float) -> tuple[Frame, RunState]:
        head = {"verb": "read", "run": run_id, "stream": stream, "offset": offset, "wait": wait}
        return self._request(session, run_id, head, timeout=wait + ANSWER_TIMEOUT_SECONDS)

    def _request(
        self, session: AgentSession, run_id: str, head: Mapping[str, object], body: bytes = b"", *, timeout: float
    ) -> tuple[Frame, RunState]:
        frame = session.request(head, body, timeout=timeout)
        try:
            return frame, parse_state(run_id, frame)
        except ProtocolError as error:
            session.reject(error)
            raise

    def _reject(self, session: AgentSession, reason: str) -> None:
        error = ProtocolError(reason)
        session.reject(error)
        raise error

    def _connected(self) -> AgentSession:
        session = self._registry.find(self._sandbox, timeout=RECONNECT_TIMEOUT_SECONDS)
        if session is None:
            raise SessionLost("No agent is connected.")
        return session


ERROR_MESSAGE_BYTES = 4 << 10  # the agent's message about a program that it could not start comes on top of the cap
