"""Pricing of model calls by token rates, for calls whose upstream reports no cost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from itertools import islice
from typing import Protocol

import structlog
from django.conf import settings
from django.db.models import Max, Q, QuerySet

from sandboxes.egress.amounts import MAX_TOKENS, REFUSED_PRICE_CODE, parse_usd
from sandboxes.models import LlmCall, ModelRate

log = structlog.get_logger(__name__)
MILLION = 1_000_000
MAX_MODELS_PER_QUERY = 100
RECORD_WAIT = timedelta(minutes=1)  # time for an upstream record to arrive before a rate is applied


class Rate(Protocol):
    """USD per million tokens for the models matching `pattern`, from `valid_from` on."""

    pattern: str
    input_usd: Decimal
    cached_usd: Decimal | None
    output_usd: Decimal
    valid_from: datetime


def calculate_price(rates: Iterable[Rate], model: str, input: int, cached: int, output: int, at: datetime) -> Decimal | None:
    """Return the price of one call in USD, rounded to nine decimal places.

    Return None if no rate for the model was valid at `at` (`find_rate`), or if the tokens or the price are out of range.
    `input` counts all input tokens; `cached` counts the input tokens read from the provider's cache. Tokens written to the
    cache are priced as input, which is a fifth too low where a provider charges 25 % more for cache writes.

    Example: at 2.50 for input, 1.25 for cached input and 10.00 for output, 1000 input tokens, 400 of them cached, and 50 output
    tokens cost (600 x 2.50 + 400 x 1.25 + 50 x 10.00) / 1,000,000 = 0.002500000 USD."""
    rate = find_rate(rates, model, at)
    if rate is None or max(input, cached, output) > MAX_TOKENS:
        return None
    cached = min(cached, input)
    cached_usd = rate.input_usd if rate.cached_usd is None else rate.cached_usd
    return parse_usd(((input - cached) * rate.input_usd + cached * cached_usd + output * rate.output_usd) / MILLION)


def find_rate(rates: Iterable[Rate], model: str, at: datetime) -> Rate | None:
    """Return the rate for a model at a time.

    An exact name precedes a pattern, a longer pattern a shorter one, and a newer rate an older one."""
    valid = [rate for rate in rates if is_rate_for_model(rate, model) and rate.valid_from <= at]
    return max(valid, key=lambda rate: (rate.pattern == model, len(rate.pattern), rate.pattern, rate.valid_from), default=None)


def is_rate_for_model(rate: Rate, model: str) -> bool:
    return rate.pattern == model or fnmatchcase(model, rate.pattern)


@dataclass(frozen=True)
class Price:
    usd: Decimal
    rates: tuple[int, ...]
    complete: bool


@dataclass(frozen=True)
class RateBook:
    names: list[str]
    rates: list[ModelRate]
    at: datetime

    def _find(self) -> ModelRate | None:
        for name in self.names:
            if rate := find_rate(self.rates, name, self.at):
                return rate  # type: ignore[return-value]
        return None

    def price(self, counts: Mapping[str, int], tier: str = "") -> Price | None:
        rate = self._find()
        if rate is None:
            return None
        cached = counts.get("cache_read", 0)
        usd = calculate_price([rate], rate.pattern, counts.get("input", 0) + cached, cached, counts.get("output", 0), self.at)
        return None if usd is None else Price(usd, (rate.pk,), True)

    def estimate(self, input_tokens: int, output_tokens: int, tier: str = "") -> Decimal | None:
        rate = self._find()
        return calculate_price([rate], rate.pattern, input_tokens, 0, output_tokens, self.at) if rate else None


def find_candidate_names(*models: str) -> list[str]:
    return [name for name in dict.fromkeys(models) if name]


def load_rates(names: Iterable[str], *, at: datetime) -> RateBook:
    return RateBook([*names], [*ModelRate.objects.filter(valid_from__lte=at)], at)


def price_calls(now: datetime, limit: int = 1000) -> int:
    """Price up to `limit` ended calls without a price by their model's rate. Return the number priced.

    Existing prices are not changed, and a later upstream record replaces the price. The price of an interrupted or failed call
    is a lower bound, because it covers only the reported tokens. A call whose price or tokens are out of range gets the code
    `price_refused` and is not selected again: many such calls would use up the `limit` of each pass."""
    rates = [*ModelRate.objects.filter(valid_from__lte=now)]
    priced = 0
    for row in find_priceable(rates, now=now)[:limit]:
        cost = calculate_price(
            rates, row.model, row.input_tokens or 0, row.cached_tokens or 0, row.output_tokens or 0, row.started_at
        )
        if cost is None:
            log.error("price by rate is out of range", call=row.call_id, model=row.model)
            find_unpriced().filter(pk=row.pk).update(code=REFUSED_PRICE_CODE, counted=False)
        else:
            priced += find_unpriced().filter(pk=row.pk).update(cost=cost, priced=LlmCall.Priced.RATE, counted=False)
    return priced


def find_unpriced() -> QuerySet[LlmCall]:
    return LlmCall.objects.filter(cost__isnull=True, ended_at__isnull=False, priced=LlmCall.Priced.NO)


def find_priceable(rates: list[ModelRate], *, now: datetime) -> QuerySet[LlmCall]:
    """Return unpriced calls to which one of `rates` applies."""
    complete = Q(outcome=LlmCall.Outcome.OK, input_tokens__isnull=False, output_tokens__isnull=False)
    partial = Q(outcome__in=[LlmCall.Outcome.CUT, LlmCall.Outcome.FAILED, LlmCall.Outcome.LOST]) & (
        Q(input_tokens__isnull=False) | Q(output_tokens__isnull=False)
    )
    wait = RECORD_WAIT if settings.LLM_RECORDS else timedelta(0)
    ready = (
        find_unpriced()
        .exclude(code=REFUSED_PRICE_CODE)
        .filter(complete | partial, kind=LlmCall.Kind.LLM, ended_at__lte=now - wait)
    )
    # Only models with an applicable rate are listed in the condition: a sandbox can call any number of other model names.
    models = ready.order_by().values_list("model").annotate(newest=Max("started_at"))
    since = {
        model: min(valid)
        for model, newest in models
        if (valid := [rate.valid_from for rate in rates if is_rate_for_model(rate, model) and rate.valid_from <= newest])
    }
    matching = Q(pk__in=[])
    for model, valid_from in islice(since.items(), MAX_MODELS_PER_QUERY):
        matching |= Q(model=model, started_at__gte=valid_from)
    return ready.filter(matching).order_by("pk")
