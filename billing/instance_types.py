"""Sizes that providers sell by name. What a sandbox has of disk is known for these alone."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class InstanceSize:
    """disk_mb: a thousand of them are a GB, as the providers' pages count."""

    vcpus: Fraction
    memory_mib: int
    disk_mb: int


# Source: https://developers.cloudflare.com/containers/platform/limits/, section "Instance types", read in November 2026.
INSTANCE_SIZES: dict[str, dict[str, InstanceSize]] = {
    "cloudflare": {
        "lite": InstanceSize(Fraction(1, 16), 256, 2000),
        "basic": InstanceSize(Fraction(1, 4), 1024, 4000),
        "standard-1": InstanceSize(Fraction(1, 2), 4096, 8000),
        "standard-2": InstanceSize(Fraction(1), 6144, 12000),
        "standard-3": InstanceSize(Fraction(2), 8192, 16000),
        "standard-4": InstanceSize(Fraction(4), 12288, 20000),
    }
}


def find_instance_type(provider: str, memory_mib: int, millicpus: int) -> str:
    """The name under which a provider sells this size, empty if it has none. A thousandth of a CPU does not divide into
    sixteenths: 62 and 63 are both 1/16."""
    for name, size in INSTANCE_SIZES.get(provider, {}).items():
        if size.memory_mib == memory_mib and abs(size.vcpus * 1000 - millicpus) < 1:
            return name
    return ""


def get_disk_mb(provider: str, name: str) -> int:
    """0 where it is not known."""
    size = INSTANCE_SIZES.get(provider, {}).get(name)
    return size.disk_mb if size else 0


def find_instance_size(provider: str, name: str) -> InstanceSize | None:
    """A size by its name: the provider's own, else whichever provider has one of that name."""
    for sizes in (INSTANCE_SIZES.get(provider, {}), *INSTANCE_SIZES.values()):
        if name in sizes:
            return sizes[name]
    return None


def list_instance_types() -> list[str]:
    return [name for sizes in INSTANCE_SIZES.values() for name in sizes]
