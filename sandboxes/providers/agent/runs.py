"""Runs by the agent in a sandbox: the output of a running command, and results that outlive their caller."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

from django.conf import settings

from sandboxes.agent.client import ConnectionLost, GatewayDown, NotConnected
from sandboxes.agent.protocol import ProtocolError
from sandboxes.agent.runs import AgentClient, AgentResult
from sandboxes.providers.command_results import ExecResult, ExecState
from sandboxes.providers.errors import Unavailable

STREAMS = ("stdout", "stderr")
READ_TIMEOUT_SECONDS = 0.5  # of the output of a running command
READ_PAUSE_SECONDS = 30.0  # after a read without a response


class AgentOutput:
    """Output of a running command, as far as the agent retains it. Each call fetches what is new.

    The heartbeat of all claims of this process calls it, so an agent that does not respond is not asked again for a while."""

    def __init__(self, agent: AgentClient, run_id: str, stream: str) -> None:
        self._agent, self._run_id, self._stream = agent, run_id, stream
        self._content, self._lock, self._next_read = bytearray(), threading.Lock(), 0.0

    def __bytes__(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._next_read:
                self._fetch()
            return bytes(self._content)

    def _fetch(self) -> None:
        try:
            while content := self._read(len(self._content)):
                self._content += content
        except (NotConnected, ConnectionLost, ProtocolError):
            self._next_read = time.monotonic() + READ_PAUSE_SECONDS

    def _read(self, offset: int) -> bytes:
        return self._agent.read(self._run_id, self._stream, offset, timeout=READ_TIMEOUT_SECONDS)[0]


def acknowledge(agent: AgentClient, run_id: str) -> None:
    """Let the agent drop a result. Without a connection the agent drops the result later by itself."""
    with suppress(NotConnected, ConnectionLost, ProtocolError):
        agent.acknowledge(run_id)


def kill(agent: AgentClient, run_id: str) -> bool:
    """Kill a run by the agent. Return False if the agent does not know the run or does not respond."""
    try:
        return agent.kill(run_id) in ("running", "ended")
    except (NotConnected, ConnectionLost, ProtocolError):
        return False


def find_state(agent: AgentClient, run_id: str) -> ExecState | None:
    """Return the state of a run, or None if the agent does not know it or does not respond.

    Raise Unavailable while the gateway restarts."""
    try:
        return read_state(agent, run_id)
    except GatewayDown as error:
        raise Unavailable(str(error)) from error
    except (NotConnected, ConnectionLost):
        return None


def read_state(agent: AgentClient, run_id: str) -> ExecState | None:
    """Return the state of a run, or None if the agent does not know it or violates the protocol.

    Raise NotConnected or ConnectionLost if the agent does not respond."""
    try:
        found = agent.find(run_id, cap=settings.EXEC_OUTPUT_CAP)
    except ProtocolError:
        return None
    if isinstance(found, AgentResult):
        truncated = any(found.dropped)
        result = ExecResult(
            found.exit_code, found.stdout, found.stderr, timed_out=found.timed_out, oom=found.oom, truncated=truncated
        )
        return ExecState(running=False, result=result, age=None if found.age is None else timedelta(seconds=found.age))
    return ExecState(running=True) if found.state == "running" else None
