"""Unix-socket allocation for the egress proxy.

Each slot is a unix socket in its own directory, mounted into one sandbox at a time at /run/leasehold. The proxy identifies a
caller by the slot, and ignores any identity stated in the request. A slot belongs to one incarnation of a sandbox, from before
its creation until the provider has confirmed its end. A cold sandbox has no slot, and takes any free one when it wakes."""

import os
import random
from pathlib import Path

from django.conf import settings

from sandboxes.errors import CapacityExhausted
from sandboxes.hosts.directories import ensure_directory, ensure_private_directory
from sandboxes.models import Sandbox, SandboxState

SOCKET_NAME, AGENT_SOCKET_NAME, PROXY_SOCKET_NAME = "llm.sock", "agent.sock", "http.sock"
PROXY_UID = 10003  # the proxy's user if the control plane runs as root; otherwise the proxy runs as the same user
SLOT_SAMPLE_SIZE = 16


def choose_free_slot() -> int | None:
    """Return a slot that is currently free, or None.

    The slot is not reserved. If another sandbox takes it first, a unique index rejects the caller's row, and the caller retries
    after the IntegrityError."""
    live = Sandbox.objects.exclude(state=SandboxState.DESTROYED).filter(slot__isnull=False)
    sample = random.sample(range(settings.EGRESS_SLOTS), min(SLOT_SAMPLE_SIZE, settings.EGRESS_SLOTS))
    free = {*sample} - {*live.filter(slot__in=sample).values_list("slot", flat=True)}
    if not free:
        free = {*range(settings.EGRESS_SLOTS)} - {*live.values_list("slot", flat=True)}
    # Not a secret (S311): the random choice makes it unlikely that concurrent callers choose the same slot.
    return random.choice([*free]) if free else None  # noqa: S311


def build_exhausted_error() -> CapacityExhausted:
    return CapacityExhausted(
        f"All {settings.EGRESS_SLOTS} egress slots are in use and none can be freed now: each of their sandboxes is running or "
        "protected by a guarantee. Try again when a run has ended. LEASEHOLD_EGRESS_SLOTS sets the number for all pools."
    )


def ensure_root_directory() -> Path:
    """Create and return the directory of all slots. Raise UnsafeDirectory if RUNTIME_DIR is accessible to other users."""
    ensure_private_directory(settings.RUNTIME_DIR)
    return ensure_directory(settings.EGRESS_DIR / "s")


def ensure_slot_directory(slot: int) -> Path:
    """Create and return the host directory of one slot, writable by the proxy."""
    return ensure_proxy_directory(ensure_root_directory() / str(slot))


def ensure_agent_directory(slot: int) -> Path:
    """Create and return the host directory of a slot's gateway socket. The proxy cannot write there."""
    ensure_private_directory(settings.RUNTIME_DIR)
    return ensure_directory(ensure_directory(settings.EGRESS_DIR / "a") / str(slot))


def ensure_proxy_directory(directory: Path) -> Path:
    """Create and return a directory of the proxy's user, if running as root, or of the current user."""
    return ensure_directory(directory, owner=PROXY_UID if os.geteuid() == 0 else None)


def get_proxy_uid() -> int:
    return PROXY_UID if os.geteuid() == 0 else os.geteuid()
