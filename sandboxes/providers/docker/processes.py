"""Background processes in Docker containers: by the agent, or by image/launch.py where no agent can be reached at all."""

import time
from collections.abc import Mapping, Sequence

from sandboxes.agent.operations import AgentProcesses
from sandboxes.agent.protocol import TerminalSize
from sandboxes.providers.agent.processes import AgentProcessesProvider
from sandboxes.providers.base import WORKSPACE
from sandboxes.providers.command_results import ProcessState
from sandboxes.providers.docker.commands import ContainerCommandProvider

AGENT_START_SECONDS = 10.0  # for the agent of a container that was started again to connect
PING_SECONDS, POLL_SECONDS = 1.0, 0.05


class ContainerProcessesProvider(ContainerCommandProvider, AgentProcessesProvider):
    """Background process verbs of DockerProvider."""

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
        if self._start_stopped(ref):
            self._wait_for_agent(ref)
        return super().start(ref, argv, env=env, cwd=cwd, mark=mark, stdin=stdin, terminal=terminal)

    def _wait_for_agent(self, ref: str) -> None:
        """Wait until the agent of a container responds, if it has one. Unlike a command, no process is started without it."""
        agent, deadline = self._find_agent(ref), time.monotonic() + AGENT_START_SECONDS
        while agent and not agent.responds(timeout=PING_SECONDS) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _find_processes(self, ref: str) -> AgentProcesses | None:
        found = super()._find_processes(ref)
        if found is None:  # processes of a removed container are not taken for those of a sandbox without a gateway
            with self._translating_removal(ref):
                self._engine.container_id(ref)
        return found
