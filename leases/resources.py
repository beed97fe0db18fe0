"""Resources and image that a lease requests for its sandboxes, within the limits of the pools that may start them."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from billing.instance_types import find_instance_size, list_instance_types
from leases.errors import InvalidRequest
from sandboxes.models import Pool

MIN_MEMORY_MIB, MIN_MILLICPUS = 16, 50


@dataclass(frozen=True)
class Resources:
    """Memory, CPU and image of a sandbox. None or empty: those of the pool."""

    memory_mib: int | None = None
    millicpus: int | None = None
    image: str = ""


def resolve_size(name: str) -> Resources:
    """Return the memory and the CPU of an instance type of any provider. Raise InvalidRequest for an unknown name."""
    size = find_instance_size("", name)
    if size is None:
        raise InvalidRequest("resources.size", f"Must be one of {', '.join(list_instance_types())}.")
    return Resources(size.memory_mib, ceil(1000 * size.vcpus))


def get_max_memory_mib(pool: Pool) -> int:
    return max(pool.max_memory_mib or 0, pool.memory_mib)


def get_max_millicpus(pool: Pool) -> int:
    return max(pool.max_millicpus or 0, pool.millicpus)


def fits(pool: Pool, resources: Resources) -> bool:
    """Return whether a sandbox of a pool may have these resources and this image."""
    if not allows_image(pool, resources.image):
        return False
    memory, cpu = resources.memory_mib or 0, resources.millicpus or 0
    return memory <= get_max_memory_mib(pool) and cpu <= get_max_millicpus(pool)


def allows_image(pool: Pool, image: str) -> bool:
    """Return whether a sandbox of a pool may have an image: none stated, that of the pool, or one that the pool lists."""
    return not image or image == pool.image or image in pool.allowed_images


def require_allowed(pools: Iterable[Pool], resources: Resources) -> None:
    """Raise InvalidRequest, naming the field, unless at least one of the pools allows these resources."""
    rows = [*pools]
    if any(fits(pool, resources) for pool in rows) and _is_large_enough(resources):
        return
    if not any(allows_image(pool, resources.image) for pool in rows):
        raise InvalidRequest("resources.image", "No pool of the lease allows this image.")
    memory, cpu = max(map(get_max_memory_mib, rows)), max(map(get_max_millicpus, rows))
    if resources.memory_mib is not None and not MIN_MEMORY_MIB <= resources.memory_mib <= memory:
        raise InvalidRequest("resources.memory_mib", f"Must be from {MIN_MEMORY_MIB} to {memory}.")
    if resources.millicpus is not None and not MIN_MILLICPUS <= resources.millicpus <= cpu:
        raise InvalidRequest("resources.millicpus", f"Must be from {MIN_MILLICPUS} to {cpu}.")
    raise InvalidRequest("resources", "No pool allows this memory, this CPU and this image together.")


def _is_large_enough(resources: Resources) -> bool:
    memory, cpu = resources.memory_mib, resources.millicpus
    return (memory is None or memory >= MIN_MEMORY_MIB) and (cpu is None or cpu >= MIN_MILLICPUS)
