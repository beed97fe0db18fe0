"""Pricing of model calls by rates: amount = sum over the kinds of tokens of count x USD per million.

Names. A rate states a model's name or a pattern. The names of a call are, in this order: the name in the response and the name
in the request; both without everything up to the last "/"; all of these without the region and vendor of Bedrock; all of these
without a version suffix; all of these without a date. The rates of one pattern price all kinds of a call:

1. the rates of the first name that has rates of exactly that name,
2. otherwise those of the longest pattern that matches the first name that any pattern matches,
3. otherwise those of `*`, which matches every name and would hide patterns that match a later one.

Rows. Of a kind's rows the call's service tier precedes the empty tier, then the largest `tokens_from` that the call's input
tokens of all kinds reach, then the latest start, and of rows with the same start the newest. A kind without a row costs as its
next kind in FALLBACKS."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, ROUND_UP, Decimal
from fnmatch import fnmatchcase
from itertools import islice

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Count, Max, Q, QuerySet

from sandboxes.claims import note_progress
from sandboxes.db import dialect, sql
from sandboxes.egress.amounts import MAX_TOKENS, MAX_USD, NANO_USD, REFUSED_PRICE_CODE
from sandboxes.models import LlmCall, TokenKind, TokenRate

log = structlog.get_logger(__name__)
RATES = TokenRate._meta.db_table
MILLION = 1_000_000
MAX_NAME_LENGTH = 200  # of the column
MAX_MODELS_PER_QUERY = 100
MAX_CALLS_EXAMINED = 100_000  # of the last days, for the models of a pattern
BATCH_SIZE = 500  # calls priced in one transaction
RECORD_WAIT = timedelta(minutes=1)  # time for an upstream record to arrive before a rate is applied
ANY_MODEL = "*"

# "us.anthropic." of Bedrock: parts without digits, so that "gpt-4.1" and "claude-v2.1" keep theirs.
VENDOR_PARTS = re.compile(r"^(?:(?:[a-z-]+|ai21)\.)+(?=[a-zA-Z])")
VERSION_SUFFIX = re.compile(r"(?:-v\d+)?:\d+$")
DATE_SUFFIX = re.compile(r"[-@](?:20\d\d-[01]\d-[0-3]\d|20\d\d[01]\d[0-3]\d)$")

INPUT_KINDS = (
    TokenKind.INPUT, TokenKind.CACHE_READ, TokenKind.CACHE_WRITE_5M, TokenKind.CACHE_WRITE_1H, TokenKind.AUDIO_INPUT,
    TokenKind.IMAGE_INPUT,
)  # fmt: skip
OUTPUT_KINDS = (TokenKind.OUTPUT, TokenKind.REASONING, TokenKind.AUDIO_OUTPUT, TokenKind.IMAGE_OUTPUT)
KIND_ORDER = {kind: position for position, kind in enumerate(TokenKind.values)}
FALLBACKS: Mapping[str, str] = {
    TokenKind.CACHE_READ: TokenKind.INPUT,
    TokenKind.CACHE_WRITE_1H: TokenKind.CACHE_WRITE_5M,
    TokenKind.CACHE_WRITE_5M: TokenKind.INPUT,
    TokenKind.AUDIO_INPUT: TokenKind.INPUT,
    TokenKind.IMAGE_INPUT: TokenKind.INPUT,
    TokenKind.REASONING: TokenKind.OUTPUT,
    TokenKind.AUDIO_OUTPUT: TokenKind.OUTPUT,
    TokenKind.IMAGE_OUTPUT: TokenKind.OUTPUT,
}


@dataclass(frozen=True)
class PriceLine:
    """One kind of a price: a count, the row that prices it, and the unrounded amount. Without a row nothing is counted."""

    kind: str
    count: int
    rate: TokenRate | None
    usd: Decimal


@dataclass(frozen=True)
class Price:
    """Amount of one call, rounded half up to nine decimal places, and the ids of the rows that it was calculated from."""

    usd: Decimal
    rates: tuple[int, ...]
    complete: bool  # each kind has a row, or one of a kind that it falls back to; else the amount is a lower bound

    @property
    def is_unknown(self) -> bool:
        """None of the kinds has a row. The price of no tokens at all is known: 0."""
        return not self.rates and not self.complete

    @property
    def source(self) -> LlmCall.Priced:
        return LlmCall.Priced.RATE if self.complete else LlmCall.Priced.ESTIMATE


class RateBook:
    """Rows that price one call: those of one pattern that have begun."""

    def __init__(self, rows: Iterable[TokenRate]) -> None:
        self.rows = tuple(rows)
        self._by_kind: dict[str, list[TokenRate]] = {}
        for row in self.rows:
            self._by_kind.setdefault(row.kind, []).append(row)

    @property
    def pattern(self) -> str | None:
        return self.rows[0].pattern if self.rows else None

    def list_current(self) -> list[TokenRate]:
        """Return the rows that can price a call: of each kind, size and tier the row with the latest start, and the newest."""
        rows = sorted(self.rows, key=lambda row: (row.valid_from, row.pk))
        latest = {(row.kind, row.tier, row.tokens_from): row for row in rows}
        return sorted(latest.values(), key=lambda row: (KIND_ORDER.get(row.kind, len(KIND_ORDER)), row.tier, row.tokens_from))

    def price(self, counts: Mapping[str, int], tier: str = "") -> Price | None:
        """Price the counts by kind. Return None without a rate, and if a count or the amount is out of range.

        Example: at 3 for input, 0.30 for cached input, 3.75 for cache writes and 15 for output, 1,000 input tokens, 20,000 read
        from the cache, 8,000 written to it and 500 output tokens cost 0.003 + 0.006 + 0.03 + 0.0075 = 0.0465 USD."""
        lines = self.list_lines(counts, tier)
        usd = sum((line.usd for line in lines), Decimal(0)).quantize(NANO_USD, ROUND_HALF_UP)
        if not self.rows or usd >= MAX_USD or any(line.count > MAX_TOKENS for line in lines):
            return None
        rates = dict.fromkeys(line.rate.pk for line in lines if line.rate)
        return Price(usd, tuple(rates), complete=all(line.rate for line in lines))

    def list_lines(self, counts: Mapping[str, int], tier: str = "") -> list[PriceLine]:
        """Return the amount of each kind, in the order of TokenKind."""
        size = sum(counts.get(kind, 0) for kind in INPUT_KINDS)
        lines = []
        for kind in sorted(counts, key=lambda kind: KIND_ORDER.get(kind, len(KIND_ORDER))):
            if count := counts[kind]:
                row = self._find_row(kind, tier, size)
                lines.append(PriceLine(kind, count, row, count * row.usd_per_million / MILLION if row else Decimal(0)))
        return lines

    def estimate(
        self, input_tokens: int, output_tokens: int, tier: str = "", known: Mapping[str, int] | None = None
    ) -> Decimal | None:
        """Return an upper price of a call of this size, rounded up: each token costs as the dearest kind with a row.

        `known` are the reported counts of a call whose input was reported: its input costs as each kind does, and its searches
        are included. Otherwise they are not, because their number is known only afterwards.
        At most the largest price of a call: a larger one would be out of range, and count nothing.
        Return None without a row for input. Without one for output, as for embeddings, output counts nothing."""
        by_side = [
            [row.usd_per_million for kind in kinds if (row := self._find_own_row(kind, tier, input_tokens))]
            for kinds in (INPUT_KINDS, OUTPUT_KINDS)
        ]
        if not by_side[0]:
            return None
        usd = self._price_input(known or {}, tier)
        if usd is None:
            usd = input_tokens * max(by_side[0]) / MILLION
        usd += output_tokens * max(by_side[1], default=Decimal(0)) / MILLION
        return min(usd.quantize(NANO_USD, ROUND_UP), MAX_USD - NANO_USD)

    def _price_input(self, counts: Mapping[str, int], tier: str) -> Decimal | None:
        """Return the price of the reported input and searches. None without input, and if a kind of the input has no row."""
        lines = self.list_lines({kind: count for kind, count in counts.items() if kind not in OUTPUT_KINDS}, tier)
        of_input = [line for line in lines if line.kind in INPUT_KINDS]
        return sum((line.usd for line in lines), Decimal(0)) if of_input and all(line.rate for line in of_input) else None

    def _find_row(self, kind: str, tier: str, size: int) -> TokenRate | None:
        chain: str | None = kind
        while chain is not None:
            if row := self._find_own_row(chain, tier, size):
                return row
            chain = FALLBACKS.get(chain)
        return None

    def _find_own_row(self, kind: str, tier: str, size: int) -> TokenRate | None:
        rows = [row for row in self._by_kind.get(kind, ()) if row.tier in (tier, "") and row.tokens_from <= size]
        return max(rows, key=lambda row: (row.tier == tier, row.tokens_from, row.valid_from, row.pk), default=None)


class RateTable:
    """Rows for any number of calls and times."""

    def __init__(self, rows: Iterable[TokenRate]) -> None:
        self._by_pattern: dict[str, list[TokenRate]] = {}
        for row in rows:
            self._by_pattern.setdefault(row.pattern, []).append(row)

    @classmethod
    def load(cls, names: Collection[str], *, until: datetime) -> "RateTable":
        """Load the rows that match one of the names and have begun at `until`.

        Two statements, because a price list has hundreds of rows, of which a few match."""
        patterns = [name for [name] in sql.fetch_all(f"SELECT DISTINCT pattern FROM {RATES} WHERE is_pattern")]  # noqa: S608
        matching = [pattern for pattern in patterns if any(is_match(pattern, name) for name in names)]
        where = f"{dialect.in_list('pattern', '%s')} AND valid_from <= %s ORDER BY id"
        return cls(sql.find_all(TokenRate, where, dialect.adapt_list([*names, *matching]), until))

    def get_book(self, names: Collection[str], at: datetime) -> RateBook:
        """Return the rows that price a call with these names that started at `at`. Without a rate the book is empty."""
        begun = {
            pattern: valid
            for pattern, rows in self._by_pattern.items()
            if (valid := [row for row in rows if row.valid_from <= at])
        }
        pattern = select_pattern(begun, names)
        return RateBook(begun[pattern] if pattern is not None else ())

    def find_start(self, names: Collection[str]) -> datetime | None:
        """Return the earliest start of the rows that can match one of the names."""
        starts = [
            row.valid_from
            for pattern, rows in self._by_pattern.items()
            if any(is_match(pattern, name) for name in names)
            for row in rows
        ]
        return min(starts, default=None)


def load_rates(names: Collection[str], *, at: datetime) -> RateBook:
    """Return the rows that price a call with these names that starts at `at`."""
    return RateTable.load(names, until=at).get_book(names, at)


def find_candidate_names(*models: str) -> list[str]:
    """Return the names under which a call may have a rate, the most specific first: see the module's rule.

    `models` are the names in the response and in the request. `openai/gpt-4o-2024-08-06` has the names
    `openai/gpt-4o-2024-08-06`, `gpt-4o-2024-08-06`, `openai/gpt-4o`, `gpt-4o`."""
    names = [model[:MAX_NAME_LENGTH] for model in models if model and "\0" not in model]  # PostgreSQL rejects NUL in text
    names += [name.rpartition("/")[2] for name in names]
    names += [VENDOR_PARTS.sub("", name, count=1) for name in names]
    names += [VERSION_SUFFIX.sub("", name) for name in names]
    names += [DATE_SUFFIX.sub("", name) for name in names]
    return list(dict.fromkeys(filter(None, names)))


def is_match(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)


def select_pattern(patterns: Collection[str], names: Collection[str]) -> str | None:
    """Return the pattern whose rates price a call with these names, by the module's rule."""
    for name in names:
        if name in patterns:
            return name
    for name in names:
        if matching := [pattern for pattern in patterns if pattern != ANY_MODEL and fnmatchcase(name, pattern)]:
            return max(matching, key=lambda pattern: (len(pattern), pattern))
    return ANY_MODEL if names and ANY_MODEL in patterns else None


