"""Intervals that a vendor keeps by itself: never shorter than the lease can live, also after failures in between."""

from datetime import timedelta

import pytest

from leases import leasing, sweeps
from leases.models import EnvironmentType, Lease
from sandboxes.models import Pool, Sandbox
from sandboxes.pool import allocation
from sandboxes.pool.intervals import NEVER, RECLAIM_PERIOD
from sandboxes.providers.base import VendorIntervals
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, get_sandbox, run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stopped_clock")]
HOUR = timedelta(hours=1)
MAX_TTL = 24 * HOUR  # of the environment type
CONFIGURED = VendorIntervals(auto_stop=HOUR, auto_delete=2 * HOUR)


@pytest.fixture(autouse=True)
def vendor(memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the memory provider a vendor's intervals, of which the configured ones are shorter than every lease."""
    for name in ("has_auto_stop", "has_auto_delete", "can_set_intervals"):
        monkeypatch.setattr(MemoryProvider, name, True)
    monkeypatch.setattr(MemoryProvider, "default_intervals", lambda self: CONFIGURED)


@pytest.fixture
def sandbox(lease: Lease) -> Sandbox:
    run(lease)
    return get_sandbox(lease)


def get_set(sandbox: Sandbox, memory: MemoryProvider) -> VendorIntervals:
    """Return the intervals at the vendor, which the row has to state."""
    sandbox.refresh_from_db()
    found = memory._get(sandbox.ref).intervals
    assert (sandbox.vendor_auto_stop, sandbox.vendor_auto_delete) == (found.auto_stop or NEVER, found.auto_delete or NEVER)
    return found


def move_max_ttl(lease: Lease, by: timedelta) -> None:
    Lease.objects.filter(pk=lease.pk).update(max_expires_at=lease.max_expires_at + by)
    lease.refresh_from_db()


def count_calls(memory: MemoryProvider) -> int:
    return [method for method, _ in memory.calls].count("set_intervals")


def test_new_sandbox_is_kept_longer_than_its_lease_can_live(lease, sandbox, memory) -> None:
    assert get_set(sandbox, memory) == VendorIntervals(HOUR, MAX_TTL + RECLAIM_PERIOD)
    assert (count_calls(memory), sweeps.raise_intervals(now=NOW).counts) == (0, {})


def test_interval_that_is_off_or_long_enough_is_left_alone(grant, memory, monkeypatch) -> None:
    for intervals in (VendorIntervals(None, None), VendorIntervals(HOUR, 100 * HOUR)):
        monkeypatch.setattr(MemoryProvider, "default_intervals", lambda self, found=intervals: found)
        lease = grant(environment=f"game-{intervals.auto_delete}")
        run(lease)
        assert get_set(get_sandbox(lease), memory) == intervals
    assert sweeps.raise_intervals(now=NOW).counts == {}


def test_auto_stop_reaches_the_end_of_the_lease_where_a_stop_loses_the_files(lease, memory, monkeypatch) -> None:
    monkeypatch.setattr(MemoryProvider, "stop_keeps_files", False)
    run(lease)
    assert get_set(get_sandbox(lease), memory).auto_stop == MAX_TTL + RECLAIM_PERIOD


def test_interval_of_the_lease_precedes_that_of_the_type_and_that_of_the_provider(grant, memory) -> None:
    EnvironmentType.objects.update(auto_stop=5 * MINUTE, auto_delete=NEVER)
    run(by_type := grant())
    assert get_set(get_sandbox(by_type), memory) == VendorIntervals(5 * MINUTE, None)
    run(by_lease := grant(environment="game-2", auto_stop=NEVER, auto_delete=MINUTE))
    assert get_set(get_sandbox(by_lease), memory) == VendorIntervals(None, MAX_TTL + RECLAIM_PERIOD)
    assert sweeps.raise_intervals(now=NOW).counts == {}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"auto_stop": 5 * MINUTE, "auto_delete": NEVER}, VendorIntervals(5 * MINUTE, None)),
        ({"auto_stop": NEVER, "auto_delete": 99 * HOUR}, VendorIntervals(None, 99 * HOUR)),
    ],
)
def test_claim_of_a_prewarmed_sandbox_sets_the_intervals_of_the_lease(own, expected, grant, pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    pool.refresh_from_db()
    warm = allocation.start_warm(pool, now=NOW)
    run(grant(**own))
    assert warm and get_set(warm, memory) == expected
    assert sweeps.raise_intervals(now=NOW).counts == {}


def test_claim_of_a_prewarmed_sandbox_raises_its_intervals_at_once(lease, pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    pool.refresh_from_db()
    warm = allocation.start_warm(pool, now=NOW)
    assert warm and get_set(warm, memory) == CONFIGURED
    run(lease, now=NOW + MINUTE)
    assert get_sandbox(lease).pk == warm.pk
    assert get_set(warm, memory).auto_delete == MAX_TTL - MINUTE + RECLAIM_PERIOD
    assert sweeps.raise_intervals(now=NOW + MINUTE).counts == {}


def test_vendor_that_fails_at_a_claim_delays_nothing_and_the_sweep_repeats_the_call(lease, pool, memory) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    pool.refresh_from_db()
    warm = allocation.start_warm(pool, now=NOW)
    with memory.fail("set_intervals", Unavailable("vendor down")):
        assert run(lease).exit_code == 0
        assert len(sweeps.raise_intervals(now=NOW).failures) == 1
    assert warm and get_set(warm, memory) == CONFIGURED
    assert sweeps.raise_intervals(now=NOW).counts == {"intervals set": 1}
    assert get_set(warm, memory).auto_delete == MAX_TTL + RECLAIM_PERIOD


def test_renewal_calls_no_vendor_and_is_covered_by_the_intervals(lease, sandbox, memory) -> None:
    leasing.renew(lease, now=NOW + 2 * HOUR)
    assert (count_calls(memory), sweeps.raise_intervals(now=NOW + 2 * HOUR).counts) == (0, {})


def test_move_of_the_latest_end_is_followed_by_the_sweep(lease, sandbox, memory) -> None:
    move_max_ttl(lease, 10 * HOUR)
    assert sweeps.raise_intervals(now=NOW + HOUR).counts == {"intervals set": 1, "ends of leases copied": 1}
    assert get_set(sandbox, memory).auto_delete == MAX_TTL + 10 * HOUR + RECLAIM_PERIOD  # from the last use on
    assert sweeps.raise_intervals(now=NOW + HOUR).counts == {}


def test_end_that_moves_while_the_sweep_calls_the_vendor_is_followed_by_the_next_sweep(lease, sandbox, memory) -> None:
    move_max_ttl(lease, HOUR)

    def move_again(ref: str) -> None:
        move_max_ttl(lease, HOUR)
        assert sweeps.raise_intervals(now=NOW).counts == {"ends of leases copied": 1}  # the first sweep has the claim

    with memory.before("set_intervals", move_again):
        assert sweeps.raise_intervals(now=NOW).counts["intervals set"] == 1
    assert get_set(sandbox, memory).auto_delete == MAX_TTL + HOUR + RECLAIM_PERIOD
    assert sweeps.raise_intervals(now=NOW).counts == {"intervals set": 1}
    assert get_set(sandbox, memory).auto_delete == MAX_TTL + 2 * HOUR + RECLAIM_PERIOD


@pytest.mark.parametrize("step", ["intervals claimed", "intervals set"])
def test_crash_at_any_step_is_repeated_by_a_later_sweep(step, lease, sandbox, memory, crash_at) -> None:
    move_max_ttl(lease, HOUR)
    with crash_at(step):
        sweeps.raise_intervals(now=NOW)
    assert sweeps.raise_intervals(now=NOW + MINUTE).counts == {}  # the claim of the dead worker
    assert sweeps.raise_intervals(now=NOW + 5 * MINUTE).counts == {"intervals set": 1}
    assert get_set(sandbox, memory).auto_delete == MAX_TTL + HOUR + RECLAIM_PERIOD


def test_row_of_an_earlier_version_gets_its_intervals(lease, sandbox, memory) -> None:
    Sandbox.objects.update(held_until=None, vendor_auto_stop=None, vendor_auto_delete=None)
    memory._get(sandbox.ref).intervals = CONFIGURED
    assert sweeps.raise_intervals(now=NOW).counts == {"intervals set": 1, "ends of leases copied": 1}
    assert get_set(sandbox, memory).auto_delete == MAX_TTL + RECLAIM_PERIOD


def test_wake_starts_from_the_intervals_that_the_rest_of_the_lease_requires(lease, sandbox, memory) -> None:
    evict(lease, now=NOW + MINUTE)
    run(lease, now=NOW + 2 * HOUR)
    assert get_set(sandbox, memory).auto_delete == MAX_TTL - 2 * HOUR + RECLAIM_PERIOD


def test_provider_that_cannot_set_intervals_is_not_called(lease, sandbox, memory, monkeypatch) -> None:
    monkeypatch.setattr(MemoryProvider, "can_set_intervals", False)
    move_max_ttl(lease, HOUR)
    assert (sweeps.raise_intervals(now=NOW).counts, count_calls(memory)) == ({}, 0)
