"""Usage records of model calls, one for each lease, model and day."""

from datetime import date, timedelta
from uuid import UUID

from django.db.models import Count, Max, Min, Q, QuerySet, Sum

from billing.call_measures import TOKENS, sum_estimated_tokens
from billing.dates import start_of_day
from billing.models import UsageKind, UsageRecord
from billing.money_sums import limit_usd, nanos_to_decimal, sum_exact
from sandboxes.egress.amounts import MAX_TOKENS, MAX_USD, REFUSED_CODES
from sandboxes.egress.totals import sum_cache_writes
from sandboxes.models import LlmCall


def is_billable_call(call: LlmCall) -> bool:
    return call.kind == LlmCall.Kind.LLM and call.outcome != LlmCall.Outcome.REFUSED


def find_refused_calls() -> QuerySet[LlmCall]:
    """Find the calls not metered yet whose stated cost, tokens or price is out of range. They are metered as unpriced."""
    refused = Q(code__in=REFUSED_CODES) | Q(cost__gte=MAX_USD)
    for name in ("input", "cached", "output"):
        refused |= Q(**{f"{name}_tokens__gt": MAX_TOKENS})
    return LlmCall.objects.filter(refused, counted=False, ended_at__isnull=False).order_by("pk")


def build_tokens_record(holder: UUID | None, model: str, day: date) -> UsageRecord:
    """Sum the ended calls of a lease to a model on a day. There is at least one."""
    begin = start_of_day(day)
    llm_calls = LlmCall.objects.filter(
        holder=holder, model=model, kind=LlmCall.Kind.LLM, started_at__gte=begin, started_at__lt=begin + timedelta(days=1),
        ended_at__isnull=False,
    ).exclude(outcome=LlmCall.Outcome.REFUSED)  # fmt: skip
    # A stored amount out of range counts as unknown: it would overflow the sum and stop metering for every agent.
    tokens = {
        name: Sum(f"{name}_tokens", filter=Q(**{f"{name}_tokens__lte": MAX_TOKENS})) for name in ("input", "cached", "output")
    }
    is_estimated = Q(priced=LlmCall.Priced.ESTIMATE, cost__lt=MAX_USD)
    sums = llm_calls.annotate(owed=TOKENS.build_owed()).aggregate(
        began=Min("started_at"), ended=Max("ended_at"), calls=Count("pk"), usd=sum_exact("cost", Q(cost__lt=MAX_USD)),
        unpriced=Count("pk", filter=Q(cost__isnull=True) | Q(cost__gte=MAX_USD)),
        estimated=Count("pk", filter=is_estimated), estimated_usd=sum_exact("cost", is_estimated),
        cache_written=sum_cache_writes(), estimated_tokens=sum_estimated_tokens("owed", Q(owed__lt=TOKENS.limit)), **tokens,
    )  # fmt: skip
    first = llm_calls.order_by("pk").select_related("sandbox").first()
    sandbox = first.sandbox if first else None
    called = f"calls of {model}" if model else "calls without a model"  # the name is chosen by the calling program
    usd = limit_usd(nanos_to_decimal(sums["usd"]), agent=first.agent_did if first else "", day=str(day))
    return UsageRecord(
        item=UsageKind.TOKENS, source=f"{called} for {holder or 'no lease'}", day=day, began_at=sums["began"],
        ended_at=max(sums["began"], sums["ended"]), sandbox=sandbox, holder=holder,
        agent_did=first.agent_did if first else "", environment_id=first.environment_id if first else "",
        provider=sandbox.provider if sandbox else "", model=model, calls=sums["calls"], unpriced=sums["unpriced"],
        input_tokens=sums["input"] or 0, cached_tokens=sums["cached"] or 0,
        cache_written_tokens=int(sums["cache_written"]), output_tokens=sums["output"] or 0,
        usd=usd, estimated=sums["estimated"], estimated_usd=min(nanos_to_decimal(sums["estimated_usd"]), usd),
        estimated_tokens=sums["estimated_tokens"],
    )  # fmt: skip
