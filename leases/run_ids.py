"""Ids of runs that callers choose."""

from uuid import UUID

from leases.models import AgentRun, Lease, QueuedRun
from sandboxes.errors import RunExists
from sandboxes.models import Run

RANDOM_UUID_VERSIONS = (4, 7)


def is_random(run_id: UUID) -> bool:
    """Return whether the id is random. A predictable id could be taken before its owner uses it."""
    return run_id.version in RANDOM_UUID_VERSIONS


def require_unused(run_id: UUID) -> None:
    """Raise RunExists if any run, of any agent, has the id. The error does not show whose run that is.

    One-shot runs share their id with a lease, and agent runs with the run of their command. The primary keys of these tables
    decide between concurrent requests."""
    if any(model.objects.filter(pk=run_id).exists() for model in (Run, Lease, AgentRun, QueuedRun)):
        raise RunExists()
