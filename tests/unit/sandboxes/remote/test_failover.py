"""Failover from a vendor to a pool of another provider: one sandbox of the lease, none left at the vendor, no state lost."""

from collections.abc import Callable, Iterator

import pytest

from leases import sweeps
from leases.models import AlternativePool, EnvironmentType, Lease
from sandboxes import providers
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.remote.provider import RemoteProvider
from tests.conftest import MINUTE, NOW
from tests.emulators.vendor import CUT_AFTER, Fault, VendorEmulator
from tests.support.leases import evict, get_sandbox, read, run, write
from tests.support.remote import GetEmulator
from tests.unit.sandboxes.remote.conftest import CREATE

pytestmark = pytest.mark.django_db
AWAY = Fault("GET /api/sandbox/", 503, 1000)


@pytest.fixture
def daytona(emulators: GetEmulator, move_pool: Callable[[str], Pool]) -> Iterator[VendorEmulator]:
    move_pool("daytona")
    provider = providers.get_provider("daytona")
    assert isinstance(provider, RemoteProvider)
    provider.retry_delays_seconds = (0.0,)
    yield emulators("daytona")
    emulators("daytona").faults.clear()


@pytest.fixture
def lease(daytona: VendorEmulator, pool: Pool, memory: MemoryProvider, grant) -> Lease:
    second = Pool.objects.create(name="second", provider="memory")
    duo = EnvironmentType.objects.create(name="duo", pool=pool)
    AlternativePool.objects.create(environment_type=duo, pool=second)
    granted: Lease = grant(environment_type="duo", pool="")
    return granted


def test_create_with_an_unknown_outcome_goes_on_elsewhere_and_is_destroyed_at_the_vendor(lease, pool, daytona) -> None:
    daytona.faults += [Fault(CREATE["daytona"], CUT_AFTER, 1), AWAY]
    assert run(lease).exit_code == 0
    first = Sandbox.objects.get(pool=pool)
    assert (first.state, get_sandbox(lease).provider) == ("destroying", "memory")
    assert len(daytona.find_machines(first.name)) == Pool.objects.get(pk=pool.pk).used == 1
    event = lease.events.get(kind="pool_skipped")
    assert (event.pool, event.skip_reason) == (pool, "unavailable")
    daytona.faults.clear()
    sweeps.reclaim(now=NOW + 10 * MINUTE)
    assert daytona.find_machines(first.name) == []
    assert (Sandbox.objects.get(pool=pool).state, Pool.objects.get(pk=pool.pk).used) == ("destroyed", 0)


def test_cold_sandbox_of_a_vendor_that_is_away_wakes_elsewhere_with_its_state(lease, pool, daytona) -> None:
    write(lease)
    assert get_sandbox(lease).provider == "daytona"
    evict(lease)
    daytona.faults += [Fault(CREATE["daytona"], 503, 1000), AWAY]
    assert read(lease, now=NOW + MINUTE) == "kept"
    assert get_sandbox(lease).provider == "memory"
