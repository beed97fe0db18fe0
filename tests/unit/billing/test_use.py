"""Measured CPU and memory, and runs as requests: metering and pricing."""

import itertools
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from random import Random
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing import costs, metering, totals
from billing.intervals import prorate
from billing.metering import meter_usage
from billing.models import CostRecord, PeriodTotal, Rate, UsageKind, UsageRecord
from leases import execution, leasing
from leases.models import EnvironmentType, Lease
from sandboxes.models import Reading, Run, Sandbox
from sandboxes.providers.memory import MemoryProvider
from sandboxes.runs.operations import Command
from sandboxes.sweeps import measurements
from sandboxes.sweeps import passes as sweeps
from tests.conftest import MINUTE, NOW
from tests.support.billing import (
    ADA,
    BASIC_INSTANCE,
    HOUR,
    create_rate,
    create_reading,
    create_sandbox,
    create_time_usage,
    derive_lease_id,
    list_cost_records,
    list_cost_values,
    parse_utc,
)
from tests.support.leases import get_sandbox, run
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("sums: costs and statements are computed in the database")]
DAY, SECOND = timedelta(days=1), timedelta(seconds=1)
USD = Decimal
USED = ["day", "began_at", "ended_at", "cpu_micros", "mib_micros"]


def price(now: str = "2027-01-01") -> None:
    meter_usage(now=parse_utc(now))
    costs.price_usage(now=parse_utc(now))


def list_use_records(**only: Any) -> list[tuple[Any, ...]]:
    return [*UsageRecord.objects.filter(item=UsageKind.USE, **only).order_by("day", "pk").values_list("day", *USED[3:])]


# --- division into days -----------------------------------------------------------------------------------------------


@given(st.integers(0, 10**12), st.lists(st.integers(1, 10**10), min_size=1, max_size=6))
def test_adjacent_prorated_parts_add_up_to_the_whole(whole: int, lengths: list[int]) -> None:
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    moments = [NOW, *(NOW + timedelta(microseconds=end) for end in ends)]
    parts = [prorate(whole, NOW, moments[-1], *pair) for pair in itertools.pairwise(moments)]
    assert sum(parts) == whole
    for length, part in zip(lengths, parts, strict=True):
        assert abs(part - whole * length / ends[-1]) <= 1


@pytest.mark.parametrize(
    ("first", "second"), [("2026-11-30", "2026-12-01"), ("2028-02-28", "2028-02-29"), ("2027-02-28", "2027-03-01")]
)
def test_use_across_midnight_is_split_between_days(first: str, second: str) -> None:
    begin = f"{first}T23:50"
    create_reading(begin, timedelta(minutes=30), create_sandbox(), timedelta(seconds=10, microseconds=1), memory_mib=3)
    meter_usage(now=parse_utc("2028-12-01"))
    minute = 60 * 10**6
    assert [(str(day), *rest) for day, *rest in list_use_records()] == [
        (first, 3_333_333, 3 * 10 * minute), (second, 6_666_668, 3 * 20 * minute),
    ]  # fmt: skip


# --- prices -----------------------------------------------------------------------------------------------------------


def test_eight_agents_by_measured_use() -> None:
    """8 agents x 4 h x 30 d on `basic`, each with 10 % of 1/4 vCPU, which is 90 s of CPU an hour (design document):
    memory 8 x 1 x 120 = 960 GiB-hours, 25 free: 935 x 0.009 = 8.415
    cpu    8 x 0.025 x 120 x 60 = 1440 vCPU-minutes, 375 free: 1065 x 0.0012 = 1.278
    disk   8 x 4 x 120 = 3840 GB-hours, 200 free: 3640 x 0.00025 = 0.91
    plan   5. By the shipped rates."""
    for number in range(8):
        agent = f"did:plc:a{number}"
        sandbox = create_sandbox(agent)
        for each in range(30):
            begin = parse_utc("2026-11-01T09:30") + each * DAY
            create_time_usage(begin, 4 * HOUR, agent, **BASIC_INSTANCE, measured=True)
            create_reading(begin, 4 * HOUR, sandbox, timedelta(seconds=360), memory_mib=700)
    price()
    sums = {each.key: (each.usd, each.quantities[each.key]) for each in totals.sum_costs("item")}
    assert sums == {
        "memory": (USD("8.415"), 960), "cpu": (USD("1.278"), 1440), "disk": (USD("0.91"), 3840), "plan": (USD(5), 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "by_use", "cpu", "memory"),
    [(True, True, 2, USD("0.5")), (True, False, 60, 1), (False, True, 60, 1), (False, False, 60, 1)],
)
def test_measured_sandbox_pays_by_use_if_the_rate_is_by_use(measured: bool, by_use: bool, cpu: int, memory: Decimal) -> None:
    """An hour of 1 vCPU and 1 GiB, of which 2 CPU minutes and half of the memory are used."""
    create_rate("cpu", "1", by_use=by_use)
    create_rate("memory", "1", by_use=by_use)
    create_time_usage("2026-11-02T10:00", provider="acme", millicpus=1000, memory_mib=1024, measured=measured)
    if measured:
        create_reading("2026-11-02T10:00", HOUR, create_sandbox(provider="acme", millicpus=1000), 2 * MINUTE, memory_mib=512)
    price()
    assert dict(list_cost_values("item", "usd")) == {"cpu": cpu, "memory": memory}


