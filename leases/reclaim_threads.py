"""Destruction of the sandboxes of ended leases in the web process that ended them, without a wait for the queue."""

import threading
from collections.abc import Callable
from uuid import UUID

import structlog
from django.db import connections

from leases import sweeps
from sandboxes import destruction
from sandboxes.db import database_time
from sandboxes.hosts import registry
from sandboxes.long_calls import is_shutting_down
from sandboxes.models import Sandbox, SandboxState

log = structlog.get_logger(__name__)
MAX_THREADS = 2  # of a web process: more ended leases are left to the queue


class ReclaimThreads:
    """Threads of this process that reclaim one lease each. The maximum is 0 in processes that serve no requests.

    A thread acts under the claim of `destruction.destroy`. A process that dies in between leaves the sandbox to the sweeps."""

    def __init__(self, maximum: int = 0) -> None:
        self.set_maximum(maximum)

    def set_maximum(self, maximum: int) -> None:
        """Replace the limit. Call this method before the process serves requests."""
        self._permits = threading.BoundedSemaphore(maximum) if maximum else None

    def start(self, lease_id: UUID, *, on_rest: Callable[[], object]) -> bool:
        """Reclaim an ended lease in a thread. Return False, without a thread, at the maximum and while the process shuts down.

        The thread calls `on_rest` if a sandbox remains."""
        permits = self._permits
        if permits is None or is_shutting_down() or not permits.acquire(blocking=False):
            return False

        def run() -> None:
            try:
                if not reclaim(lease_id):
                    on_rest()
            except Exception:  # the sweep `reclaim` tries again
                log.exception("reclaim failed", lease=str(lease_id))
            finally:
                connections.close_all()
                permits.release()

        threading.Thread(target=run, name=f"reclaim-{lease_id}", daemon=True).start()
        return True


THREADS = ReclaimThreads()


def reclaim(lease_id: UUID) -> bool:
    """Destroy the sandboxes of an ended lease that are due on this host, and mark the lease destroyed if none remains.

    Return whether none remains that is due, which may be on another host."""
    due = Sandbox.objects.filter(holder=lease_id, state=SandboxState.DESTROYING)
    for pk in due.filter(registry.filter_local()).values_list("pk", flat=True):
        destruction.destroy(pk, now=database_time.now(), actor="release")
    now = database_time.now()
    return sweeps.mark_destroyed(lease_id, now=now, actor="release") or not due.filter(deadline_at__lte=now).exists()
