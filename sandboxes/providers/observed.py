"""Provider of observe mode (LEASEHOLD_OBSERVE): it refuses to destroy sandboxes, and is otherwise the provider behind it."""

from typing import Any, cast

from sandboxes.providers.base import Provider
from sandboxes.providers.errors import Unavailable


class DestroyRefused(Unavailable):
    """Observe mode (LEASEHOLD_OBSERVE): no sandbox is destroyed."""

    code = "observe_mode"


class ObservedProvider:
    """Proxy of a provider without `destroy`, and without `kill_all`, which precedes it. get_provider returns this proxy, so the
    refusal holds for every caller."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def destroy(self, ref: str) -> None:
        raise DestroyRefused(f"Observe mode (LEASEHOLD_OBSERVE): the sandbox {ref} is not destroyed.")

    def kill_all(self, ref: str) -> None:
        raise DestroyRefused(f"Observe mode (LEASEHOLD_OBSERVE): the commands of the sandbox {ref} go on.")

    def delete_directory_snapshot(self, snapshot: str) -> None:
        raise DestroyRefused(f"Observe mode (LEASEHOLD_OBSERVE): the vendor's snapshot {snapshot} is not deleted.")


def refuse_destroy(provider: Provider) -> Provider:
    return cast(Provider, ObservedProvider(provider))
