"""Fixtures of the suites on the provider that LEASEHOLD_TEST_PROVIDER names, by default on the memory provider."""

from pathlib import Path

import pytest

from tests.support.suites import TEST_PROVIDER

if TEST_PROVIDER == "kubernetes":
    from tests.support.suites.cluster_fixtures import memory, pool, suite_cluster  # noqa: F401 - fixtures

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Give each test that uses the database real transactions: the gateway has connections of its own."""
        for item in items:
            if item.path.parent == Path(__file__).parent and item.get_closest_marker("django_db"):
                item.add_marker(pytest.mark.django_db(transaction=True), append=False)

elif TEST_PROVIDER != "memory":
    from tests.support.suites.fixtures import emulators, memory, pool, vendors  # noqa: F401 - fixtures

    @pytest.fixture
    def vendor() -> str:
        return TEST_PROVIDER
