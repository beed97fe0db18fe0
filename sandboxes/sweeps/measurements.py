"""Sweeps that measure sandboxes: the size of workspaces, and the use of CPU and memory."""

from datetime import datetime

import structlog
from django.db.models import F, Q, QuerySet

from sandboxes import suspension
from sandboxes.db.clock import clock_from
from sandboxes.engine_turns import EngineTurns, list_by_engine
from sandboxes.hosts import registry
from sandboxes.lifecycle import WAITING
from sandboxes.models import Sandbox
from sandboxes.providers.errors import Missing, ProviderError
from sandboxes.runs import workspace_limit
from sandboxes.sweep_log import PASS_TIME_LIMIT, SweepResult
from sandboxes.usage import readings

log = structlog.get_logger(__name__)


def measure_workspaces(*, now: datetime, limit: int = 50) -> SweepResult:
    """Measure workspaces that were used since their last measurement."""
    result, clock = SweepResult(), clock_from(now)
    rows = list_by_engine(find_unmeasured(), limit=limit)
    for sandbox in (turns := EngineTurns(rows, clock=clock, until=now + PASS_TIME_LIMIT)):
        try:
            provider = registry.get_sandbox_provider(sandbox)
            suspension.thaw(sandbox, provider)
            size = workspace_limit.measure_workspace(provider, sandbox, now=clock())
        except Missing:
            result.note("gone")  # reconcile handles missing sandboxes
        except ProviderError as failed:
            turns.note_failure()
            result.failures.append(f"{sandbox.pk}: {failed}")
        else:
            result.note("over the limit" if size > sandbox.pool.workspace_limit_mib << 20 else "measured")
    return result


def record_readings(*, now: datetime, limit: int = 2000) -> SweepResult:
    """Record the CPU and memory use of sandboxes. The next reading of a sandbox includes the use of a skipped one."""
    result, clock = SweepResult(), clock_from(now)
    rows = list_by_engine(find_readable(), limit=limit)
    for sandbox in (turns := EngineTurns(rows, clock=clock, until=now + PASS_TIME_LIMIT)):
        try:
            result.note(
                "read", readings.record_reading(sandbox, registry.get_sandbox_provider(sandbox), now=clock()) is not None
            )
        except Missing:
            result.note("gone")  # reconcile handles missing sandboxes
        except ProviderError as failed:
            turns.note_failure()
            result.failures.append(f"{sandbox.pk}: {failed}")
    return result


def find_readable() -> QuerySet[Sandbox]:
    """Select the sandboxes with readable usage on the hosts that this process reaches, in random order."""
    return readings.find_readable().filter(registry.filter_local()).order_by("?")


def find_unmeasured() -> QuerySet[Sandbox]:
    """Select waiting sandboxes whose workspace was not measured since their last use, in random order.

    In a fixed order those that cannot be measured would delay the others in every pass."""
    stale = Q(measured_at__isnull=True) | Q(measured_at__lt=F("last_used_at"))
    waiting = Sandbox.objects.filter(registry.filter_local(), tier=2, state=WAITING, lost_at__isnull=True)
    return waiting.filter(stale).select_related("pool").order_by("?")
