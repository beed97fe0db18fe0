"""Instance sizes that providers sell by name, and the size of a sandbox.

The disk of a sandbox is known if it was requested, and for the sizes with a name."""

from dataclasses import dataclass
from fractions import Fraction

from billing import pricing

MIB_BYTES, MB_BYTES = 1 << 20, 10**6


@dataclass(frozen=True)
class InstanceSize:
    """Resources of an instance type. `disk_mb` is in decimal MB (1000 MB = 1 GB), as on the providers' pages."""

    vcpus: Fraction
    memory_mib: int
    disk_mb: int


def _convert_disk_gib(gib: int) -> int:
    """Convert a disk size in GiB to decimal MB, rounded to whole MB: 4 GiB are 4295 MB."""
    return round(gib * 1024**3 / 10**6)


# Sources: https://developers.cloudflare.com/containers/platform/limits/, section "Instance types", read in November 2026.
# Runloop: description of `resource_size_request` in its Python client 3.0.0; disks are in GiB there.
# Daytona, LangSmith and Modal sell no sizes by name: CPU and memory of a sandbox are chosen freely.
INSTANCE_SIZES: dict[str, dict[str, InstanceSize]] = {
    "cloudflare": {
        "lite": InstanceSize(Fraction(1, 16), 256, 2000),
        "basic": InstanceSize(Fraction(1, 4), 1024, 4000),
        "standard-1": InstanceSize(Fraction(1, 2), 4096, 8000),
        "standard-2": InstanceSize(Fraction(1), 6144, 12000),
        "standard-3": InstanceSize(Fraction(2), 8192, 16000),
        "standard-4": InstanceSize(Fraction(4), 12288, 20000),
    },
    "runloop": {
        "X_SMALL": InstanceSize(Fraction(1, 2), 1024, _convert_disk_gib(4)),
        "SMALL": InstanceSize(Fraction(1), 2048, _convert_disk_gib(4)),
        "MEDIUM": InstanceSize(Fraction(2), 4096, _convert_disk_gib(8)),
        "LARGE": InstanceSize(Fraction(2), 8192, _convert_disk_gib(16)),
        "X_LARGE": InstanceSize(Fraction(4), 16384, _convert_disk_gib(16)),
        "XX_LARGE": InstanceSize(Fraction(8), 32768, _convert_disk_gib(16)),
    },
}


def find_instance_type(provider: str, memory_mib: int, millicpus: int) -> str:
    """Return the provider's name for this size, or an empty string if it sells none.

    1/16 vCPU is 62.5 millicpus, so both 62 and 63 match it."""
    for name, size in INSTANCE_SIZES.get(provider, {}).items():
        if size.memory_mib == memory_mib and abs(size.vcpus * 1000 - millicpus) < 1:
            return name
    return ""


def get_disk_mb(provider: str, name: str) -> int:
    """Return the disk size of an instance type in MB, or 0 if it is unknown."""
    size = INSTANCE_SIZES.get(provider, {}).get(name)
    return size.disk_mb if size else 0


@dataclass(frozen=True)
class SandboxSize:
    """Provider and limits of a sandbox, which determine its price. `disk_mib`: None for that of the instance type."""

    provider: str
    memory_mib: int
    millicpus: int
    disk_mib: int | None = None
    gpus: int = 0
    gpu_type: str = ""

    @property
    def instance_type(self) -> str:
        return find_instance_type(self.provider, self.memory_mib, self.millicpus)

    @property
    def disk_mb(self) -> int:
        if self.disk_mib:
            return round(self.disk_mib * MIB_BYTES / MB_BYTES)
        return get_disk_mb(self.provider, self.instance_type)

    def get_rate_type(self, item: str) -> str:
        """Return the instance type of the rates of an item: that of the sandbox, or the type of its GPUs."""
        return self.gpu_type if item == "gpu" else self.instance_type

    def compute_quantities(self, micros: int, *, is_suspended: bool = False) -> dict[str, int]:
        """Return what is allocated to the sandbox for `micros` microseconds, in base units by item."""
        if is_suspended:
            return pricing.compute_suspended_quantities(micros, memory_mib=self.memory_mib, disk_mb=self.disk_mb)
        return pricing.compute_allocated_quantities(
            micros, memory_mib=self.memory_mib, millicpus=self.millicpus, disk_mb=self.disk_mb, gpus=self.gpus
        )


def find_instance_size(provider: str, name: str) -> InstanceSize | None:
    """Find a size by name, at this provider first, then at any other."""
    for sizes in (INSTANCE_SIZES.get(provider, {}), *INSTANCE_SIZES.values()):
        if name in sizes:
            return sizes[name]
    return None


def list_instance_types() -> list[str]:
    return [name for sizes in INSTANCE_SIZES.values() for name in sizes]
