"""Suspension of containers: in the kernel where this process may write the container's freezer, else by the engine's pause.

The engine's pause takes tens of milliseconds, most of them for the start of the runtime's program. A container that was frozen
in the kernel can be thawed only by a process that may write its freezer, because the engine does not know it as paused."""

from contextlib import suppress

from sandboxes.providers.docker.commands import ContainerCommandProvider
from sandboxes.providers.docker.freezer import Freezer
from sandboxes.providers.errors import Missing, ProviderError, Unavailable

LIVE_STATES = ("running", "paused")  # of the engine; a paused container may have been thawed without it


class ContainerSuspensionProvider(ContainerCommandProvider):
    """Suspension verbs of DockerProvider."""

    can_suspend = True

    def suspend(self, ref: str) -> None:
        with self._translating_removal(ref):
            self._suspend(ref)

    def _suspend(self, ref: str) -> None:
        if self._freeze_in_kernel(ref):
            return
        try:
            self._engine.call("POST", f"/containers/{ref}/pause")
        except Missing:
            raise
        except ProviderError as failed:  # also the answer for a container that is paused already
            if not self._is_frozen(ref):
                raise Unavailable(f"{ref} could not be paused: {failed}") from failed

    def resume(self, ref: str) -> None:
        try:
            self._resume(ref)
        except Missing:
            if not self._has_volumes(ref):
                raise  # else the container was removed: the next call creates it again, and nothing is frozen

    def _resume(self, ref: str) -> None:
        if self._engine.is_frozen(ref) is False or self._thaw_in_kernel(ref):
            return
        try:
            self._engine.call("POST", f"/containers/{ref}/unpause")
        except Missing:
            raise
        except ProviderError as failed:  # also the answer for a container that is not paused
            if self._is_frozen(ref):
                raise Unavailable(
                    f"{ref} could not be resumed: {failed}. If a process with more rights has frozen it, run the control plane "
                    "as that user again, or restart the container."
                ) from failed

    def _freeze_in_kernel(self, ref: str) -> bool:
        """Freeze a container without the engine. Return False if that is not possible. Raise Missing, Unavailable."""
        with suppress(OSError):  # the container stopped meanwhile, as the engine will say
            if freezer := self._find_writable_freezer(ref):
                try:
                    freezer.freeze()
                except TimeoutError as error:
                    raise Unavailable(f"{ref} could not be frozen: {error}") from error
                return True
        return False

    def _thaw_in_kernel(self, ref: str) -> bool:
        """Thaw a frozen container without the engine. Return False if that is not possible. Raise Missing."""
        with suppress(OSError):  # the container stopped meanwhile
            if freezer := self._find_writable_freezer(ref):
                freezer.thaw()
                return True
        return False

    def _find_writable_freezer(self, ref: str) -> Freezer | None:
        cgroup = self._engine.cgroup(ref)
        freezer = cgroup.freezer if cgroup else None
        return freezer if freezer and freezer.is_writable() else None

    def _is_suspended(self, ref: str, state: str) -> bool:
        """Return whether a container in this state of the engine is frozen."""
        if state not in LIVE_STATES:
            return False
        with suppress(Missing):  # removed since its state was read
            frozen = self._engine.is_frozen(ref)
            return state == "paused" if frozen is None else frozen
        return False

    def _is_frozen(self, ref: str) -> bool:
        """Return whether the container is frozen, according to the kernel, or else to the engine. Raise Missing."""
        return self._is_suspended(ref, self._engine.call("GET", f"/containers/{ref}/json")["State"]["Status"])
