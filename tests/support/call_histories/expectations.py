"""Expected costs of model calls, calculated with fractions from the rules in docs/money.md."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor

from tests.support.call_histories.answers import Counts, Event, Script

NANO = Fraction(1, 10**9)
INPUT_KINDS = ("input", "cache_read", "cache_write_5m", "cache_write_1h", "audio_input", "image_input")
OUTPUT_KINDS = ("output", "reasoning", "audio_output", "image_output")
NEXT_KINDS = {"cache_write_1h": "cache_write_5m", "input": None, "output": None, "web_search": None}
DEFAULT_MAX_TOKENS = 4096


@dataclass(frozen=True)
class Rate:
    """Price of a million units from a time on."""

    kind: str
    usd: Decimal
    since: datetime
    tokens_from: int = 0
    tier: str = ""


@dataclass
class PriceList:
    """Rates of one model, in the order in which they were added."""

    rates: list[Rate] = field(default_factory=list)

    def find(self, kind: str, at: datetime, size: int, tier: str) -> Fraction | None:
        """Return the price of one unit: its tier before none, the larger size, the later start, and of two the newer rate."""
        best: Rate | None = None
        for rate in self.rates:
            if rate.kind != kind or rate.since > at or rate.tokens_from > size or rate.tier not in ("", tier):
                continue
            if best is None or self._rank(rate, tier) >= self._rank(best, tier):
                best = rate
        return best and Fraction(best.usd) / 10**6

    @staticmethod
    def _rank(rate: Rate, tier: str) -> tuple[bool, int, datetime]:
        return rate.tier == tier, rate.tokens_from, rate.since

    def find_with_fallback(self, kind: str, at: datetime, size: int, tier: str) -> Fraction | None:
        candidate: str | None = kind
        while candidate:
            if (price := self.find(candidate, at, size, tier)) is not None:
                return price
            default = "input" if candidate in INPUT_KINDS else "output"
            candidate = NEXT_KINDS.get(candidate, default)
        return None

    def price(self, counts: Counts, at: datetime, tier: str) -> tuple[Fraction, bool]:
        """Return the price of a known usage, and whether each of its kinds has one."""
        size = sum(counts.get(kind, 0) for kind in INPUT_KINDS)
        prices = {kind: self.find_with_fallback(kind, at, size, tier) for kind, count in counts.items() if count}
        usd = sum((counts[kind] * price for kind, price in prices.items() if price is not None), Fraction(0))
        return floor(usd / NANO + Fraction(1, 2)) * NANO, None not in prices.values()

    def find_dearest(self, kinds: Iterable[str], at: datetime, size: int, tier: str) -> Fraction:
        found = [price for kind in kinds if (price := self.find(kind, at, size, tier)) is not None]
        return max(found, default=Fraction(0))

    def estimate(self, input_tokens: int, output_tokens: int, at: datetime, tier: str = "") -> Fraction:
        usd = input_tokens * self.find_dearest(INPUT_KINDS, at, input_tokens, tier)
        usd += output_tokens * self.find_dearest(OUTPUT_KINDS, at, input_tokens, tier)
        return ceil(usd / NANO) * NANO

    def estimate_output(self, known: Counts, output_tokens: int, at: datetime, tier: str) -> Fraction:
        """Return the price of a call whose input is known and whose output is estimated."""
        size = sum(known.get(kind, 0) for kind in INPUT_KINDS)
        if not size:
            return self.estimate(0, output_tokens, at, tier)
        prices = {kind: self.find_with_fallback(kind, at, size, tier) for kind in known if kind not in OUTPUT_KINDS}
        usd = sum((known[kind] * price for kind, price in prices.items() if price is not None), Fraction(0))
        usd += output_tokens * self.find_dearest(OUTPUT_KINDS, at, size, tier)
        return ceil(usd / NANO) * NANO


@dataclass
class Knowledge:
    """Facts that a reader has after some events of a stream."""

    counts: Counts | None = None
    tier: str = ""
    is_ended: bool = False
    has_cost: bool = False
    text_events: int = 0
    text_bytes: int = 0

    @classmethod
    def gather(cls, events: Iterable[Event]) -> "Knowledge":
        result = cls()
        for event in events:
            result.counts = result.counts if event.counts is None else event.counts
            result.tier = result.tier if event.tier is None else event.tier
            result.is_ended |= event.is_end
            result.has_cost |= event.states_cost
            result.text_events += event.text_bytes > 0
            result.text_bytes += event.text_bytes
        return result

    @property
    def is_whole(self) -> bool:
        return self.counts is not None and self.is_ended

    @property
    def output_tokens(self) -> int:
        """Lower bound of the output, by what has arrived."""
        return max(self.text_events, ceil(Fraction(self.text_bytes, 3)))

    @property
    def reported_output(self) -> int:
        return sum((self.counts or {}).get(kind, 0) for kind in OUTPUT_KINDS)


def sum_tokens(counts: Counts) -> int:
    """Sum all kinds but web searches, which are requests."""
    return sum(count for kind, count in counts.items() if kind in INPUT_KINDS or kind in OUTPUT_KINDS)


def find_complete(events: list[Event], received: int) -> list[Event]:
    """Return the events whose last byte is among the first `received` bytes of a stream."""
    complete, end = [], 0
    for event in events:
        end += len(event.data)
        if end <= received:
            complete.append(event)
    return complete


@dataclass
class ExpectedCall:
    """Expected row of a call. `usd` is None without a price."""

    started_at: datetime
    prices: PriceList
    input_tokens: int  # estimated, of the request
    max_output: int
    counts: Counts | None = None  # as far as they are known
    tier: str = ""
    usd: Fraction | None = None
    source: str = ""
    reserved: Fraction | None = None
    tokens: int = 0  # reserved, and those of the call once it has ended
    reported_tokens: int = 0  # part of the tokens
    is_open: bool = False
    is_partial: bool = False  # more tokens may have been generated than are known

    @property
    def owed(self) -> Fraction:
        """Amount that limits and budgets count."""
        return (self.usd if self.usd is not None else self.reserved) or Fraction(0)

    def expect_tokens(self, known: Knowledge, output: int) -> None:
        """Expect the reported input, or the estimated one, and an output of this size."""
        reported = None if known.counts is None else sum_tokens(known.counts)
        self.reported_tokens = reported or 0
        self.tokens = (self.input_tokens if reported is None else reported - known.reported_output) + output

    def expect_stream(self, known: Knowledge, script: Script) -> None:
        self.counts, self.tier = known.counts, known.tier
        estimated = max(known.reported_output, min(known.output_tokens, self.max_output))
        self.expect_tokens(known, known.reported_output if known.is_whole else estimated)
        if known.has_cost:
            self.expect_stated_cost(str(script.cost))
        elif known.is_whole:
            self.price_by_rate()
        else:
            self._estimate(known, estimated)

    def expect_document(self, script: Script, header: str | None, received: int, *, is_whole: bool, is_answered: bool) -> None:
        """`is_answered`: the connection to the upstream ended in good order."""
        if is_whole and script.has_usage:
            self.counts, self.tier = script.counts, script.tier
        elif is_whole and not script.is_tier_in_usage:
            self.tier = script.tier
        known = Knowledge(counts=self.counts, tier=self.tier)
        output = min(ceil(Fraction(received, 3)), self.max_output) if is_answered else self.max_output
        self.expect_tokens(known, output if self.counts is None else known.reported_output)
        if header is not None:
            self.expect_stated_cost(header)
        elif self.counts is not None:
            self.price_by_rate()
        else:
            self._estimate(known, output)

    def expect_noted(self, known: Knowledge) -> None:
        """The process writes the usage of the open call, for its successor."""
        assert known.counts is not None
        self.counts, self.tier, self.is_partial = known.counts, known.tier, True
        output = max(known.reported_output, self.max_output)
        self.expect_tokens(known, output)
        if self.prices.rates:
            self.reserved = self.prices.estimate_output(known.counts, output, self.started_at, known.tier)

    def expect_stated_cost(self, text: str) -> None:
        """Expect a cost that the upstream states, rounded half up to nine decimal places."""
        self.usd, self.source = floor(Fraction(text) / NANO + Fraction(1, 2)) * NANO, "upstream"

    def price_by_rate(self) -> None:
        """Price a call by what is known of its usage, and by the rates as they are now."""
        assert self.counts is not None
        if self.prices.rates:
            self.usd, is_complete = self.prices.price(self.counts, self.started_at, self.tier)
            self.source = "rate" if is_complete else "estimate"

    def _estimate(self, known: Knowledge, output: int) -> None:
        self.is_partial = True
        if not self.prices.rates:
            return
        self.source = "estimate"
        if known.counts is None:
            self.usd = self.prices.estimate(self.input_tokens, output, self.started_at, known.tier)
        else:
            self.usd = self.prices.estimate_output(known.counts, output, self.started_at, known.tier)
        self.counts = None  # such an estimate is never priced again


def iter_ends(chunks: Iterable[bytes]) -> Iterator[int]:
    """Yield the position in the answer after each chunk."""
    end = 0
    for chunk in chunks:
        end += len(chunk)
        yield end
