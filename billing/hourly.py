"""Spending within a calendar hour. Cost records have days only, so an hour is priced from usage records and model calls.

An hour counts sandbox time, CPU, memory, disk, GPUs and model calls at their full rates. Monthly allowances are not applied.
Storage, requests and plans, which have no hour, are not part of an hour."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any
from uuid import UUID

from django.db.models import Count, DateField, DurationField, ExpressionWrapper, F, Q, QuerySet, Sum, Value
from django.db.models.functions import Greatest, Least

from billing import pricing
from billing.call_measures import TOKENS, USD, CallMeasure, build_uncertainty, sum_estimated_tokens
from billing.costs import iter_sandbox_usage, split_by_rate
from billing.dates import to_utc_date
from billing.models import Rate, UsageKind, UsageRecord
from billing.money_sums import sum_exact
from billing.totals import BILLABLE_STATES
from billing.uncertainty import Uncertainty
from sandboxes.models import LlmCall

Holder = UUID | None  # lease id, None for sandboxes without a lease


def sum_hourly_usd(began: datetime, ends: datetime, parts: Collection[Q]) -> dict[Holder, Fraction]:
    """Sum the USD of each lease from `began` to `ends`, which are in one UTC day. `parts` are disjoint filters of usage."""
    sums: dict[Holder, Fraction] = defaultdict(Fraction)
    for each in (sum_hourly_sandbox_usd(began, ends, parts), sum_hourly_calls(began, ends, parts, USD)):
        for holder, usd in each.items():
            sums[holder] += usd
    return dict(sums)


def sum_hourly_sandbox_usd(began: datetime, ends: datetime, parts: Collection[Q]) -> dict[Holder, Fraction]:
    """Like sum_hourly_usd, without model calls."""
    day, rates = to_utc_date(began), [*Rate.objects.all()]
    rates_by_id = {rate.pk: rate for rate in rates}
    sums: dict[Holder, Fraction] = defaultdict(Fraction)
    for part in parts:
        for begin, end in split_by_rate(began, ends, rates):
            for (_, _, holder, _), quantities in iter_sandbox_usage(day, begin, end, rates, part):
                for (item, rate), base_units in quantities:
                    sums[holder] += pricing.compute_cost(item, base_units, rates_by_id[rate].usd)
    return dict(sums)


def sum_hourly_calls(began: datetime, ends: datetime, parts: Collection[Q], measure: CallMeasure) -> dict[Holder, Fraction]:
    """Like sum_hourly_usd, of model calls alone and by any measure. Open calls count with their reservation."""
    sums: dict[Holder, Fraction] = defaultdict(Fraction)
    for part in parts:
        calls = _find_calls(began, ends, part, measure).filter(owed__lt=measure.limit)
        for holder, amount in calls.values_list("holder").annotate(sum=sum_exact("owed", parts=measure.parts)):
            sums[holder] += Fraction(int(amount), measure.parts)
    return dict(sums)


def sum_hourly_uncertainty(began: datetime, ends: datetime, parts: Collection[Q], measure: CallMeasure) -> Uncertainty:
    """Sum the estimated part of `sum_hourly_calls`, reservations included, and count the ended calls without a price."""
    is_counted, has_ended = Q(owed__lt=measure.limit), ~Q(outcome=LlmCall.Outcome.OPEN)
    is_estimated = is_counted & (Q(priced=LlmCall.Priced.ESTIMATE) | Q(cost__isnull=True))
    unpriced, estimated = 0, 0
    for part in parts:
        sums = _find_calls(began, ends, part, measure).aggregate(
            unpriced=Count("pk", filter=has_ended & (Q(owed__isnull=True) | Q(owed__gte=measure.limit))),
            estimated=sum_estimated_tokens("owed", is_counted) if measure is TOKENS else sum_exact("owed", is_estimated),
        )
        unpriced, estimated = unpriced + sums["unpriced"], estimated + sums["estimated"]
    return build_uncertainty(measure, unpriced, estimated)


def _find_calls(began: datetime, ends: datetime, part: Q, measure: CallMeasure) -> QuerySet[Any]:
    day = Value(to_utc_date(began), output_field=DateField())
    calls = LlmCall.objects.annotate(day=day, owed=measure.build_owed()).filter(
        part, kind=LlmCall.Kind.LLM, started_at__gte=began, started_at__lt=ends
    )
    return calls.exclude(outcome=LlmCall.Outcome.REFUSED).order_by()


def sum_hourly_time(began: datetime, ends: datetime, parts: Iterable[Q]) -> dict[Holder, timedelta]:
    """Sum the billable sandbox time of each lease from `began` to `ends`, which are in one UTC day."""
    sums: dict[Holder, timedelta] = defaultdict(timedelta)
    within = Least(F("ended_at"), Value(ends)) - Greatest(F("began_at"), Value(began))
    duration = Sum(ExpressionWrapper(within, DurationField()))
    for part in parts:
        rows = UsageRecord.objects.filter(
            part, day=to_utc_date(began), item=UsageKind.TIME, state__in=BILLABLE_STATES, began_at__lt=ends, ended_at__gt=began
        )
        for holder, total in rows.order_by().values_list("holder").annotate(total=duration):
            sums[holder] += total
    return dict(sums)
