"""Restart of containers whose agent does not respond or is outdated. Their volumes stay, and with them /workspace and /data."""

import contextlib
from abc import abstractmethod

from sandboxes.providers.agent.liveness import AgentLivenessProvider
from sandboxes.providers.docker.engine import Conflict, translate_errors
from sandboxes.providers.docker.suspension import ContainerSuspensionProvider
from sandboxes.providers.errors import Missing


class ContainerRestartProvider(ContainerSuspensionProvider, AgentLivenessProvider):
    """Restart verbs of DockerProvider."""

    @abstractmethod
    def _renew(self, ref: str, container: str) -> bool:
        """Replace a stopped container by one of the present image, which is not started. Return False if there is no other
        image. Raise Missing."""

    def restart(self, ref: str) -> None:
        engine = self._engine
        try:
            container = str(self._inspect(ref)["Id"])
        except Missing:
            if not self._recreate(ref):
                raise
            container = str(engine.call("GET", f"/containers/{ref}/json")["Id"])
        is_outdated = self.has_outdated_agent(ref)
        self._thaw_in_kernel(ref)  # version 1 of cgroups kills no frozen process
        with contextlib.suppress(Conflict):  # it does not run
            engine.call("POST", f"/containers/{container}/kill")
        engine.call("POST", f"/containers/{container}/wait")  # a start before the end of process 1 has no effect
        if is_outdated and self._renew(ref, container):
            container = str(engine.call("GET", f"/containers/{ref}/json")["Id"])
        with translate_errors():
            self._start(ref, container)
