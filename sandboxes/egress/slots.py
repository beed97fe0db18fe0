"""Slots: the ways out there are. Each is a unix socket in a directory of its own, which one sandbox at a time has at
/run/leasehold; so whoever speaks through it is known, whatever it says. A slot is a sandbox's from before it is created
until the provider has confirmed that it is gone."""

import os
import random
from pathlib import Path

from django.conf import settings

from sandboxes.errors import CapacityExhausted
from sandboxes.models import Sandbox, SandboxState

SOCKET_NAME = "llm.sock"
PROXY_UID = 10003  # what the proxy runs as where we are root; else it runs as we do
SLOT_SAMPLE_SIZE = 16


def choose_free_slot() -> int:
    """A slot that nobody had a moment ago. The schema sees to it that no two live sandboxes share one: whoever inserts a
    row with it second gets an IntegrityError, and asks again."""
    live = Sandbox.objects.exclude(state=SandboxState.DESTROYED).filter(slot__isnull=False)
    some = random.sample(range(settings.EGRESS_SLOTS), min(SLOT_SAMPLE_SIZE, settings.EGRESS_SLOTS))
    left = {*some} - {*live.filter(slot__in=some).values_list("slot", flat=True)}
    if not left:
        left = {*range(settings.EGRESS_SLOTS)} - {*live.values_list("slot", flat=True)}
    if not left:
        raise CapacityExhausted(
            f"All {settings.EGRESS_SLOTS} ways out are taken. LEASEHOLD_EGRESS_SLOTS says how many there are, for all pools."
        )
    return random.choice([*left])  # noqa: S311 - no secret: two that choose at once are to choose differently


def ensure_root_directory() -> Path:
    """The directory with all of them. No other user of this host comes near it."""
    settings.RUNTIME_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory: Path = settings.EGRESS_DIR / "s"
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    return directory


def ensure_slot_directory(slot: int) -> Path:
    """The host directory of one, which is there afterwards, and in which the proxy may make its socket."""
    place = ensure_root_directory() / str(slot)
    place.mkdir(mode=0o755, exist_ok=True)
    chown_to_proxy(place)
    return place


def chown_to_proxy(place: Path) -> None:
    """To the user that the proxy runs as."""
    if os.geteuid() == 0:
        os.chown(place, PROXY_UID, PROXY_UID)


def get_proxy_uid() -> int:
    return PROXY_UID if os.geteuid() == 0 else os.geteuid()
