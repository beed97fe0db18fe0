"""Servers of other apps that run in the gateway's process, beside the connections to the agents."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from django.utils.module_loading import import_string

if TYPE_CHECKING:
    from sandboxes.agent.gateway import AgentGateway

_paths: list[str] = []


def register(path: str) -> None:
    """Register a server by the dotted path of a function that takes the gateway and returns an async context manager.

    Other processes do not import it."""
    if path not in _paths:
        _paths.append(path)


@asynccontextmanager
async def serving(gateway: "AgentGateway") -> AsyncIterator[None]:
    """Run all registered servers during the body of the `with`."""
    async with AsyncExitStack() as servers:
        for path in _paths:
            await servers.enter_async_context(import_string(path)(gateway))
        yield
