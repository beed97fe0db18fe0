"""Fixtures of the suites on a provider of remote sandboxes: LEASEHOLD_TEST_PROVIDER names the vendor, whose emulator runs.

The fixture `memory` is then the provider of the vendor, with the hooks and switches of the memory provider."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from sandboxes import providers
from sandboxes.models import Pool
from tests.support.remote import GetEmulator, configure, emulators  # noqa: F401 - fixture
from tests.support.suites import TEST_PROVIDER

if TEST_PROVIDER != "memory":
    from tests.support.suites.provider import SuiteProvider, connect

    @pytest.fixture(scope="session")
    def vendor_provider(emulators: GetEmulator) -> Iterator[SuiteProvider]:
        provider = connect(TEST_PROVIDER, emulators(TEST_PROVIDER))
        yield provider
        provider.server.close()

    @pytest.fixture
    def memory(
        vendor_provider: SuiteProvider,
        emulators: GetEmulator,
        settings: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[Any]:
        configured = configure(TEST_PROVIDER, emulators(TEST_PROVIDER))
        settings.REMOTE_PROVIDERS = {**settings.REMOTE_PROVIDERS, TEST_PROVIDER: configured}
        settings.SANDBOX_PROVIDER = TEST_PROVIDER
        create = providers._create_provider
        monkeypatch.setattr(
            providers, "_create_provider", lambda name: vendor_provider if name == TEST_PROVIDER else create(name)
        )
        yield vendor_provider
        vendor_provider.reset()

    @pytest.fixture
    def pool(db: None, memory: Any) -> Pool:
        """Pool of this test, at the vendor."""
        return Pool.objects.create(name=f"pool-{uuid4().hex[:12]}", provider=TEST_PROVIDER, capacity=100)
