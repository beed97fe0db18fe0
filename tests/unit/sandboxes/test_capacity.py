"""Automatic capacity of pools: from LEASEHOLD_MAX_SANDBOXES, else from the memory of the engine."""

from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from sandboxes import providers
from sandboxes.hosts import capacity
from sandboxes.models import Pool
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes
from tests.conftest import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]


@pytest.fixture
def default_pool(memory: MemoryProvider) -> Pool:
    return Pool.objects.get(name="default")


@pytest.fixture
def engine_memory(memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the memory that the engine reports: engine_memory(MiB or an exception)."""

    def set_memory(answer: int | Exception | None) -> None:
        def report() -> int | None:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(memory, "total_memory_mib", report)

    return set_memory


@pytest.mark.parametrize(
    ("mib", "memory_mib", "places"),
    [(8192, 512, 12), (24064, 512, 43), (2048, 512, 2), (600, 512, 1), (8192, 4096, 1), (None, 512, 1000)],
)
def test_default_pool_has_as_many_places_as_sandboxes_fit_into_the_engine(
    default_pool: Pool, engine_memory, mib: int | None, memory_mib: int, places: int
) -> None:
    Pool.objects.filter(pk=default_pool.pk).update(memory_mib=memory_mib)
    engine_memory(mib)
    capacity.update_automatic_capacities(now=NOW)
    default_pool.refresh_from_db()
    assert default_pool.capacity == places


def test_max_sandboxes_sets_the_capacity_of_the_existing_default_pool(default_pool: Pool, engine_memory, settings) -> None:
    engine_memory(8192)
    for limit, places in ((77, 77), (None, 12)):
        settings.MAX_SANDBOXES = limit
        capacity.update_automatic_capacities(now=NOW)
        default_pool.refresh_from_db()
        assert default_pool.capacity == places


def test_capacity_set_by_an_operator_stays(pool: Pool, engine_memory, settings) -> None:
    engine_memory(8192)
    settings.MAX_SANDBOXES = 5
    capacity.update_automatic_capacities(now=NOW)
    pool.refresh_from_db()
    assert (pool.automatic_capacity, pool.capacity) == (False, 100)


@pytest.mark.parametrize("error", [Unavailable("no daemon"), ImproperlyConfigured("does not isolate")], ids=str)
def test_capacity_stays_while_the_engine_does_not_respond(default_pool: Pool, engine_memory, error: Exception) -> None:
    engine_memory(8192)
    assert capacity.update_automatic_capacities(now=NOW) == 1
    engine_memory(error)
    assert capacity.update_automatic_capacities(now=NOW) == 0
    default_pool.refresh_from_db()
    assert default_pool.capacity == 12


def test_recount_sweep_updates_the_capacity(default_pool: Pool, engine_memory) -> None:
    engine_memory(8192)
    assert passes.recount(now=NOW).failures == []
    default_pool.refresh_from_db()
    assert default_pool.capacity == 12


def test_the_process_provider_reports_the_hosts_memory() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1])  # kiB
    assert providers.get_provider("process").total_memory_mib() == total >> 10
