"""Quiescence of sandboxes whose state is read for the last time, before an eviction or a destroy.

The commands of the lease end first, killed from outside: they could change the files while these are read, and stop the
processes that read them. Nothing starts a command in a sandbox that is being evicted or destroyed. A sandbox whose state could
not be read all the same is restarted before the next try, which also ends what a kill of the commands may have missed."""

from datetime import datetime

from django.conf import settings
from django.db.models import F

from sandboxes.claims import note_progress
from sandboxes.errors import WorkspaceFull
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Sandbox
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import SandboxUnreadable
from sandboxes.usage import readings

# Failures for which only the sandbox can be the cause: it delivers no valid files, or more than its pool permits.
SANDBOX_FAULTS = (SandboxUnreadable, WorkspaceFull)
# After the kill of all commands, and after a restart. A third failure in the last try of a destroy gives the state up.
MIN_UNREADABLE_TRIES = 2


def quiesce(sandbox: Sandbox, provider: Provider, *, now: datetime) -> None:
    """End all commands of a sandbox that runs nothing for its holder any more. Idempotent. Raise ProviderError."""
    provider.kill_all(sandbox.ref)
    if sandbox.unreadable_tries:
        readings.record_final_reading(sandbox, provider, now=now)  # a restart resets the counter
        provider.restart(sandbox.ref)
        provider.wait_ready(sandbox.ref, timeout=settings.SANDBOX_START_TIMEOUT)
    note_progress()
    checkpoint("quiesced", sandbox)


def count_unreadable(failed: Exception) -> dict[str, object]:
    """Return the column to change after a failed try to store the state."""
    return {"unreadable_tries": F("unreadable_tries") + 1} if isinstance(failed, SANDBOX_FAULTS) else {}


def is_last_try(sandbox: Sandbox) -> bool:
    """Return whether a destroy gives up the state that the sandbox withholds again: in the try before a quarantine.

    A destroy that waits for an operator would let the sandbox keep its place as long as it withholds its state."""
    return sandbox.tries >= settings.DESTROY_TRIES and sandbox.unreadable_tries >= MIN_UNREADABLE_TRIES
