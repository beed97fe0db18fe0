"""Threads of the web process that destroy the sandboxes of leases ended by the API, without waiting for the queue.

One agent gets half of them, so that a sandbox that takes long to destroy delays those of its own agent alone."""

import threading
from collections.abc import Callable
from uuid import UUID

import structlog
from django.db import connections

from leases import sweeps
from leases.models import Lease
from sandboxes import destruction
from sandboxes.agent_shares import AgentShares
from sandboxes.db import database_time
from sandboxes.long_calls import is_shutting_down
from sandboxes.models import Sandbox, SandboxState

log = structlog.get_logger(__name__)
MAX_THREADS = 2  # per web process; the queue reclaims further ended leases


class ReclaimThreads:
    """Threads of this process that reclaim one lease each. The maximum is 0 in processes that serve no requests.

    A thread works under the claim of `destruction.destroy`. If the process dies, a sweep takes over at the claim's deadline."""

    def __init__(self, maximum: int = 0) -> None:
        self.set_maximum(maximum)

    def set_maximum(self, maximum: int) -> None:
        """Set the maximum number of threads. Call this method before the process serves requests."""
        self._permits = threading.BoundedSemaphore(maximum) if maximum else None
        self._shares = AgentShares(max(1, maximum // 2))

    def start(self, lease: Lease, *, on_remaining: Callable[[], object]) -> bool:
        """Reclaim an ended lease in a thread.

        Return False, without a thread, at the maximum of threads, at the agent's share, and while the process shuts down.

        The thread calls `on_remaining` if a sandbox of the lease is still due afterwards."""
        permits, shares = self._permits, self._shares
        if permits is None or is_shutting_down() or not shares.take(lease.agent_did):
            return False
        if not permits.acquire(blocking=False):
            shares.give_back(lease.agent_did)
            return False

        def run() -> None:
            try:
                if not reclaim(lease.pk):
                    on_remaining()
            except Exception:  # the next `reclaim` sweep tries again
                log.exception("reclaim failed", lease=str(lease.pk))
            finally:
                connections.close_all()
                permits.release()
                shares.give_back(lease.agent_did)

        threading.Thread(target=run, name=f"reclaim-{lease.pk}", daemon=True).start()
        return True


THREADS = ReclaimThreads()


def reclaim(lease_id: UUID) -> bool:
    """Destroy this host's sandboxes of an ended lease, and mark the lease destroyed if it has no sandbox left.

    Return False if a sandbox of the lease is still due: on another host, or after a failed destroy whose retry is due."""
    due = Sandbox.objects.filter(holder=lease_id, state=SandboxState.DESTROYING)
    for pk in due.values_list("pk", flat=True):  # `destroy` skips those of other hosts
        destruction.destroy(pk, now=database_time.now(), actor="release")
    now = database_time.now()
    return sweeps.mark_destroyed(lease_id, now=now, actor="release") or not due.filter(deadline_at__lte=now).exists()
