"""Background processes in Docker containers: by the agent, or by image/launch.py where no agent can be reached at all."""

from sandboxes.providers.agent.processes import AgentProcessesProvider
from sandboxes.providers.docker.commands import ContainerCommandProvider


class ContainerProcessesProvider(ContainerCommandProvider, AgentProcessesProvider):
    """Background process verbs of DockerProvider."""
