"""Free space of the control plane's disks: refusals below a mark, and the values for health and metrics.

Below LEASEHOLD_MIN_FREE_DISK no sandbox is started and no archive is spooled. The last part of the mark is a reserve for the
state of sandboxes that exist: storing it is refused only below an eighth of the mark, which is left to the database.

The disk of an engine on this machine has the same mark: below the mark no new sandbox is started, and below an eighth of the
mark no sandbox is woken and no file is written by the API."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog
from django.conf import settings

from sandboxes import providers
from sandboxes.claims import track
from sandboxes.errors import EngineDiskFull
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import ProviderError
from sandboxes.storage.base import DiskFull

log = structlog.get_logger(__name__)
CHECK_INTERVAL_BYTES = 16 << 20  # written between two checks of one stream
STATE_RESERVE_DIVISOR = 8


def measure_free_space() -> dict[str, int]:
    """Return bytes available to this user by directory: "state", and "store" and "database" if they are on local disks."""
    directories: dict[str, Path] = {"state": settings.STATE_DIR}
    if settings.STORAGE_BACKEND == "filesystem":
        directories["store"] = settings.STORAGE_DIR
    if not settings.ON_POSTGRES:
        directories["database"] = Path(settings.DATABASES["default"]["NAME"]).parent
    return {name: _get_free_bytes(directory) for name, directory in directories.items()}


def find_low() -> dict[str, int]:
    """Return the directories below LEASEHOLD_MIN_FREE_DISK, with their free bytes."""
    return {name: free for name, free in measure_free_space().items() if free < settings.MIN_FREE_DISK}


def require_free_space(operation: str) -> None:
    """Raise DiskFull if a disk has less than LEASEHOLD_MIN_FREE_DISK free."""
    for name, free in find_low().items():
        raise _build_error(operation, name, free, settings.MIN_FREE_DISK)


def require_state_space(size: int = 0) -> None:
    """Raise DiskFull unless `size` bytes of state can be written without using the reserve of the database."""
    if not settings.MIN_FREE_DISK:
        return
    reserve = settings.MIN_FREE_DISK // STATE_RESERVE_DIVISOR
    for name, free in measure_free_space().items():
        if free - size < reserve:
            raise _build_error("store state", name, free, reserve + size)


def measure_engine_space(provider: Provider) -> int | None:
    """Return bytes available on the disk where the engine keeps sandboxes. None: the disk of another machine, or not known.

    An engine that does not respond is not known either: the operation for which its disk is measured fails by itself."""
    try:
        directory = provider.find_disk()
        return _get_free_bytes(directory) if directory else None
    except ProviderError:
        return None
    except OSError as error:  # not permitted to look
        log.warning("engine disk not measured", provider=provider.name, error=str(error))
        return None


def is_engine_low(provider_name: str) -> bool:
    """Return whether the engine's disk has less than LEASEHOLD_MIN_FREE_DISK free."""
    free = measure_engine_space(providers.get_provider(provider_name)) if settings.MIN_FREE_DISK else None
    return free is not None and free < settings.MIN_FREE_DISK


def require_engine_space(provider_name: str, operation: str) -> None:
    """Raise EngineDiskFull if the engine's disk has less than LEASEHOLD_MIN_FREE_DISK free."""
    _require_engine_space(provider_name, operation, settings.MIN_FREE_DISK)


def require_engine_reserve(provider_name: str, operation: str) -> None:
    """Raise EngineDiskFull if the engine's disk is down to the reserve, in which existing sandboxes may still write."""
    _require_engine_space(provider_name, operation, settings.MIN_FREE_DISK // STATE_RESERVE_DIVISOR)


def _require_engine_space(provider_name: str, operation: str, required: int) -> None:
    free = measure_engine_space(providers.get_provider(provider_name)) if required else None
    if free is not None and free < required:
        log.error("disk full", directory="engine", provider=provider_name, free_bytes=free, operation=operation)
        error = EngineDiskFull(
            f"{free >> 20} MiB are free on the disk of the engine that runs sandboxes. To {operation}, "
            f"{required >> 20} MiB are required."
        )
        error.provider = provider_name
        raise error


def check_while_writing(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `chunks`, and raise DiskFull as `require_state_space` does: other streams use up the same disk.

    Each chunk counts as progress of the claims held by the caller."""
    unchecked = 0
    require_state_space()
    for chunk in track(chunks):
        unchecked += len(chunk)
        if unchecked >= CHECK_INTERVAL_BYTES:
            require_state_space()
            unchecked = 0
        yield chunk


def _get_free_bytes(directory: Path) -> int:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def _build_error(operation: str, name: str, free: int, required: int) -> DiskFull:
    log.error("disk full", directory=name, free_bytes=free, operation=operation)
    reason = f"{free >> 20} MiB are free on the control plane's {name} disk, and {required >> 20} MiB are required"
    return DiskFull("disk", operation, reason)
