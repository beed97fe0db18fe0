"""Token and cost totals of model calls. The console's lists use the same filters as the totals that link to them."""

from dataclasses import dataclass
from decimal import Decimal

from django.db.models import Count, Q, QuerySet, Sum

from sandboxes.models import LlmCall

Outcome = LlmCall.Outcome
IS_MODEL_CALL = Q(kind=LlmCall.Kind.LLM)
IS_REFUSED = Q(outcome=Outcome.REFUSED)
IS_FAILED = Q(outcome__in=[Outcome.FAILED, Outcome.CUT, Outcome.LOST])
# Refused calls were never sent, and relay connections are free.
IS_UNPRICED = IS_MODEL_CALL & Q(cost__isnull=True, outcome__in=[Outcome.OK, Outcome.FAILED, Outcome.CUT, Outcome.LOST])


@dataclass(frozen=True)
class CallTotals:
    """Counts, tokens and cost of a set of model calls. Tokens not reported by the upstream count as zero."""

    calls: int
    failed: int
    refused: int
    unpriced: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    spent: Decimal  # USD; excludes unpriced calls


def calculate_totals(calls: QuerySet[LlmCall]) -> CallTotals:
    """Aggregate the model calls of a queryset, in one query."""
    totals = calls.filter(IS_MODEL_CALL).aggregate(
        calls=Count("pk"),
        failed=Count("pk", filter=IS_FAILED),
        refused=Count("pk", filter=IS_REFUSED),
        unpriced=Count("pk", filter=IS_UNPRICED),
        input_tokens=Sum("input_tokens", default=0),
        cached_tokens=Sum("cached_tokens", default=0),
        output_tokens=Sum("output_tokens", default=0),
        spent=Sum("cost", default=Decimal(0)),
    )
    return CallTotals(**totals)
