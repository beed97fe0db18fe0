"""Totals of queued runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Min, QuerySet

from leases.queue.models import QueuedRun, QueuedRunState


@dataclass(frozen=True)
class QueueStats:
    """Totals of queued runs: of all agents, or of some."""

    counts: Mapping[str, int]  # by state; ended runs as long as their rows are kept
    oldest_pending_seconds: float


def get_stats(rows: QuerySet[QueuedRun], *, now: datetime) -> QueueStats:
    """Return the totals of some queued runs."""
    counts = dict(rows.order_by().values_list("state").annotate(number=Count("*")))
    oldest = rows.filter(state=QueuedRunState.QUEUED).aggregate(oldest=Min("queued_at"))["oldest"]
    age = max((now - oldest).total_seconds(), 0.0) if oldest else 0.0
    return QueueStats({state.value: counts.get(state.value, 0) for state in QueuedRunState}, age)
