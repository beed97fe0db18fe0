"""Exit codes and metered costs of agent runs, read from the rows of their Runs and of the model calls of their leases."""

import uuid
from collections.abc import Collection
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple

from django.db.models import DateTimeField, OuterRef, Subquery, Sum, Value
from django.db.models.functions import Coalesce

from leases.agent_runs.models import AgentRun
from sandboxes.models import LlmCall, Run


class AgentRunResult(NamedTuple):
    run: Run | None = None  # of the CLI, without its output; None: none was opened
    cost: Decimal = Decimal(0)  # USD, of the model calls of the lease during the run; unpriced calls count as zero


def load_results(pks: Collection[uuid.UUID], *, now: datetime) -> dict[uuid.UUID, AgentRunResult]:
    """Return the runs and costs of agent runs, by two queries. The cost of an open run is that of its calls until `now`."""
    calls = LlmCall.objects.filter(
        holder=OuterRef("lease_id"),
        started_at__gte=OuterRef("started_at"),
        started_at__lte=Coalesce(OuterRef("ended_at"), Value(now, DateTimeField())),
    )
    cost = calls.order_by().values("holder").annotate(total=Sum("cost")).values("total")
    runs = Run.objects.defer("stdout", "stderr").in_bulk(pks)
    found = AgentRun.objects.filter(pk__in=pks).values_list("pk", Subquery(cost))
    return {pk: AgentRunResult(runs.get(pk), (total or Decimal(0)).quantize(Decimal("1e-9"))) for pk, total in found}


def load_result(pk: uuid.UUID, *, now: datetime) -> AgentRunResult:
    """Like `load_results`, for one agent run."""
    return load_results([pk], now=now).get(pk, AgentRunResult())
