"""Pricing again of model calls that have a price, after a rate was corrected or added with an earlier start.

Each call gets the price of its usage by the rates that were valid at its start, as they are stored now. Selected are

1. calls priced by rate, and estimates that lack the price of one kind,
2. estimates whose usage became known later, such as by a record without a price,
3. calls whose price was out of range: the rate may have been wrong,
4. with `stated`, answered calls with a cost that the upstream or its record states.

An estimate without usage stays: the numbers of tokens that it was calculated from are not stored. A call whose model has no
rate, or whose new price is out of range, keeps its price.

A changed call is not counted any more, so that metering replaces its part of the usage. `metered_cost` stays, because it is the
part of the cost that a usage record includes until then."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from itertools import islice

import structlog
from django.db import transaction
from django.db.models import Q, QuerySet

from sandboxes.claims import note_progress
from sandboxes.egress.amounts import REFUSED_PRICE_CODE
from sandboxes.egress.model_pricing import (
    BATCH_SIZE,
    MAX_MODELS_PER_QUERY,
    RateTable,
    find_candidate_names,
    get_counts,
    is_match,
)
from sandboxes.models import LlmCall

log = structlog.get_logger(__name__)
Priced = LlmCall.Priced
CHANGED_COLUMNS = ["cost", "priced", "rate_ids", "code", "counted"]
ZERO_USD = Decimal(0)


@dataclass
class RepricedModel:
    """Totals of the selected calls of one model, in USD. An unpriced call counts 0."""

    calls: int = 0
    changed: int = 0
    without_rate: int = 0  # keep their price, as no rate prices their usage, or the new price is out of range
    old: Decimal = ZERO_USD
    new: Decimal = ZERO_USD


@dataclass
class Repricing:
    """Result by model: the name in the response, otherwise in the request."""

    models: dict[str, RepricedModel] = field(default_factory=dict)
    estimates: int = 0  # calls whose usage is unknown, which keep their price

    @property
    def total(self) -> RepricedModel:
        models = self.models.values()
        return RepricedModel(
            sum(each.calls for each in models), sum(each.changed for each in models), sum(each.without_rate for each in models),
            sum((each.old for each in models), ZERO_USD), sum((each.new for each in models), ZERO_USD),
        )  # fmt: skip


def reprice_calls(
    since: datetime, *, now: datetime, model: str | None = None, stated: bool = False, apply: bool = False
) -> Repricing:
    """Price the calls that started from `since` to `now` again. Without `apply` return the totals and change nothing.

    `model` is a name or a pattern: only calls one of whose names it matches. Each batch is one transaction that locks its
    calls, and then reads the rates: it must not undo a concurrent call that knows of a newer rate. The price does not depend on
    the one before: the function may be interrupted, repeated and run concurrently."""
    result = Repricing()
    for calls, estimates, names in _iter_selected(since, now, model, stated):
        result.estimates += estimates.count()
        for batch in _iter_batches(calls):
            _reprice_batch(calls.filter(pk__in=batch), names, result.models, now=now, apply=apply)
            note_progress()
    if apply:
        total = result.total
        log.info("model calls priced again", calls=total.calls, changed=total.changed, old=str(total.old), new=str(total.new))
    return result


def _iter_selected(
    since: datetime, now: datetime, model: str | None, stated: bool
) -> Iterator[tuple[QuerySet[LlmCall], QuerySet[LlmCall], set[str]]]:
    """Yield selected calls, the estimates that stay, and names in rates, for up to MAX_MODELS_PER_QUERY models at a time."""
    ended = LlmCall.objects.filter(
        kind=LlmCall.Kind.LLM, started_at__gte=since, started_at__lte=now, ended_at__isnull=False
    ).defer("usage")
    complete = Q(outcome=LlmCall.Outcome.OK, input_tokens__isnull=False, output_tokens__isnull=False)
    selected = (
        Q(priced=Priced.RATE)
        | Q(priced=Priced.ESTIMATE, rate_ids__isnull=False)
        | (Q(priced=Priced.ESTIMATE) & complete)
        | Q(priced=Priced.NO, code=REFUSED_PRICE_CODE)
    )
    if stated:
        selected |= Q(priced__in=[Priced.UPSTREAM, Priced.RECORD]) & complete
    estimates = ended.filter(priced=Priced.ESTIMATE, rate_ids__isnull=True).exclude(complete)
    candidates = ended.filter(selected | Q(priced=Priced.ESTIMATE))
    pairs = iter(candidates.order_by("model", "requested_model").values_list("model", "requested_model").distinct())
    while chunk := [*islice(pairs, MAX_MODELS_PER_QUERY)]:
        names = {pair: find_candidate_names(*pair) for pair in chunk}
        matching = Q(pk__in=[])
        for pair, candidate_names in names.items():
            if model is None or any(is_match(model, name) for name in candidate_names):
                matching |= Q(model=pair[0], requested_model=pair[1])
        if matching != Q(pk__in=[]):
            yield (
                ended.filter(selected & matching),
                estimates.filter(matching),
                {name for each in names.values() for name in each},
            )


def _iter_batches(calls: QuerySet[LlmCall]) -> Iterator[list[int]]:
    """Yield the keys of the calls in the order of their start, which an index has."""
    after = Q()
    while batch := [*calls.filter(after).order_by("started_at", "pk").values_list("started_at", "pk")[:BATCH_SIZE]]:
        yield [pk for _, pk in batch]
        start, last = batch[-1]
        after = Q(started_at__gte=start) & (Q(started_at__gt=start) | Q(pk__gt=last))


def _reprice_batch(
    calls: QuerySet[LlmCall], names: set[str], totals: dict[str, RepricedModel], *, now: datetime, apply: bool
) -> None:
    """Price a batch again. The locked rows are read anew: a record may have replaced a price since the batch was selected."""
    found: dict[str, RepricedModel] = {}
    with transaction.atomic():
        rows = [*(calls.select_for_update(of=("self",)) if apply else calls).order_by("pk")]
        table = RateTable.load(names, until=now)
        changed = [
            row for row in rows if _reprice(row, table, found.setdefault(row.model or row.requested_model, RepricedModel()))
        ]
        if apply:
            LlmCall.objects.bulk_update(changed, CHANGED_COLUMNS)
    for name, part in found.items():  # after the commit
        total = totals.setdefault(name, RepricedModel())
        total.calls, total.changed = total.calls + part.calls, total.changed + part.changed
        total.without_rate += part.without_rate
        total.old, total.new = total.old + part.old, total.new + part.new


def _reprice(call: LlmCall, table: RateTable, total: RepricedModel) -> bool:
    """Set the new price of a call, and add the call to the total of its model. Return whether the call changed."""
    book = table.get_book(find_candidate_names(call.model, call.requested_model), call.started_at)
    price = book.price(get_counts(call), call.service_tier)
    old = call.cost or ZERO_USD
    total.calls, total.old = total.calls + 1, total.old + old
    if price is None or price.is_unknown:
        total.without_rate, total.new = total.without_rate + 1, total.new + old
        return False
    before = (call.cost, call.priced, call.rate_ids or [])
    is_partial = call.priced == Priced.ESTIMATE and call.outcome != LlmCall.Outcome.OK  # only some of its tokens are known
    call.cost, call.rate_ids, call.priced = price.usd, list(price.rates), Priced.ESTIMATE if is_partial else price.source
    total.new += price.usd
    if before == (call.cost, call.priced, call.rate_ids):
        return False
    if call.code == REFUSED_PRICE_CODE:
        call.code = ""
    call.counted = False
    total.changed += 1
    return True
