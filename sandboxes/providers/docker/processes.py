"""Background processes in Docker containers: by the agent, or by image/launch.py where no agent can be reached at all."""

from sandboxes.agent.operations import AgentProcesses
from sandboxes.providers.agent.processes import AgentProcessesProvider
from sandboxes.providers.docker.commands import ContainerCommandProvider


class ContainerProcessesProvider(ContainerCommandProvider, AgentProcessesProvider):
    """Background process verbs of DockerProvider."""

    def _find_processes(self, ref: str) -> AgentProcesses | None:
        found = super()._find_processes(ref)
        if found is None:  # processes of a removed container are not taken for those of a sandbox without a gateway
            with self._translating_removal(ref):
                self._engine.container_id(ref)
        return found
