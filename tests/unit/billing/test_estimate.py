"""Estimates: worked tables of providers' prices, and instance sizes."""

from decimal import Decimal
from typing import Any

import pytest

from billing.estimate import Scenario, estimate
from billing.instance_types import INSTANCE_SIZES, find_instance_size
from billing.models import Rate
from tests.conftest import NOW
from tests.support.billing import (
    create_rate,
)

pytestmark = pytest.mark.django_db


def amounts(**fields: Any) -> dict[str, str]:
    defaults = {
        "provider": "cloudflare", "instance": "basic", "agents": 8, "hours_per_day": Decimal(4), "days": 30,
        "cpu_utilisation": Decimal("0.1"),
    }  # fmt: skip
    result = estimate(Scenario(**{**defaults, **fields}), Rate.objects.all(), now=NOW)
    return {line.item: str(line.usd) for line in result.lines} | {"total": str(result.total), "agent": str(result.per_agent)}


# --- worked tables ----------------------------------------------------------------------------------------------------


def test_eight_agents_for_four_hours_a_day() -> None:
    """Design document: (960 - 25) x 0.009 = 8.415, (1440 - 375) x 0.0012 = 1.278, (3840 - 200) x 0.00025 = 0.91, 5."""
    assert amounts() == {"memory": "8.42", "cpu": "1.28", "disk": "0.91", "plan": "5.00", "total": "15.61", "agent": "1.95"}


def test_eight_agents_always_on() -> None:
    """(5760 - 25) x 0.009 = 51.615, (8640 - 375) x 0.0012 = 9.918, (23040 - 200) x 0.00025 = 5.71, 5."""
    assert amounts(hours_per_day=Decimal(24)) == {
        "memory": "51.62", "cpu": "9.92", "disk": "5.71", "plan": "5.00", "total": "72.25", "agent": "9.03",
    }  # fmt: skip


def test_usage_within_the_allowances_costs_only_the_plan() -> None:
    """25 h with 1 GiB and 15 vCPU-minutes an hour use exactly the free 25 GiB-hours and 375 vCPU-minutes."""
    assert amounts(agents=1, hours_per_day=Decimal(1), days=25, cpu_utilisation=Decimal(1)) == {
        "memory": "0.00", "cpu": "0.00", "disk": "0.00", "plan": "5.00", "total": "5.00", "agent": "5.00",
    }  # fmt: skip


def test_fargate_task_for_a_month() -> None:
    """1 vCPU and 4 GB for 720 h: 29.15 + 12.80 = 41.95 (https://www.wring.co/blog/aws-fargate-pricing-guide). `standard-1` has
    4 GiB and half a CPU, so the rate per CPU minute is doubled here: 2 x 0.04048 / 60 = 0.001349333333."""
    create_rate("cpu", "0.001349333333")
    create_rate("memory", "0.004445")
    result = amounts(provider="acme", instance="standard-1", agents=1, hours_per_day=Decimal(24), cpu_utilisation=Decimal(1))
    assert result == {"memory": "12.80", "cpu": "29.15", "total": "41.95", "agent": "41.95"}


def test_custom_hourly_rate() -> None:
    """3 x 2.5 h x 20 d = 150 sandbox-hours at 0.07 = 10.50."""
    create_rate("time", "0.07", provider="docker", since="2026-02-01")
    assert amounts(provider="docker", agents=3, hours_per_day=Decimal("2.5"), days=20) == {
        "time": "10.50", "total": "10.50", "agent": "3.50",
    }  # fmt: skip


def test_sizes_match_the_providers_table() -> None:
    """https://developers.cloudflare.com/containers/platform/limits/"""
    result = {
        name: (float(size.vcpus), size.memory_mib / 1024, size.disk_mb / 1000)
        for name, size in INSTANCE_SIZES["cloudflare"].items()
    }
    assert result == {
        "lite": (0.0625, 0.25, 2), "basic": (0.25, 1, 4), "standard-1": (0.5, 4, 8), "standard-2": (1, 6, 12),
        "standard-3": (2, 8, 16), "standard-4": (4, 12, 20),
    }  # fmt: skip
    assert find_instance_size("docker", "basic") == INSTANCE_SIZES["cloudflare"]["basic"]