def test_allocated_and_used_quantities_of_a_lease_add_up() -> None:
    """The lease's earlier sandbox was on a host that does not measure use."""
    create_rate("cpu", "1", by_use=True)
    create_time_usage("2026-11-02T10:00", provider="acme", millicpus=1000)
    create_time_usage("2026-11-02T11:00", provider="acme", millicpus=1000, measured=True)
    create_reading("2026-11-02T11:00", HOUR, create_sandbox(provider="acme"), 3 * MINUTE)
    price()
    assert list_cost_values("usd") == [(63,)]


def test_rate_by_use_that_begins_within_a_reading_splits_it() -> None:
    """Three CPU minutes from 11:00 to 14:00. The hour before noon is charged as allocated, 60 x 1, the rest as used, 2 x 10."""
    create_rate("cpu", "1")
    create_rate("cpu", "10", since="2026-11-02T12:00", by_use=True)
    create_time_usage("2026-11-02T11:00", 3 * HOUR, provider="acme", millicpus=1000, measured=True)
    create_reading("2026-11-02T11:00", 3 * HOUR, create_sandbox(provider="acme"), 3 * MINUTE)
    price()
    assert list_cost_values("usd", "quantity") == [(60, 60), (20, 2)]


@hypothesis.settings(
    deadline=None, max_examples=budget(fast=8, full=30), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.integers(1, 10**11), st.integers(0, 10**9)), min_size=1, max_size=4),
    st.lists(st.integers(1, 86_399), max_size=3, unique=True),
)
def test_splitting_between_rates_loses_no_microsecond(readings: list[tuple[int, int]], cuts: list[int]) -> None:
    """Readings across midnights and changes of rate cost as much as their sum."""
    for model in (PeriodTotal, CostRecord, Rate, UsageRecord, Reading):
        model.objects.all()._raw_delete(model.objects.db)
    for number in [-1, *cuts]:
        create_rate("cpu", "60", since=str(parse_utc("2026-11-02") + number * SECOND)[:19], by_use=True)
    sandbox, moment = create_sandbox(provider="acme"), parse_utc("2026-11-01T20:00")
    for lasts, micros in readings:
        length = timedelta(microseconds=lasts)
        create_reading(moment, length, sandbox, timedelta(microseconds=micros))
        moment += length
    first = Rate.objects.order_by("valid_from").first()
    assert first
    Rate.objects.filter(pk=first.pk).update(valid_from=parse_utc("2020-01-01"))
    price()
    whole = sum(int(each) for (each,) in list_cost_values("whole"))
    assert whole == 1000 * sum(micros for _, micros in readings)


def test_costs_by_use_are_rebuilt_from_readings(grant: Callable[..., Lease], memory: MemoryProvider) -> None:
    create_rate("cpu", "60", provider="memory", by_use=True)
    lease = grant(ttl=9 * HOUR)
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
    sandbox = Sandbox.objects.get(holder=lease.pk)
    memory.use(sandbox.ref, cpu_micros=10**6)
    measurements.record_readings(now=NOW + 5 * MINUTE)
    memory.use(sandbox.ref, cpu_micros=2 * 10**6)
    price("2026-11-21T13:00")
    assert list_cost_values("usd", item="cpu") == [(1,)], "costs of the readings so far"
    leasing.release(lease.pk, now=NOW + HOUR)
    sweeps.destroy_due(now=NOW + HOUR)
    price("2026-11-21T14:00")
    assert list_cost_values("usd", item="cpu") == [(3,)]
    assert not Reading.objects.filter(metered=False).exists() and not Run.objects.filter(metered=False).exists()
    before = list_cost_records(), [*UsageRecord.objects.order_by("source", "day").values_list("source", *USED)]
    metering.reset_usage()
    costs.reset_costs()
    assert not UsageRecord.objects.exists()
    price("2026-11-21T14:00")
    assert (list_cost_records(), [*UsageRecord.objects.order_by("source", "day").values_list("source", *USED)]) == before


# --- requests ---------------------------------------------------------------------------------------------------------


def create_runs(began: str, number: int, of: Sandbox) -> None:
    moment = parse_utc(began)
    Run.objects.bulk_create(
        Run(
            sandbox=of, holder=of.holder, agent_did=of.agent_did, argv=["true"], started_at=moment + each * SECOND,
            deadline_at=moment + HOUR,
        )
        for each in range(number)
    )  # fmt: skip


def list_run_counts() -> list[tuple[str, int]]:
    rows = UsageRecord.objects.filter(item=UsageKind.RUNS).order_by("day").values_list("day", "calls")
    return [(str(day), number) for day, number in rows]


