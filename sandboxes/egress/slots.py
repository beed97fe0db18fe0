"""Unix-socket allocation for the egress proxy.

Each slot is a unix socket in its own directory, mounted into one sandbox at a time at /run/leasehold. The proxy identifies a
caller by its slot, independent of any claim in the request. A slot belongs to one incarnation of a sandbox, from before its
creation until the provider has confirmed its end. A cold sandbox has no slot, and its next wake takes any free one."""

import os
import random
from pathlib import Path

from django.conf import settings

from sandboxes.errors import CapacityExhausted
from sandboxes.models import Sandbox, SandboxState

SOCKET_NAME = "llm.sock"
PROXY_UID = 10003  # the proxy's user if the control plane runs as root; otherwise the proxy runs as the same user
SLOT_SAMPLE_SIZE = 16


def choose_free_slot() -> int | None:
    """Return a slot that is currently free, or None.

    The slot is not reserved: a unique index rejects the second insert of a live sandbox with the same slot, and the caller
    retries after the IntegrityError."""
    live = Sandbox.objects.exclude(state=SandboxState.DESTROYED).filter(slot__isnull=False)
    sample = random.sample(range(settings.EGRESS_SLOTS), min(SLOT_SAMPLE_SIZE, settings.EGRESS_SLOTS))
    free = {*sample} - {*live.filter(slot__in=sample).values_list("slot", flat=True)}
    if not free:
        free = {*range(settings.EGRESS_SLOTS)} - {*live.values_list("slot", flat=True)}
    # No secret: a random choice makes concurrent collisions unlikely.
    return random.choice([*free]) if free else None  # noqa: S311


def build_exhausted_error() -> CapacityExhausted:
    return CapacityExhausted(
        f"All {settings.EGRESS_SLOTS} egress slots are in use and none can be freed now: each of their sandboxes is running or "
        "protected by a guarantee. A run that ends frees one. LEASEHOLD_EGRESS_SLOTS sets their number for all pools."
    )


def ensure_root_directory() -> Path:
    """Create and return the directory of all slots. Its parent is inaccessible to other users of the host."""
    settings.RUNTIME_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory: Path = settings.EGRESS_DIR / "s"
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    return directory


def ensure_slot_directory(slot: int) -> Path:
    """Create and return the host directory of one slot, writable by the proxy."""
    directory = ensure_root_directory() / str(slot)
    directory.mkdir(mode=0o755, exist_ok=True)
    chown_to_proxy(directory)
    return directory


def chown_to_proxy(directory: Path) -> None:
    """Make the proxy's user the owner, if running as root."""
    if os.geteuid() == 0:
        os.chown(directory, PROXY_UID, PROXY_UID)


def get_proxy_uid() -> int:
    return PROXY_UID if os.geteuid() == 0 else os.geteuid()
