"""Resources that a lease requests for its sandboxes, within the limits of the pools that may start them."""

from collections.abc import Iterable
from dataclasses import dataclass

from leases.errors import InvalidRequest
from sandboxes.models import Pool

MIN_MEMORY_MIB, MIN_MILLICPUS = 16, 50


@dataclass(frozen=True)
class Resources:
    """Memory and CPU of a sandbox. None: those of the pool."""

    memory_mib: int | None = None
    millicpus: int | None = None


def get_max_memory_mib(pool: Pool) -> int:
    return max(pool.max_memory_mib or 0, pool.memory_mib)


def get_max_millicpus(pool: Pool) -> int:
    return max(pool.max_millicpus or 0, pool.millicpus)


def fits(pool: Pool, resources: Resources) -> bool:
    """Return whether a sandbox of a pool may have these resources."""
    memory, cpu = resources.memory_mib or 0, resources.millicpus or 0
    return memory <= get_max_memory_mib(pool) and cpu <= get_max_millicpus(pool)


def require_allowed(pools: Iterable[Pool], resources: Resources) -> None:
    """Raise InvalidRequest, naming the field, unless at least one of the pools allows these resources."""
    rows = [*pools]
    if any(fits(pool, resources) for pool in rows) and _is_large_enough(resources):
        return
    memory, cpu = max(map(get_max_memory_mib, rows)), max(map(get_max_millicpus, rows))
    if resources.memory_mib is not None and not MIN_MEMORY_MIB <= resources.memory_mib <= memory:
        raise InvalidRequest("resources.memory_mib", f"Must be from {MIN_MEMORY_MIB} to {memory}.")
    if resources.millicpus is not None and not MIN_MILLICPUS <= resources.millicpus <= cpu:
        raise InvalidRequest("resources.millicpus", f"Must be from {MIN_MILLICPUS} to {cpu}.")
    raise InvalidRequest("resources", "No pool allows this memory together with this CPU.")


def _is_large_enough(resources: Resources) -> bool:
    memory, cpu = resources.memory_mib, resources.millicpus
    return (memory is None or memory >= MIN_MEMORY_MIB) and (cpu is None or cpu >= MIN_MILLICPUS)