def get_counts(call: LlmCall) -> dict[str, int]:
    """Return the tokens of a call by kind. Those of a call without such counts follow from its columns."""
    if call.token_counts:
        return dict(call.token_counts)
    return derive_counts(call.input_tokens or 0, call.cached_tokens or 0, call.output_tokens or 0)


def derive_counts(input_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Return counts by kind. `input_tokens` are all input tokens, `cached_tokens` those of them that were read from a cache."""
    cached = min(cached_tokens, input_tokens)
    counts = {TokenKind.INPUT: input_tokens - cached, TokenKind.CACHE_READ: cached, TokenKind.OUTPUT: output_tokens}
    return {kind.value: count for kind, count in counts.items() if count}


def price_calls(now: datetime) -> int:
    """Price all ended calls without a price whose model has a rate. Return the number priced.

    Calls are priced when they are settled. This repairs those whose rate was added later, or whose process died. Existing
    prices are not changed, and a later upstream record replaces the price. The price of an interrupted or failed call is a
    lower bound, because it covers only the reported tokens; so is that of a call with a kind that has no row, which counts as
    an estimate. A call whose price or tokens are out of range gets the code `price_refused` and is not selected again."""
    return sum(sum(_price_in_batches(calls, table)) for calls, table in _iter_priceable(now))


def find_priceable(now: datetime) -> Iterator[LlmCall]:
    """Yield the calls that price_calls would price now."""
    for calls, _ in _iter_priceable(now):
        yield from calls.iterator(chunk_size=BATCH_SIZE)


def count_priceable(pattern: str, now: datetime, limit: int) -> int:
    """Return the number of calls, up to `limit`, that price_calls would price now by the rates of a pattern."""
    found = (
        call
        for calls, table in _iter_priceable(now)
        for call in calls.iterator(chunk_size=BATCH_SIZE)
        if table.get_book(find_candidate_names(call.model, call.requested_model), call.started_at).pattern == pattern
    )
    return sum(1 for _ in islice(found, limit))


def find_matched_models(pattern: str, *, since: datetime, now: datetime) -> Counter[str]:
    """Return the models whose calls since a time the rates of a pattern price as of now, with the number of calls.

    The model is the name in the response, otherwise in the request. Only the newest MAX_CALLS_EXAMINED calls are examined."""
    calls = LlmCall.objects.filter(kind=LlmCall.Kind.LLM, started_at__gte=since).exclude(outcome=LlmCall.Outcome.REFUSED)
    newest = calls.order_by("-started_at", "-pk").values("pk")[:MAX_CALLS_EXAMINED]
    models = LlmCall.objects.filter(pk__in=newest).order_by().values_list("model", "requested_model")
    found, groups = Counter[str](), iter(models.annotate(calls=Count("pk")))
    while chunk := [*islice(groups, MAX_MODELS_PER_QUERY)]:
        names = [find_candidate_names(model, requested) for model, requested, _ in chunk]
        table = RateTable.load({name for candidates in names for name in candidates}, until=now)
        for (model, requested, number), candidates in zip(chunk, names, strict=True):
            if table.get_book(candidates, now).pattern == pattern:
                found[model or requested] += number
    return found


def _price_in_batches(calls: QuerySet[LlmCall], table: RateTable) -> Iterator[int]:
    """Price the calls, each batch in a transaction of its own. Yield the number priced in each batch."""
    last: int | None = 0
    while last is not None:
        with transaction.atomic():
            # Locked rows are being changed by a settlement or a record. Those that stay unpriced are left to the next pass.
            rows = [*calls.filter(pk__gt=last).select_for_update(skip_locked=True, of=("self",))[:BATCH_SIZE]]
            priced = sum(_set_price(row, table) for row in rows)
            LlmCall.objects.bulk_update(rows, ["cost", "priced", "rate_ids", "code", "counted"])
        note_progress()
        last = rows[-1].pk if rows else None
        yield priced


def _set_price(call: LlmCall, table: RateTable) -> bool:
    """Set the price of a call, or the code `price_refused`. Return whether the call has a price."""
    counts = get_counts(call)
    book = table.get_book(find_candidate_names(call.model, call.requested_model), call.started_at)
    price = book.price(counts, call.service_tier)
    if price and price.is_unknown:
        return False
    if price is None:
        log.error("price by rate is out of range", call=call.call_id, model=call.model)
        call.code = REFUSED_PRICE_CODE
    else:
        is_whole = call.outcome == LlmCall.Outcome.OK  # of another call the reported tokens may be a part
        call.cost, call.rate_ids = price.usd, list(price.rates)
        call.priced = price.source if is_whole else LlmCall.Priced.ESTIMATE
    call.counted = False
    return price is not None


def find_unpriced() -> QuerySet[LlmCall]:
    return LlmCall.objects.filter(cost__isnull=True, ended_at__isnull=False, priced=LlmCall.Priced.NO)


def _iter_priceable(now: datetime) -> Iterator[tuple[QuerySet[LlmCall], RateTable]]:
    """Yield unpriced calls that have a rate, with the rates, for up to MAX_MODELS_PER_QUERY models at a time."""
    has_counts = Q(token_counts__isnull=False) & ~Q(token_counts={})
    complete = Q(outcome=LlmCall.Outcome.OK) & (
        has_counts
        | Q(input_tokens__isnull=False, output_tokens__isnull=False)
        | Q(input_tokens__isnull=False, path__endswith="/embeddings")  # which generate nothing
    )
    partial = Q(outcome__in=[LlmCall.Outcome.CUT, LlmCall.Outcome.FAILED, LlmCall.Outcome.LOST]) & (
        has_counts | Q(input_tokens__isnull=False) | Q(output_tokens__isnull=False)
    )
    wait = RECORD_WAIT if settings.LLM_RECORDS else timedelta(0)
    ready = (
        find_unpriced()
        .exclude(code=REFUSED_PRICE_CODE)
        .filter(complete | partial, kind=LlmCall.Kind.LLM, ended_at__lte=now - wait)
        .defer("usage")
    )
    # Only models with an applicable rate are listed in the condition: a sandbox can call any number of other model names.
    models = iter(ready.order_by().values_list("model", "requested_model").annotate(newest=Max("started_at")))
    while chunk := [*islice(models, MAX_MODELS_PER_QUERY)]:
        names = {(model, requested): find_candidate_names(model, requested) for model, requested, _ in chunk}
        table = RateTable.load({name for candidates in names.values() for name in candidates}, until=now)
        matching = Q(pk__in=[])
        for model, requested, newest in chunk:
            start = table.find_start(names[model, requested])
            if start is not None and start <= newest:
                matching |= Q(model=model, requested_model=requested, started_at__gte=start)
        if matching != Q(pk__in=[]):
            yield ready.filter(matching).order_by("pk"), table
