"""Providers of remote sandboxes, connected to the emulators of their vendors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings
from modal.sandbox._task_command_router_client import call_with_retries_on_transient_errors

from sandboxes.providers import load_class
from sandboxes.providers.remote.configuration import RemoteConfiguration
from sandboxes.providers.remote.provider import RemoteProvider
from tests.emulators.base import Emulator
from tests.emulators.registry import serve
from tests.support.servers import services

GetEmulator = Callable[[str], Emulator]


@pytest.fixture(scope="session")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetEmulator]:
    """Start the emulator of a vendor at its first use, and return it."""
    services.start("debian-python")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")  # a test sets a proxy in the environment, which clients of vendors use
        yield cache(lambda name: stack.enter_context(serve(name, tmp_path_factory.mktemp(name))))


def configure(name: str, emulator: Emulator, **changes: Any) -> RemoteConfiguration:
    """Return the configuration of a provider that reaches an emulator, with changes."""
    # The client of Modal repeats a failed call to a sandbox ten times: at once.
    call_with_retries_on_transient_errors.__kwdefaults__["base_delay_secs"] = 0.0
    configured = settings.REMOTE_PROVIDERS[name]
    options = {**configured.options, **changes.pop("options", {}), **emulator.options}
    return replace(configured, **({"api_key": emulator.key, "api_url": emulator.api_url, "options": options} | changes))


def connect_provider(name: str, emulator: Emulator, **changes: Any) -> RemoteProvider:
    """Return a provider that reaches an emulator, with changes of its configuration."""
    reached = configure(name, emulator, **changes)
    with override_settings(REMOTE_PROVIDERS={**settings.REMOTE_PROVIDERS, name: reached}):
        provider = load_class(name)()
    assert isinstance(provider, RemoteProvider)
    return provider
