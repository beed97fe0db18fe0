"""Fixtures of the billing tests."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from billing.models import Rate
from leases.models import Lease
from tests.conftest import NOW
from tests.support.billing import ADA, HOUR, create_rate, run_command
from tests.support.period_totals import check_period_totals

TESTS_OF_BUDGETS = ("test_budget", "test_call_admission")  # which add no kind of cost


@pytest.fixture(autouse=True)
def compare_totals(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of costs: the totals by day and month are the sums of the records that the test has left."""
    yield
    if request.node.get_closest_marker("django_db") and not request.path.name.startswith(TESTS_OF_BUDGETS):
        check_period_totals(full=False)


@pytest.fixture
def used_lease(grant: Callable[..., Lease], memory: Any) -> Callable[..., Lease]:
    """Grant a lease whose waiting sandbox has used some hours by NOW."""

    def make(agent: str = ADA, environment: str = "game-1", hours: float = 1, **request: Any) -> Lease:
        began = NOW - timedelta(hours=hours)
        lease = grant(agent, environment, now=began, ttl=20 * HOUR, sleep_after=20 * HOUR, **request)
        run_command(lease, "sh", "-c", "echo kept >f", now=began)
        return lease

    return make


@pytest.fixture
def ten_free(db: None) -> Rate:
    """A rate of 1 USD an hour after 10 free hours a month."""
    return create_rate("time", "1", allowance=Decimal(10))
