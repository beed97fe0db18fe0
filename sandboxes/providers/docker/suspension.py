"""Suspension of containers by the engine's freezer: pause and unpause."""

from sandboxes.providers.base import Missing, ProviderError, Unavailable
from sandboxes.providers.docker.commands import ContainerCommandProvider


class ContainerSuspensionProvider(ContainerCommandProvider):
    """Suspension verbs of DockerProvider."""

    can_suspend = True

    def suspend(self, ref: str) -> None:
        try:
            self._engine.call("POST", f"/containers/{ref}/pause")
        except Missing:
            raise
        except ProviderError as failed:  # also the answer for a container that is paused already
            if not self._is_paused(ref):
                raise Unavailable(f"{ref} could not be paused: {failed}") from failed

    def resume(self, ref: str) -> None:
        try:
            self._engine.call("POST", f"/containers/{ref}/unpause")
        except Missing:
            raise
        except ProviderError as failed:  # also the answer for a container that is not paused
            if self._is_paused(ref):
                raise Unavailable(f"{ref} could not be unpaused: {failed}") from failed

    def _is_paused(self, ref: str) -> bool:
        return bool(self._engine.call("GET", f"/containers/{ref}/json")["State"]["Paused"])
