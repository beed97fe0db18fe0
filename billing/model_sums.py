"""Sums of model calls by any attribute, read from the totals by model: calls, tokens by kind, and cost."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from django.db.models import Q, Sum, Value

from billing.grouping import GROUP_BY_COLUMNS, Period, Selection, format_key
from billing.model_providers import find_model_provider
from billing.model_usage import NO_USAGE, ModelUsage
from billing.models import BillableItem, ModelTotal


class TokenCounts(NamedTuple):
    """Tokens by kind. `input` includes `cached` (read from the cache) and `cache_written`; `output` includes reasoning.

    These are the tokens that the upstreams reported. `estimated` are further tokens, of which an upstream reported nothing: the
    sum of `input`, `output` and `estimated` is that of a budget in tokens."""

    input: int = 0
    cached: int = 0
    cache_written: int = 0
    output: int = 0
    estimated: int = 0

    @classmethod
    def of(cls, row: Any) -> "TokenCounts":
        """Return the counts of a row or a sum with the columns of ModelTotal."""
        counts = (row.input_tokens, row.cached_tokens, row.cache_written_tokens, row.output_tokens)
        return cls(*counts, row.estimated_tokens or 0)

    @classmethod
    def sum(cls, counts: Iterable["TokenCounts"]) -> "TokenCounts":
        return cls(*map(sum, zip(cls(), *counts, strict=True)))


def sum_model_calls(by: str, selection: Selection) -> dict[str, ModelUsage] | None:
    """Sum model calls by attribute. None if the totals by model are not derived yet."""
    if not ModelTotal.are_derived():
        return None
    if selection.filters.get("item", BillableItem.LLM) != BillableItem.LLM:
        return {}
    periods = selection.build_period_filter([by])
    rows = ModelTotal.objects.filter(selection.build_filter(without=["item"])).order_by()
    rows = rows.filter(Q(period=Period.LEASE_DAY) if periods is None else periods)
    column = Value(str(BillableItem.LLM)) if by == "item" else GROUP_BY_COLUMNS[by]
    sums: dict[str, ModelUsage] = {}
    for key, *amounts in rows.values_list(column).annotate(*(Sum(name) for name in ModelUsage._fields)):
        if amounts[0] is None:  # by item there is one group, also without rows
            continue
        name = find_model_provider(key) if by == "model_provider" else format_key(key)
        sums[name] = sums.get(name, NO_USAGE).plus(ModelUsage(*map(int, amounts)))
    return sums


def sum_tokens(sums: Mapping[str, ModelUsage]) -> dict[str, TokenCounts]:
    return {name: TokenCounts.of(usage) for name, usage in sums.items()}
