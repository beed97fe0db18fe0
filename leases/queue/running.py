"""Runs in progress: started queued runs, and direct agent runs, which start without the queue.

Both take the same places: LEASEHOLD_QUEUE_MAX_RUNNING in all, of one agent and of one pool. A queued run waits for a place, and
a direct agent run without one is refused."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Q, QuerySet

from leases.agent_runs import interruption
from leases.agent_runs.models import AgentRun
from leases.queue.models import QueuedRun, QueuedRunState
from sandboxes.db import sql
from sandboxes.errors import TooManyRuns

DIRECT = Q(ended_at__isnull=True, queued=False)  # that of a queued run is counted by its queued run
LOCK = "claims of queued runs"  # serializes the counts of claims and of direct starts


def find_started() -> QuerySet[QueuedRun]:
    return QueuedRun.objects.filter(state=QueuedRunState.STARTED).order_by()


def find_direct() -> QuerySet[AgentRun]:
    """Select the open direct agent runs."""
    return AgentRun.objects.filter(DIRECT).order_by()


def count_all() -> int:
    return find_started().count() + find_direct().count()


def count_by_agent() -> Mapping[str, int]:
    return _count_by("agent_did", "lease__agent_did")


def count_by_pool() -> Mapping[int, int]:
    return _count_by("pool", "lease__pool")


def _count_by(started: str, direct: str) -> Counter[Any]:
    counts = Counter(dict(find_started().values_list(started).annotate(number=Count("*"))))
    counts.update(dict(find_direct().values_list(direct).annotate(number=Count("*"))))
    return counts


def insert_direct(row: AgentRun) -> None:
    """Insert the row of a direct agent run. Raise TooManyRuns if a limit of runs in progress is reached."""
    lease = row.lease
    with transaction.atomic():
        sql.lock_key(LOCK)
        agent, pool = lease.agent_did, lease.pool
        _require_below(count_by_agent().get(agent, 0), settings.QUEUE_MAX_RUNNING_PER_AGENT, agent, "_PER_AGENT")
        _require_below(count_by_pool().get(pool.pk, 0), settings.QUEUE_MAX_RUNNING_PER_POOL, f'Pool "{pool.name}"', "_PER_POOL")
        _require_below(count_all(), settings.QUEUE_MAX_RUNNING, "This installation", "")
        row.save(force_insert=True)


def _require_below(count: int, limit: int, owner: str, suffix: str) -> None:
    if count >= limit:
        raise TooManyRuns(
            f"{owner} has {count} agent runs and queued runs in progress, and the limit is {limit} "
            f"(LEASEHOLD_QUEUE_MAX_RUNNING{suffix}). Nothing was run. Try again when a run has ended, or queue the run.",
            limit=limit,
        )


def interrupt_direct(rows: QuerySet[AgentRun], *, now: datetime) -> int:
    """Interrupt direct agent runs. Return how many were not interrupted before. Idempotent."""
    pks = rows.filter(DIRECT).values_list("pk", flat=True)
    return sum(interruption.interrupt_by_id(pk, now=now) for pk in list(pks))
