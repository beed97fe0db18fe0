"""Totals of a lease's model calls by run, turn or model."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sandboxes.egress.totals import IS_MODEL_CALL, CallTotals, build_aggregates, calculate_totals
from sandboxes.models import LlmCall

GROUP_COLUMNS = {"run": "run", "turn": "run__turn__number", "model": "model"}


@dataclass(frozen=True)
class GroupedCallTotals:
    """Totals of one group. `key` is the id of a run, the number of a turn or the name of a model; empty for calls without."""

    key: str
    totals: CallTotals


def list_call_totals(lease: UUID, by: str, *, limit: int) -> tuple[CallTotals, list[GroupedCallTotals], int]:
    """Return the totals of a lease's model calls, those of its `limit` most expensive groups, and the number of the others.

    Three queries over the calls of the lease, which its index finds. Calls past their retention are not included."""
    calls = LlmCall.objects.filter(IS_MODEL_CALL, holder=lease).order_by()
    aggregates = {f"total_{name}": aggregate for name, aggregate in build_aggregates().items()}
    groups: Any = calls.values_list(GROUP_COLUMNS[by]).annotate(**aggregates)
    rows = [*groups.order_by("-total_spent", "-total_calls", GROUP_COLUMNS[by])[:limit]]
    others = groups.count() - len(rows) if len(rows) == limit else 0
    return calculate_totals(calls), [_build_group(*row) for row in rows], others


def _build_group(key: Any, *totals: Any) -> GroupedCallTotals:
    return GroupedCallTotals("" if key is None else str(key), CallTotals(*totals))
