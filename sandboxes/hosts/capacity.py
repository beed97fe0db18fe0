"""Automatic capacity of pools: LEASEHOLD_MAX_SANDBOXES, else as many sandboxes as fit into the memory of the live hosts."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sandboxes import providers
from sandboxes.formatting import pluralize
from sandboxes.hosts import registry
from sandboxes.models import Pool
from sandboxes.models.pools import UNMEASURED_CAPACITY
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import ProviderError

RESERVED_MIB = 2048  # for the host and the control plane; at most half of the memory


@dataclass(frozen=True)
class DerivedCapacity:
    """Number of places, and its origin as text for operators."""

    places: int
    origin: str


def derive_capacity(provider: Provider, memory_mib: int) -> DerivedCapacity:
    """Return how many sandboxes of `memory_mib` MiB this host may hold. Raise ProviderError if the engine does not respond.

    Each sandbox is assumed to run at its memory limit."""
    if settings.MAX_SANDBOXES is not None:
        return DerivedCapacity(settings.MAX_SANDBOXES, "LEASEHOLD_MAX_SANDBOXES")
    total = provider.total_memory_mib()
    if total is None:
        return DerivedCapacity(UNMEASURED_CAPACITY, f"the memory of the {provider.name} provider is not known")
    origin = (
        f"sandboxes of {memory_mib:,} MiB in the {total / 1024:.1f} GiB of the {provider.name} provider, "
        f"less {_compute_reserve(total) / 1024:.1f} GiB"
    )
    return DerivedCapacity(compute_places(total, memory_mib), origin)


def compute_places(total_mib: int, memory_mib: int) -> int:
    """Return how many sandboxes of `memory_mib` MiB fit into an engine's memory beside the reserve, at least one."""
    return max((total_mib - _compute_reserve(total_mib)) // memory_mib, 1)


def _compute_reserve(total_mib: int) -> int:
    return min(RESERVED_MIB, total_mib // 2)


def try_derive_capacity(provider: str, memory_mib: int) -> DerivedCapacity | None:
    """Like derive_capacity, but return None if the provider cannot be used now. An empty name is the default provider."""
    try:
        return derive_capacity(providers.get_provider(provider or providers.get_default_provider_name()), memory_mib)
    except (ProviderError, ImproperlyConfigured):
        return None


def sum_capacity(provider_name: str, memory_mib: int, *, now: datetime) -> DerivedCapacity | None:
    """Return the places on this host and all other live hosts of a provider; None if this host's places are not known."""
    derived = try_derive_capacity(provider_name, memory_mib)
    if derived is None or settings.MAX_SANDBOXES is not None:
        return derived
    others = registry.find_live_hosts(now=now).filter(provider=provider_name)
    memories = [*others.exclude(pk=registry.get_local_host_id(provider_name)).values_list("memory_mib", flat=True)]
    if not memories:
        return derived
    places = sum(compute_places(mib, memory_mib) if mib else UNMEASURED_CAPACITY for mib in memories)
    origin = f"{derived.origin}, and {places:,} on {pluralize(len(memories), 'other host', 'other hosts')}"
    return DerivedCapacity(derived.places + places, origin)


def save_pool(pool: Pool, changed: Collection[str], *, now: datetime) -> None:
    """Store a pool, and derive the automatic capacities again."""
    store_pool(pool, changed)
    update_automatic_capacities(now=now)


def store_pool(pool: Pool, changed: Collection[str]) -> None:
    """Save a validated pool, of an existing one only the `changed` columns. Derive the automatic capacities afterwards.

    A changed capacity ends the automatic one, unless that is among the changes, too."""
    if pool._state.adding:
        pool.save()
    else:
        columns = {*changed}
        if "capacity" in columns and "automatic_capacity" not in columns:
            pool.automatic_capacity = False
            columns.add("automatic_capacity")
        pool.save(update_fields=columns)


def update_automatic_capacities(*, now: datetime) -> int:
    """Set the capacity of each pool whose capacity is automatic, and its origin. Return the number of changed capacities.

    A pool whose engine does not respond keeps its capacity. A capacity below the number of existing sandboxes destroys none."""
    changed = 0
    for pool in Pool.objects.filter(automatic_capacity=True):
        provider_name = pool.provider or providers.get_default_provider_name()
        if derived := sum_capacity(provider_name, pool.memory_mib, now=now):
            unchanged = Pool.objects.filter(
                pk=pool.pk, automatic_capacity=True, provider=pool.provider, memory_mib=pool.memory_mib
            )
            changed += unchanged.exclude(capacity=derived.places).update(capacity=derived.places)
            unchanged.exclude(capacity_origin=derived.origin).update(capacity_origin=derived.origin)
    return changed
