"""Execs by the agent in a container: its client, the output of a running command, and results that outlive their caller."""

import threading
import time
from collections import Counter
from contextlib import suppress

import structlog
from django.conf import settings

from sandboxes.agent.client import ConnectionLost, GatewayDown, NotConnected, report_fallback
from sandboxes.agent.protocol import ProtocolError
from sandboxes.agent.runs import AgentClient, AgentResult, NotStarted
from sandboxes.providers.base import ExecResult, ExecState, Unavailable
from sandboxes.providers.docker.engine import Engine

log = structlog.get_logger(__name__)
STREAMS = ("stdout", "stderr")
READ_TIMEOUT_SECONDS = 0.5  # of the output of a running command
READ_PAUSE_SECONDS = 30.0  # after a read without a response
fallbacks = Counter[str]()  # execs of this process by the engine although a gateway exists, by reason


def find_agent(engine: Engine, ref: str) -> AgentClient | None:
    """Return a client for the agent of a container. Raise Missing.

    None if no gateway was ever started here, or if the gateway cannot identify the agent (gVisor, Kata)."""
    if not settings.AGENT_GATEWAY.exists():
        return None
    container = engine.container_id(ref)
    return AgentClient(settings.AGENT_GATEWAY, container) if container else None


def note_fallback(engine: Engine, ref: str, error: NotStarted, mark: str = "") -> None:
    """Count and log an exec that the engine executes instead of the agent. `mark` identifies the exec of a run."""
    engine.container_ids.pop(ref, None)  # the container may have been replaced
    fallbacks[error.reason] += 1
    log.info("exec by the engine", sandbox=ref, run=mark, reason=str(error))
    report_fallback(settings.AGENT_GATEWAY, error.reason)


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
    """Return the state of a run, or None if the agent does not know it. Raise Unavailable while the gateway restarts."""
    try:
        found = agent.find(run_id, cap=settings.EXEC_OUTPUT_CAP)
    except GatewayDown as error:
        raise Unavailable(str(error)) from error
    except (NotConnected, ConnectionLost, ProtocolError):
        return None
    if isinstance(found, AgentResult):
        truncated = any(found.dropped)
        result = ExecResult(found.exit_code, found.stdout, found.stderr, timed_out=found.timed_out, truncated=truncated)
        return ExecState(running=False, result=result)
    return ExecState(running=True) if found.state == "running" else None
