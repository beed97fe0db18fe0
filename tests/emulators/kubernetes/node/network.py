"""Network of the Pods."""

from tests.emulators.kubernetes.api.store import Object


class PodNetwork:
    """Pods without a network."""

    def attach(self, pod: Object, address: str, process: int) -> None:
        return

    def detach(self, uid: str) -> None:
        return

    def refresh(self) -> None:
        return

    def close(self) -> None:
        return
