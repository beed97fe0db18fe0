"""Token and cost totals of model calls. The console's lists use the same filters as the totals that link to them."""

from dataclasses import dataclass
from decimal import Decimal

from django.db.models import Aggregate, BigIntegerField, Count, Q, QuerySet, Sum, Value
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Coalesce

from sandboxes.models import LlmCall
from sandboxes.models.llm_calls import TokenKind

Outcome = LlmCall.Outcome
IS_MODEL_CALL = Q(kind=LlmCall.Kind.LLM)
IS_REFUSED = Q(outcome=Outcome.REFUSED)
IS_ESTIMATED = Q(priced=LlmCall.Priced.ESTIMATE)
IS_FAILED = Q(outcome__in=[Outcome.FAILED, Outcome.CUT, Outcome.LOST])
# Refused calls were never sent, and relay connections are free.
IS_UNPRICED = IS_MODEL_CALL & Q(cost__isnull=True, outcome__in=[Outcome.OK, Outcome.FAILED, Outcome.CUT, Outcome.LOST])
CACHE_WRITES = (TokenKind.CACHE_WRITE_5M, TokenKind.CACHE_WRITE_1H)


def sum_cache_writes() -> Sum:
    """Build the sum of the tokens written to a cache. Calls whose usage does not name them count as zero."""
    first, *others = (Coalesce(Cast(KT(f"token_counts__{kind.value}"), BigIntegerField()), Value(0)) for kind in CACHE_WRITES)
    return Sum(sum(others, first), default=0)


def sum_estimated_tokens() -> Sum:
    """Build the sum of the tokens of ended calls that the upstream did not report, as metering counts them.

    A call without `tokens` was ended by a version before that column, and has its reservation, if any."""
    reported = Coalesce("input_tokens", Value(0)) + Coalesce("output_tokens", Value(0))
    return Sum(Coalesce("tokens", "reserved_tokens") - reported, filter=Q(ended_at__isnull=False) & ~IS_REFUSED, default=0)


@dataclass(frozen=True)
class CallTotals:
    """Counts, tokens and cost of a set of model calls.

    The tokens by kind are those that the upstreams reported. `estimated_tokens` are further tokens of calls that have ended."""

    calls: int
    failed: int
    refused: int
    unpriced: int
    input_tokens: int
    cached_tokens: int
    cache_written_tokens: int
    output_tokens: int
    estimated_tokens: int
    spent: Decimal  # USD; excludes unpriced calls
    estimated: Decimal  # part of `spent` that is estimated, in USD


def calculate_totals(calls: QuerySet[LlmCall]) -> CallTotals:
    """Aggregate the model calls of a queryset, in one query."""
    sums = calls.filter(IS_MODEL_CALL).aggregate(**{f"total_{name}": each for name, each in build_aggregates().items()})
    return CallTotals(*sums.values())


def build_aggregates() -> dict[str, Aggregate]:
    """Build the aggregates of model calls, by field of CallTotals. An alias must not be the name of a column that they read."""
    return {
        "calls": Count("pk"),
        "failed": Count("pk", filter=IS_FAILED),
        "refused": Count("pk", filter=IS_REFUSED),
        "unpriced": Count("pk", filter=IS_UNPRICED),
        "input_tokens": Sum("input_tokens", default=0),
        "cached_tokens": Sum("cached_tokens", default=0),
        "cache_written_tokens": sum_cache_writes(),
        "output_tokens": Sum("output_tokens", default=0),
        "estimated_tokens": sum_estimated_tokens(),
        "spent": Sum("cost", default=Decimal(0)),
        "estimated": Sum("cost", filter=IS_ESTIMATED, default=Decimal(0)),
    }
