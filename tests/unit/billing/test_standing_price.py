"""Price per hour of a sandbox as it is: items of the rates, instance types, suspension, placeholders."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from billing.instance_types import SandboxSize
from billing.models import Rate
from billing.standing_price import StandingPrice, find_standing_price
from tests.support.billing import create_rate

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: costs and statements are computed in the database")]
NOW = datetime(2026, 11, 1, tzinfo=UTC)


def price(provider: str, *, is_suspended: bool = False) -> StandingPrice | None:
    return find_standing_price(Rate.objects.all(), SandboxSize(provider, 1024, 250), is_suspended=is_suspended, now=NOW)


def test_hour_has_the_price_of_the_allocated_resources() -> None:
    # Cloudflare's "basic": 1 GiB-hour 0.009, 4 GB-hours of disk 0.00025 each, 15 vCPU-minutes 0.0012 each, at most.
    expected = Decimal("0.009") + 4 * Decimal("0.00025") + 15 * Decimal("0.0012")
    assert price("cloudflare") == StandingPrice(expected, is_maximum=True)


def test_suspended_sandbox_costs_its_memory_alone() -> None:
    create_rate("time", "1")
    create_rate("suspend", "0.002")
    assert price("acme") == StandingPrice(Decimal(1))
    assert price("acme", is_suspended=True) == StandingPrice(Decimal("0.002"))


def test_placeholder_is_no_rate_but_a_stated_zero_is() -> None:
    assert price("kubernetes") is None  # the operator has to set a price
    assert price("docker") == StandingPrice(Decimal(0))  # own hosts cost nothing by the default rates
    create_rate("memory", "5", since="2027-01-01")
    assert price("acme") is None  # not valid yet
