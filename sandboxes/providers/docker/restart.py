"""Restart of containers whose agent does not respond. Their volumes stay, and with them /workspace and /data."""

import contextlib

from sandboxes.providers.agent.liveness import AgentLivenessProvider
from sandboxes.providers.docker.engine import Conflict, translate_errors
from sandboxes.providers.docker.suspension import ContainerSuspensionProvider
from sandboxes.providers.errors import Missing


class ContainerRestartProvider(ContainerSuspensionProvider, AgentLivenessProvider):
    """Restart verbs of DockerProvider."""

    def restart(self, ref: str) -> None:
        engine = self._engine
        try:
            container = str(self._inspect(ref)["Id"])
        except Missing:
            if not self._recreate(ref):
                raise
            container = str(engine.call("GET", f"/containers/{ref}/json")["Id"])
        self._thaw_in_kernel(ref)  # version 1 of cgroups kills no frozen process
        with contextlib.suppress(Conflict):  # it does not run
            engine.call("POST", f"/containers/{container}/kill")
        engine.call("POST", f"/containers/{container}/wait")  # a start before the end of process 1 has no effect
        with translate_errors():
            self._start(ref, container)
