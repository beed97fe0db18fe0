"""Interface between the API server and the node of the emulator."""

from typing import Any, Protocol

from tests.emulators.kubernetes.api.resources import Resource


class Node(Protocol):
    """Node that runs the Pods. No method waits for a container."""

    def start(self, pod: dict[str, Any]) -> None:
        """Schedule and start a Pod that has been created."""

    def stop(self, pod: dict[str, Any]) -> None:
        """End a Pod that has a deletion timestamp."""

    def discard(self, pod: dict[str, Any]) -> None:
        """Remove the containers of a Pod whose object is gone."""

    def observe(self, resource: Resource) -> None:
        """Take note of a change of this resource, such as a NetworkPolicy."""
