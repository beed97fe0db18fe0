"""Automatic capacity of pools: LEASEHOLD_MAX_SANDBOXES, else as many sandboxes as fit into the engine's memory."""

from dataclasses import dataclass

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sandboxes import providers
from sandboxes.models import Pool
from sandboxes.models.pools import UNMEASURED_CAPACITY
from sandboxes.providers.base import Provider, ProviderError

RESERVED_MIB = 2048  # for the host and the control plane; at most half of the memory


@dataclass(frozen=True)
class DerivedCapacity:
    """Number of places, and its origin as text for operators."""

    places: int
    origin: str


def derive_capacity(provider: Provider, memory_mib: int) -> DerivedCapacity:
    """Return how many sandboxes of `memory_mib` MiB a pool may hold. Raise ProviderError if the engine does not respond.

    Each place is assumed to be awake, at its memory limit."""
    if settings.MAX_SANDBOXES is not None:
        return DerivedCapacity(settings.MAX_SANDBOXES, "LEASEHOLD_MAX_SANDBOXES")
    total = provider.total_memory_mib()
    if total is None:
        return DerivedCapacity(UNMEASURED_CAPACITY, f"the memory of the {provider.name} provider is not known")
    reserved = min(RESERVED_MIB, total // 2)
    origin = (
        f"sandboxes of {memory_mib:,} MiB in the {total / 1024:.1f} GiB of the {provider.name} provider, "
        f"less {reserved / 1024:.1f} GiB"
    )
    return DerivedCapacity(max((total - reserved) // memory_mib, 1), origin)


def try_derive_capacity(provider: str, memory_mib: int) -> DerivedCapacity | None:
    """Return what derive_capacity does, or None if the provider cannot be used now. An empty name is the default provider."""
    try:
        return derive_capacity(providers.get_provider(provider or providers.get_default_provider_name()), memory_mib)
    except (ProviderError, ImproperlyConfigured):
        return None


def update_automatic_capacities() -> int:
    """Set the capacity of each pool whose capacity is automatic, and its origin. Return the number of changed capacities.

    A pool whose engine does not respond keeps its capacity. A capacity below the number of existing sandboxes destroys none."""
    changed = 0
    for pool in Pool.objects.filter(automatic_capacity=True):
        if derived := try_derive_capacity(pool.provider, pool.memory_mib):
            unchanged = Pool.objects.filter(
                pk=pool.pk, automatic_capacity=True, provider=pool.provider, memory_mib=pool.memory_mib
            )
            changed += unchanged.exclude(capacity=derived.places).update(capacity=derived.places)
            unchanged.exclude(capacity_origin=derived.origin).update(capacity_origin=derived.origin)
    return changed
