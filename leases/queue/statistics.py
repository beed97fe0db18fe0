"""Totals of queued runs and of direct agent runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Min, QuerySet

from leases.agent_runs.models import AgentRun
from leases.queue import running
from leases.queue.models import QueuedRun, QueuedRunState


@dataclass(frozen=True)
class QueueStats:
    """Totals of queued runs and of direct agent runs: of all agents, or of some."""

    counts: Mapping[str, int]  # by state; ended runs as long as their rows are kept
    oldest_pending_seconds: float
    direct_agent_runs: int  # open

    @property
    def running(self) -> int:
        """Number of runs in progress, which LEASEHOLD_QUEUE_MAX_RUNNING and its siblings limit."""
        return self.counts[QueuedRunState.STARTED] + self.direct_agent_runs


def get_stats(rows: QuerySet[QueuedRun], direct: QuerySet[AgentRun], *, now: datetime) -> QueueStats:
    """Return the totals of some queued runs, and of those of `direct` that are open and were not queued."""
    counts = dict(rows.order_by().values_list("state").annotate(number=Count("*")))
    oldest = rows.filter(state=QueuedRunState.QUEUED).aggregate(oldest=Min("queued_at"))["oldest"]
    age = max((now - oldest).total_seconds(), 0.0) if oldest else 0.0
    by_state = {state.value: counts.get(state.value, 0) for state in QueuedRunState}
    return QueueStats(by_state, age, direct.filter(running.DIRECT).count())
