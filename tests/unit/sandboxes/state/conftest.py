"""Two leases of one agent."""

from collections.abc import Callable

import pytest

from leases.models import Lease


@pytest.fixture
def one(grant: Callable[..., Lease]) -> Lease:
    return grant(environment="game-1")


@pytest.fixture
def two(grant: Callable[..., Lease]) -> Lease:
    """A second sandbox of the same agent."""
    return grant(environment="game-2")
