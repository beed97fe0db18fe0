"""Output of a command by byte offsets, read from the agent in its container."""

from sandboxes.agent.client import AgentConnection, ConnectionLost, NotConnected
from sandboxes.agent.protocol import ProtocolError, parse_state
from sandboxes.agent.runs import RESPONSE_SECONDS, AgentClient
from sandboxes.providers.command_results import OutputPart, OutputReader

MAX_PART_BYTES = 64 << 10  # of one read: the memory that a slow reader of a stream occupies

WAIT_FACTORS = {
    "stdout": 1,
    "stderr": 4,
}  # without output, the response about stdout ends the wait: one response instead of two


class NotRetained(Exception):
    """The agent does not know the run, or has dropped its output."""


class AgentOutputReader(OutputReader):
    """One connection with at most one pending request for each stream: output of either is received at once."""

    def __init__(self, agent: AgentClient, run_id: str, stdout: int, stderr: int) -> None:
        self._agent, self._run_id = agent, run_id
        self._offsets = {"stdout": stdout, "stderr": stderr}
        self._ends: dict[str, int] | None = None  # offsets of the ends, once the command has ended
        self._pending: dict[int, str] = {}  # request id -> stream
        self._connection: AgentConnection | None = None
        self._interrupted = False

    def read(self, *, wait: float) -> OutputPart | None:
        try:
            if self._interrupted:
                return None
            if self._connection is None:
                self._connection = self._agent.open(0.0)
            while not (part := self._read(self._connection, wait)):
                pass
            return part
        except (NotConnected, ConnectionLost, NotRetained):
            self.close()
        except ProtocolError as error:
            if self._connection is not None:
                self._connection.report(str(error))
            self.close()
        return None

    def interrupt(self) -> None:
        self._interrupted = True
        if (connection := self._connection) is not None:
            connection.interrupt()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._pending.clear()
        if connection is not None:
            connection.close()

    def _read(self, connection: AgentConnection, wait: float) -> OutputPart | None:
        """Receive one response. None if it is only the end of one stream."""
        for stream in self._offsets.keys() - self._pending.values():
            if self._ends is None or self._offsets[stream] < self._ends[stream]:
                head = {"verb": "read", "run": self._run_id, "stream": stream, "offset": self._offsets[stream]}
                head |= {"wait": wait * WAIT_FACTORS[stream], "limit": MAX_PART_BYTES}
                self._pending[connection.post(head)] = stream
        if not self._pending:
            return OutputPart("", ended=True)
        frame = connection.receive(timeout=wait + RESPONSE_SECONDS)
        stream, state = self._pending.pop(frame.request_id), parse_state(self._run_id, frame)
        if state.state not in ("running", "ended"):
            raise NotRetained
        if state.offset != self._offsets[stream] or len(frame.body) > MAX_PART_BYTES:
            raise NotRetained  # the client's position is not one of this run
        self._offsets[stream] += len(frame.body)
        if state.state == "ended":
            self._ends = dict(zip(("stdout", "stderr"), state.retained, strict=True))
        is_ended = self._ends == self._offsets
        if self._ends is not None and not frame.body and not is_ended:
            return None
        return OutputPart(stream if frame.body else "", frame.body, is_ended)
