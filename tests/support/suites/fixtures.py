"""Fixtures that put a suite of the memory provider on a vendor."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from sandboxes import providers
from sandboxes.models import Pool
from tests.support.remote import GetEmulator, configure, emulators
from tests.support.suites.provider import SuiteProvider, connect

GetVendor = Callable[[str], SuiteProvider]


@pytest.fixture(scope="session")
def vendors(emulators: GetEmulator) -> Iterator[GetVendor]:
    """Connect the provider of a vendor at its first use, and return it."""
    connected: dict[str, SuiteProvider] = {}

    def get(kind: str) -> SuiteProvider:
        if kind not in connected:
            connected[kind] = connect(kind, emulators(kind))
        return connected[kind]

    yield get
    for provider in connected.values():
        provider.server.close()


@pytest.fixture
def memory(vendor: str, vendors: GetVendor, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Provider of the vendor, with the hooks and switches of the memory provider."""
    provider = vendors(vendor)
    settings.REMOTE_PROVIDERS = {**settings.REMOTE_PROVIDERS, vendor: configure(vendor, provider.emulator)}
    settings.SANDBOX_PROVIDER = vendor
    create = providers._create_provider
    monkeypatch.setattr(providers, "_create_provider", lambda name: provider if name == vendor else create(name))
    yield provider
    provider.reset()


@pytest.fixture
def pool(db: None, vendor: str, memory: Any) -> Pool:
    """Pool of this test, at the vendor."""
    return Pool.objects.create(name=f"pool-{uuid4().hex[:12]}", provider=vendor, capacity=100)


__all__ = ["emulators", "memory", "pool", "vendors"]
