"""Resources and image that a lease requests for its sandboxes, within the limits of the API key, the type and the pools.

A limit of the key or of the environment type applies to what is requested. A pool has a limit of each resource: without one,
memory and CPU may be those of its own sandboxes at most, and disk and GPUs may not be requested."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

from django.core.exceptions import ImproperlyConfigured

from billing.instance_types import SandboxSize, find_instance_size, list_instance_types
from leases.errors import InvalidRequest
from leases.models import EnvironmentType, Lease
from sandboxes import providers
from sandboxes.models import Pool
from sandboxes.models.resource_limits import MIN_DISK_MIB, MIN_MEMORY_MIB, MIN_MILLICPUS, ResourceLimits
from sandboxes.providers.base import TEMPLATE_TAG_PREFIX, Provider

AMOUNTS = {"memory_mib": MIN_MEMORY_MIB, "millicpus": MIN_MILLICPUS, "disk_mib": MIN_DISK_MIB, "gpus": 1}  # with their minimum
FIELDS = {"image": "image", "size": "size", **{name: name for name in AMOUNTS}, "gpus": "gpu", "gpu_type": "gpu_type"}


@dataclass(frozen=True)
class Resources:
    """Memory, CPU, image, disk and GPUs of a sandbox. None, 0 or empty: those of the pool or of the vendor.

    `size` is the instance type by which memory and CPU were requested."""

    memory_mib: int | None = None
    millicpus: int | None = None
    image: str = ""
    size: str = ""
    disk_mib: int | None = None
    gpus: int = 0
    gpu_type: str = ""

    @classmethod
    def of_lease(cls, lease: Lease) -> "Resources":
        return cls(
            lease.memory_mib, lease.millicpus, lease.image, lease.size, lease.disk_mib, lease.gpus, lease.gpu_type
        )  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """Reason for which one of the levels does not allow a resource. `limit` orders the refusals of one resource."""

    detail: str
    limit: int = 0


def resolve_size(name: str) -> Resources:
    """Return the memory and the CPU of an instance type of any provider. Raise InvalidRequest for an unknown name."""
    size = find_instance_size("", name)
    if size is None:
        raise InvalidRequest("resources.size", f"Must be one of {', '.join(list_instance_types())}.")
    return Resources(size.memory_mib, ceil(1000 * size.vcpus), size=name)


def get_sandbox_size(pool: Pool, lease: Lease) -> SandboxSize:
    """Return the size of a new sandbox of a lease in a pool, for its price."""
    memory_mib, millicpus = lease.memory_mib or pool.memory_mib, lease.millicpus or pool.millicpus
    provider = pool.provider or providers.get_default_provider_name()
    return SandboxSize(provider, memory_mib, millicpus, lease.disk_mib, lease.gpus, lease.gpu_type)


def fits(pool: Pool, resources: Resources) -> bool:
    """Return whether a sandbox of a pool may have these resources and this image."""
    return all(_check_pool(name, resources, pool) is None for name in FIELDS)


def require_allowed(
    pools: Iterable[Pool],
    resources: Resources,
    *,
    key: ResourceLimits | None = None,
    environment_type: EnvironmentType | None = None,
) -> None:
    """Raise InvalidRequest unless the key, the environment type and at least one of the pools allow these resources.

    The error names the field and, if several levels refuse a resource, the one with the lowest limit."""
    rows = [*pools]
    for name, field in FIELDS.items():
        refusals = [_check_limits(name, resources, key, "this API key")] if key else []
        if environment_type:
            described = f'the environment type "{environment_type.name}"'
            refusals.append(_check_limits(name, resources, environment_type, described))
        if strictest := _find_strictest([*refusals, _check_pools(name, resources, rows)]):
            raise InvalidRequest(f"resources.{field}", strictest.detail)
    if not any(fits(pool, resources) for pool in rows):
        raise InvalidRequest("resources", "No pool of the lease allows these resources together.")


def _find_strictest(refusals: Iterable[Refusal | None]) -> Refusal | None:
    return min((refusal for refusal in refusals if refusal), key=lambda refusal: refusal.limit, default=None)


def _check_pools(name: str, resources: Resources, pools: list[Pool]) -> Refusal | None:
    """Return the refusal of the pool with the highest limit if every pool refuses a resource."""
    refusals = [_check_pool(name, resources, pool) for pool in pools]
    if not all(refusals):
        return None
    return max((refusal for refusal in refusals if refusal), key=lambda refusal: refusal.limit, default=None)


def _check_limits(name: str, resources: Resources, limits: ResourceLimits, level: str) -> Refusal | None:
    """Return the refusal of a resource by an API key, an environment type or the lists of a pool."""
    if name == "image":
        allowed = not resources.image or not limits.allowed_images or resources.image in limits.allowed_images
        return None if allowed else Refusal(f"{_capitalize(level)} does not allow this image.")
    if name == "size":
        return _check_size(resources, limits, level)
    if name == "gpu_type":
        return _check_gpu_type(resources, limits.allowed_gpu_types, level)
    return _check_amount(name, resources, getattr(limits, f"max_{name}"), level)


def _check_size(resources: Resources, limits: ResourceLimits, level: str) -> Refusal | None:
    is_sized = bool(resources.size or resources.memory_mib or resources.millicpus)
    if not limits.allowed_sizes or not is_sized or resources.size in limits.allowed_sizes:
        return None
    return Refusal(f"Must be one of {', '.join(limits.allowed_sizes)}: the sizes of {level}.")


def _check_gpu_type(resources: Resources, allowed: Iterable[str], level: str) -> Refusal | None:
    if not resources.gpus or not allowed or resources.gpu_type in allowed:
        return None
    return Refusal(f"Must be one of {', '.join(sorted(allowed))}: the GPU types of {level}.")


def _check_amount(name: str, resources: Resources, limit: int | None, level: str) -> Refusal | None:
    value = getattr(resources, name)
    if not value or limit is None or AMOUNTS[name] <= value <= limit:
        return None
    if limit < AMOUNTS[name]:
        return Refusal(f"{_capitalize(level)} allows none by request.")
    return Refusal(f"Must be from {AMOUNTS[name]} to {limit}: the limit of {level}.", limit)


def _check_pool(name: str, resources: Resources, pool: Pool) -> Refusal | None:
    """Return the refusal of a resource by a pool or by the pool's provider."""
    level = f'the pool "{pool.name}"'
    if name == "image":
        return None if _allows_image(pool, resources.image) else Refusal("No pool of the lease allows this image.")
    if name in AMOUNTS and (refusal := _check_provider(name, resources, pool)):
        return refusal
    if name == "gpu_type" and (refusal := _check_vendor_gpu_type(resources, pool)):
        return refusal
    if name in AMOUNTS:
        return _check_amount(name, resources, POOL_LIMITS[name](pool), level)
    return _check_limits(name, resources, pool, level)


