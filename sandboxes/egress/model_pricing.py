"""Prices for calls that nobody else puts a price on: tokens times a rate."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from itertools import islice
from typing import Protocol

from django.conf import settings
from django.db.models import Max, Q, QuerySet

from sandboxes.egress.amounts import parse_usd
from sandboxes.models import LlmCall, ModelRate

MILLION = 1_000_000
MAX_MODELS_PER_QUERY = 100  # in one query
RECORD_WAIT = timedelta(minutes=1)  # for a record, where there are records


class Rate(Protocol):
    """USD per million tokens of the models that a pattern names, from a moment on."""

    pattern: str
    input_usd: Decimal
    cached_usd: Decimal | None
    output_usd: Decimal
    valid_from: datetime


def calculate_price(rates: Iterable[Rate], model: str, input: int, cached: int, output: int, at: datetime) -> Decimal | None:
    """USD for one call at a moment, to nine places; None if no rate was valid for its model then.

    `input` counts all tokens that went in, and `cached` those of them that were read from the provider's cache; writing to that
    counts as input, which is a fifth too little where a provider charges a quarter more for it. Of the rates
    that name the model the exact name counts before a pattern, a longer pattern before a shorter one, of one name the newest.

    At 2.50 for input, 1.25 cached and 10.00 for output, 1000 tokens in, 400 of them cached, and 50 out are
    (600 x 2.50 + 400 x 1.25 + 50 x 10.00) / 1,000,000 = 0.002500000 USD."""
    rate = find_rate(rates, model, at)
    if rate is None:
        return None
    cached = min(cached, input)
    cached_usd = rate.input_usd if rate.cached_usd is None else rate.cached_usd
    return parse_usd(((input - cached) * rate.input_usd + cached * cached_usd + output * rate.output_usd) / MILLION)


def find_rate(rates: Iterable[Rate], model: str, at: datetime) -> Rate | None:
    """The rate that counts for a model at a moment."""
    valid = [rate for rate in rates if is_rate_for_model(rate, model) and rate.valid_from <= at]
    return max(valid, key=lambda rate: (rate.pattern == model, len(rate.pattern), rate.pattern, rate.valid_from), default=None)


def is_rate_for_model(rate: Rate, model: str) -> bool:
    return rate.pattern == model or fnmatchcase(model, rate.pattern)


def price_calls(now: datetime, limit: int = 1000) -> int:
    """Price by rate what ended and has no price; how many. A price that is there stays, and a record that comes later counts
    more. Of a call that was cut off or failed what is known is counted: a lower bound."""
    rates = [*ModelRate.objects.filter(valid_from__lte=now)]
    priced = 0
    for row in find_priceable(rates, now=now)[:limit]:
        cost = calculate_price(
            rates, row.model, row.input_tokens or 0, row.cached_tokens or 0, row.output_tokens or 0, row.started_at
        )
        if cost is not None:
            priced += find_unpriced().filter(pk=row.pk).update(cost=cost, priced=LlmCall.Priced.RATE, counted=False)
    return priced


def find_unpriced() -> QuerySet[LlmCall]:
    return LlmCall.objects.filter(cost__isnull=True, ended_at__isnull=False, priced=LlmCall.Priced.NO)


def find_priceable(rates: list[ModelRate], *, now: datetime) -> QuerySet[LlmCall]:
    """Calls without a price that these rates give one."""
    whole = Q(outcome=LlmCall.Outcome.OK, input_tokens__isnull=False, output_tokens__isnull=False)
    partly = Q(outcome__in=[LlmCall.Outcome.CUT, LlmCall.Outcome.FAILED, LlmCall.Outcome.LOST]) & (
        Q(input_tokens__isnull=False) | Q(output_tokens__isnull=False)
    )
    wait = RECORD_WAIT if settings.LLM_RECORDS else timedelta(0)
    ready = find_unpriced().filter(whole | partly, kind=LlmCall.Kind.LLM, ended_at__lte=now - wait)
    # Only models of which some call gets a price: a program can ask for any number of others, and they stay.
    models = ready.order_by().values_list("model").annotate(newest=Max("started_at"))
    since = {
        model: min(valid)
        for model, newest in models
        if (valid := [rate.valid_from for rate in rates if is_rate_for_model(rate, model) and rate.valid_from <= newest])
    }
    named = Q(pk__in=[])
    for model, valid_from in islice(since.items(), MAX_MODELS_PER_QUERY):
        named |= Q(model=model, started_at__gte=valid_from)
    return ready.filter(named).order_by("pk")
