"""Fixtures of the suites on the vendor that LEASEHOLD_TEST_PROVIDER names, by default on the memory provider."""

import pytest

from tests.support.suites import TEST_PROVIDER

if TEST_PROVIDER != "memory":
    from tests.support.suites.fixtures import emulators, memory, pool, vendors  # noqa: F401 - fixtures

    @pytest.fixture
    def vendor() -> str:
        return TEST_PROVIDER
