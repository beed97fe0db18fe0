"""Provider bound to one engine: an answer of another engine becomes Unavailable.

DOCKER_HOST may be set to another engine, and an engine may be installed anew. Its "no such sandbox" would end leases whose
sandboxes run on the first engine, and its "destroyed" would free places and egress slots that are still in use. The engine is
therefore asked for its identity again after each such answer, and not before each call, which would take longer than a short
command."""

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from sandboxes.providers.base import Provider
from sandboxes.providers.errors import FailureCause, Missing, ProviderError, Unavailable

HOST_NAMESPACE = uuid.UUID("6b9e7f6c-6f0c-4c39-9d3e-0f1f2a7f4c51")
CONFIRMED_METHODS = frozenset({"create", "destroy"})  # another engine performs them without an error
UNBOUND_METHODS = frozenset({"engine_id", "list"})
BOUND_METHODS = Provider.__abstractmethods__ - UNBOUND_METHODS | {
    "kill_all",
    "set_intervals",
    "snapshot_directory",
    "restore_directory",
}


def compute_host_id(provider_name: str, engine_id: str) -> uuid.UUID:
    """Return the primary key of an engine's Host row."""
    return uuid.uuid5(HOST_NAMESPACE, f"{provider_name} {engine_id}")


def require_engine(provider: Provider, host_id: uuid.UUID) -> None:
    """Ask the provider's engine for its identity. Raise Unavailable if it is not the engine of this host."""
    if compute_host_id(provider.name, provider.engine_id()) != host_id:
        message = f"The {provider.name} provider now reaches another engine than the sandbox's."
        raise Unavailable(message, cause=FailureCause.ENGINE_REPLACED, provider=provider.name)


def bind_provider(provider: Provider, host_id: uuid.UUID) -> Provider:
    """Return the provider with its calls bound to the engine of a host."""
    return cast(Provider, _BoundProvider(provider, host_id))


class _BoundProvider:
    """Forwards every attribute to a provider, and checks the engine after answers that another engine would also give.

    Errors of the provider get its name."""

    def __init__(self, provider: Provider, host_id: uuid.UUID) -> None:
        self._provider, self._host_id = provider, host_id

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._provider, name)
        if name in BOUND_METHODS:
            return partial(self._call, name, attribute)
        return attribute

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = method(*args, **kwargs)
        except ProviderError as error:
            self._check_error(error)
            raise
        if name in CONFIRMED_METHODS:
            require_engine(self._provider, self._host_id)
        return self._iterate(result) if name == "get_files" else result

    def _iterate(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from chunks
        except ProviderError as error:
            self._check_error(error)
            raise

    def _check_error(self, error: ProviderError) -> None:
        error.provider = self._provider.name
        if isinstance(error, Missing):
            require_engine(self._provider, self._host_id)