POOL_LIMITS: dict[str, Callable[[Pool], int]] = {
    "memory_mib": lambda pool: max(pool.max_memory_mib or 0, pool.memory_mib),
    "millicpus": lambda pool: max(pool.max_millicpus or 0, pool.millicpus),
    "disk_mib": lambda pool: pool.max_disk_mib or 0,
    "gpus": lambda pool: pool.max_gpus or 0,
}
CAPABILITIES = {"memory_mib": "can_set_size", "millicpus": "can_set_size", "disk_mib": "can_set_disk", "gpus": "has_gpus"}


def _check_provider(name: str, resources: Resources, pool: Pool) -> Refusal | None:
    """Return a refusal if the provider of a pool cannot set a resource that differs from the pool's own."""
    value = getattr(resources, name)
    if not value or value == getattr(pool, name, None):
        return None
    kind = pool.provider or providers.get_default_provider_name()
    provider = _find_provider_class(kind)
    if provider is None:
        return None if CAPABILITIES[name] == "can_set_size" else Refusal(f'The provider "{kind}" is not installed.')
    if not getattr(provider, CAPABILITIES[name]):
        return Refusal(f'The provider "{kind}" of the pool "{pool.name}" does not allow this by request.')
    image = resources.image or pool.image or providers.get_default_image(kind)
    if provider.sizes_need_image and (not image or image.startswith(TEMPLATE_TAG_PREFIX)):
        return Refusal(f'The provider "{kind}" allows this only with an image of a registry, which "{pool.name}" lacks.')
    return None


def _check_vendor_gpu_type(resources: Resources, pool: Pool) -> Refusal | None:
    kind = pool.provider or providers.get_default_provider_name()
    provider = _find_provider_class(kind) if resources.gpus else None
    if provider is None:
        return None
    if provider.needs_gpu_type and not resources.gpu_type:
        return Refusal(f'The provider "{kind}" needs the type of the GPU.')
    return _check_gpu_type(resources, provider.gpu_types, f'the provider "{kind}"') if resources.gpu_type else None


def _find_provider_class(kind: str) -> type[Provider] | None:
    """Return the class of a provider, or None if its package is not installed."""
    try:
        return providers.load_class(kind)
    except ImproperlyConfigured:
        return None


def _allows_image(pool: Pool, image: str) -> bool:
    return not image or image == pool.image or image in pool.allowed_images


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]