def test_each_run_counts_once_on_its_start_day() -> None:
    sandbox = create_sandbox()
    create_runs("2026-11-30T23:59:58", 3, sandbox)
    meter_usage(now=parse_utc("2026-12-01T00:10"))
    assert list_run_counts() == [("2026-11-30", 2), ("2026-12-01", 1)]
    create_runs("2026-11-30T12:00", 5, sandbox)  # late
    meter_usage(now=parse_utc("2026-12-01T00:20"))
    meter_usage(now=parse_utc("2026-12-01T00:20"))
    assert list_run_counts() == [("2026-11-30", 7), ("2026-12-01", 1)]
    metering.reset_usage()
    meter_usage(now=parse_utc("2026-12-01T00:20"))
    assert list_run_counts() == [("2026-11-30", 7), ("2026-12-01", 1)]


def test_batch_boundaries_count_each_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "CALL_BATCH_SIZE", 7)
    expected: Counter[tuple[Any, ...]] = Counter()
    random = Random(6)
    for number in range(4):
        sandbox = create_sandbox(f"did:plc:a{number}")
        for passes in range(3):
            for each in range(random.randrange(20)):
                day = random.randrange(1, 4)
                create_runs(f"2026-11-0{day}T{each:02}:00", 1, sandbox)
                expected[sandbox.pk, f"2026-11-0{day}"] += 1
            if passes:
                meter_usage(now=parse_utc("2026-11-05"))
    meter_usage(now=parse_utc("2026-11-05"))
    rows = UsageRecord.objects.filter(item=UsageKind.RUNS).values_list("sandbox", "day", "calls")
    assert {(sandbox, str(day)): number for sandbox, day, number in rows} == expected


def test_request_is_priced_by_the_rate_at_the_start_of_its_day() -> None:
    """10 of 12 requests are free: 2 x 0.25 = 0.5. The rate of 1 USD from noon applies from the next day, when 2 of 12 free
    requests are left: 3 x 1 = 3."""
    create_rate("request", "0.25", allowance=USD(10))
    create_rate("request", "1", since="2026-11-02T12:00", allowance=USD(12))
    sandbox = create_sandbox(provider="acme")
    create_runs("2026-11-02T09:00", 6, sandbox)
    create_runs("2026-11-02T15:00", 6, sandbox)
    create_runs("2026-11-03T00:00", 5, sandbox)
    price()
    assert list_cost_values("quantity", "free", "usd") == [(12, 10, USD("0.5")), (5, 2, 3)]
    assert CostRecord.objects.filter(agent_did=ADA, holder=derive_lease_id(ADA)).count() == 2


def test_request_rate_depends_on_the_instance_type() -> None:
    create_rate("request", "1")
    create_rate("request", "5", provider="cloudflare", instance_type="basic")
    create_rate("request", "2", provider="cloudflare")
    create_runs("2026-11-02T09:00", 2, create_sandbox())
    create_runs("2026-11-02T09:00", 2, create_sandbox("did:plc:bob", memory_mib=512))
    price()
    assert dict(list_cost_values("agent_did", "usd", item="request")) == {ADA: 10, "did:plc:bob": 4}


def test_suspended_time_is_charged_by_its_own_item_alone(grant: Callable[..., Lease], memory: Any, stopped_clock: None) -> None:
    """20 minutes awake around an hour suspended, of 512 MiB: no sandbox time, CPU or measured memory for the hour."""
    EnvironmentType.objects.update(suspend_after=10 * MINUTE)
    rates = {"time": "3", "suspend": "0.5", "memory": "0.1"}
    for item, usd in rates.items():
        create_rate(item, usd, "2026-01-01", "memory", by_use=item == "memory")
    lease = grant(ADA, sleep_after=20 * HOUR)
    run(lease)
    sandbox = get_sandbox(lease)
    memory.use(sandbox.ref, cpu_micros=10**6, memory_bytes=1 << 30)
    assert sweeps.suspend_waiting(now=NOW + 10 * MINUTE).counts == {"suspended": 1}
    assert measurements.record_readings(now=NOW + 40 * MINUTE).counts == {}
    run(lease, now=NOW + 70 * MINUTE)
    memory.use(sandbox.ref, cpu_micros=10**6)
    assert measurements.record_readings(now=NOW + 80 * MINUTE).counts == {"read": 1}
    meter_usage(now=NOW + 80 * MINUTE)
    costs.price_usage(now=NOW + 80 * MINUTE)
    third = costs.pricing.round_half_up(Fraction(1, 3))
    assert {each.key: (each.usd, each.quantities[each.key]) for each in totals.sum_costs("item")} == {
        "time": (USD(1), third), "suspend": (USD("0.25"), USD("0.5")), "memory": (USD("0.033333333"), third),
    }  # fmt: skip
    assert totals.sum_sandbox_time("lease") == {str(lease.pk): 20 * MINUTE}
