"""Background processes by the agent in a sandbox."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from sandboxes.agent.client import ConnectionLost, NotConnected
from sandboxes.agent.operations import AgentProcesses
from sandboxes.agent.protocol import ProtocolError, TerminalSize
from sandboxes.agent.runs import NotStarted
from sandboxes.providers.agent.commands import AgentCommandProvider
from sandboxes.providers.arguments import check_command, check_range
from sandboxes.providers.base import MARK_VARIABLE, WORKSPACE
from sandboxes.providers.command_results import ProcessOutput, ProcessState
from sandboxes.providers.errors import Rejected, Unavailable
from sandboxes.providers.launcher import BackgroundProcessProvider


class AgentProcessesProvider(AgentCommandProvider, BackgroundProcessProvider):
    """Background process verbs: by the agent, or by image/launch.py where no agent can be reached at all.

    A sandbox either has a gateway or not, so all of its processes are started in the same way."""

    def start(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = WORKSPACE,
        mark: str,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
    ) -> ProcessState:
        check_command(argv, env, cwd)
        agent = self._find_processes(ref)
        if agent is None:
            return super().start(ref, argv, env=env, cwd=cwd, mark=mark, stdin=stdin, terminal=terminal)
        with self._translating_errors(ref):
            return _to_state(agent.start(mark, argv, {**env, MARK_VARIABLE: mark}, cwd, stdin=stdin, terminal=terminal))

    def find_agent_id(self, ref: str) -> str | None:
        agent = self._find_agent(ref)
        return agent.container if agent else None

    def signal_process(self, ref: str, mark: str, number: int) -> None:
        agent = self._find_processes(ref)
        if agent is None:
            super().signal_process(ref, mark, number)
            return
        with self._translating_errors(ref):
            agent.send_signal(mark, number)

    def write_stdin(self, ref: str, mark: str, content: bytes, *, offset: int, last: bool) -> int:
        agent = self._find_processes(ref)
        if agent is None:
            return super().write_stdin(ref, mark, content, offset=offset, last=last)
        with self._translating_errors(ref):
            written = agent.write_stdin(mark, content, offset=offset, last=last)
        if written is None:
            raise Rejected(f"The process has received less than {offset} bytes, or is not known.")
        return written

    def processes(self, ref: str, marks: Sequence[str]) -> dict[str, ProcessState]:
        agent = self._find_processes(ref)
        if agent is None:
            return super().processes(ref, marks)
        with self._translating_errors(ref):
            return {mark: _to_state(code) for mark, code in agent.list_exit_codes(marks).items()}

    def log(self, ref: str, mark: str, *, start: int, length: int) -> ProcessOutput:
        agent = self._find_processes(ref)
        if agent is None:
            return super().log(ref, mark, start=start, length=length)
        check_range(start, length)
        with self._translating_errors(ref):
            return ProcessOutput(*(agent.read_log(mark, start=start, length=length) or (b"", start)))

    def _find_processes(self, ref: str) -> AgentProcesses | None:
        agent, since = self._find_agent(ref), time.monotonic()
        return AgentProcesses(agent, check=lambda: self._require_running(ref, since)) if agent else None

    @contextlib.contextmanager
    def _translating_errors(self, ref: str) -> Iterator[None]:
        try:
            yield
        except (NotStarted, NotConnected, ConnectionLost, ProtocolError) as error:
            self._require_existing(ref)
            raise Unavailable(f"The background processes of {ref} cannot be reached: {error}") from error

    def _require_existing(self, ref: str) -> None:
        """Raise Missing if the sandbox is gone, in place of the error of an agent that does not respond. Optional."""

    def _output_directory(self, ref: str) -> str:
        return "/tmp/.leasehold"  # noqa: S108 - inside the sandbox


def _to_state(exit_code: int | None) -> ProcessState:
    return ProcessState(running=exit_code is None, exit_code=exit_code)
