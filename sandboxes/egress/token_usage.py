"""Token usage, read from model responses in transit: streams and single documents of the APIs in `usage_dialects`.

No content is stored beyond the current event or document."""

import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from sandboxes.egress import stream_events
from sandboxes.egress.amounts import parse_tokens, parse_usd
from sandboxes.egress.usage_dialects import COUNT_NAMES, derive_counts

EVENT_END_PATTERN = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")  # blank line that ends a server-sent event
MAX_PARSED_BYTES = 8 << 20  # a larger document or event passes unparsed, and its usage stays unknown
MAX_DOCUMENT_BYTES = 16 << 10  # of a call's usage as JSON; a larger one is counted but not kept
MAX_MERGED_FIELDS, MAX_MERGED_DEPTH = 256, 6  # per object of a usage
STANDARD_TIERS = ("standard", "default", "auto", "on_demand")
XAI_TICKS_PER_USD = 10**10


@dataclass
class TokenUsage:
    """Tokens of one call as reported by the upstream. None means not reported.

    `has_refused_counts` is set if the upstream reported a count or cost that is out of range, which is ignored."""

    model: str = ""
    input_tokens: int | None = None  # includes cache reads and writes, also where the provider reports them separately
    output_tokens: int | None = None  # includes reasoning, also where the provider reports it separately
    cached_tokens: int | None = None  # part of the input, read from the provider's cache
    has_refused_counts: bool = False
    document: dict[str, Any] | None = None  # the vendor's usage, merged by field; None also above MAX_DOCUMENT_BYTES
    counts: dict[str, int] = field(default_factory=dict)  # by TokenKind, disjoint and positive
    tier: str = ""  # service tier; empty: standard
    cost: Decimal | None = None  # USD, if the usage states the cost
    content_events: int = 0  # of a stream, those with generated text
    content_bytes: int = 0  # of generated text, reasoning and arguments of tool calls
    is_final: bool = False  # no further event will change the counts
    _merged: dict[str, Any] = field(default_factory=dict, repr=False)
    _is_embedding: bool = field(default=False, repr=False)

    @property
    def is_complete(self) -> bool:
        """The counts are those of the whole call, so that a price follows from them."""
        return self.is_final and self.input_tokens is not None and self.output_tokens is not None

    def add(self, document: Any) -> None:
        """Merge the usage of one JSON document of the response, field by field. Later values replace earlier ones.

        A field that is missing later, or null, keeps its value, and a count does not fall back to 0: counts of a stream are
        cumulative."""
        if not isinstance(document, dict):
            return
        self._is_embedding |= document.get("object") == "list" and "data" in document
        # Anthropic's message_start nests its usage in `message`, the Responses API's events in `response`.
        parts = [part for part in (document, document.get("message"), document.get("response")) if isinstance(part, dict)]
        for part in parts:
            if isinstance(model := part.get("model"), str):
                self.model = _clean(model)[:200]
            self._add_tier(part.get("service_tier"))
        found = [usage for part in parts for usage in _find_usages(part)]
        for usage in found:
            self._add_tier(usage.get("service_tier"))
            self._merge(self._merged, usage)
        if found:
            self._derive()

    def _add_tier(self, tier: Any) -> None:
        if isinstance(tier, str) and tier:
            name = _clean(tier).lower()[:32]
            self.tier = "" if name in STANDARD_TIERS else name

    def _merge(self, known: dict[str, Any], update: dict[str, Any], depth: int = MAX_MERGED_DEPTH) -> None:
        for name, value in update.items():
            if value is None or depth <= 0 or (name not in known and len(known) >= MAX_MERGED_FIELDS):
                continue
            if name in COUNT_NAMES and not isinstance(value, dict):
                count = parse_tokens(value)
                if count is None:
                    self.has_refused_counts = True
                elif count or name not in known:
                    known[name] = count
            elif isinstance(value, dict):
                nested = known.get(name)
                if not isinstance(nested, dict):
                    nested = known[name] = {}
                self._merge(nested, value, depth - 1)
            else:
                known[name] = value

    def _derive(self) -> None:
        """Derive the counts and the cost from the merged document."""
        result = derive_counts(self._merged, is_embedding=self._is_embedding)
        self.input_tokens, self.output_tokens = result.input_tokens, result.output_tokens
        self.cached_tokens, self.counts = result.cached_tokens, result.counts
        self.has_refused_counts |= result.has_refused_sum
        if self._merged.get("speed") == "fast":  # Anthropic's faster and dearer inference, beside its tiers
            self.tier = self.tier or "fast"
        self._read_cost()
        self.document = self._merged if _is_storable(self._merged) else None

    def _read_cost(self) -> None:
        """Read the cost that LiteLLM, OpenRouter, Perplexity or xAI state in the usage."""
        cost, ticks = self._merged.get("cost"), self._merged.get("cost_in_usd_ticks")
        if isinstance(cost, dict):
            cost = cost.get("total_cost")  # Perplexity: beside its parts
        if self._merged.get("is_byok") is True:  # OpenRouter: the cost is its fee, without the price of the vendor
            return
        if cost is None and isinstance(ticks, int) and not isinstance(ticks, bool):
            cost = Decimal(ticks) / XAI_TICKS_PER_USD
        if cost is not None:
            self.cost = parse_usd(cost)
            self.has_refused_counts |= self.cost is None


class UsageReader:
    """Streaming parser of a response. `feed` returns the bytes to pass on.

    `usage` is the usage read so far. `complete` is set by a stream's final event, after which SDKs stop reading, and
    `has_failed` by an error in place of an answer. With `hide_usage` the event that carries only usage is dropped from a
    stream, because a client that did not request such an event may fail on it."""

    def __init__(self, content_type: str, *, hide_usage: bool = False) -> None:
        self.usage = TokenUsage()
        self.streamed = content_type.partition(";")[0].strip().lower() == "text/event-stream"
        self.complete = False
        self.has_failed = False
        self._hide_usage = hide_usage
        self._pending = bytearray()  # of a stream the incomplete last event, otherwise the document so far
        self._has_overflowed = False
        self._has_stopped = False

    @property
    def is_incomplete(self) -> bool:
        """Absence of a final event and of a reason to stop, in a stream that was read so far."""
        return self.streamed and not (self.complete or self._has_stopped or self._has_overflowed)

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that can be passed on after this chunk."""
        if not self.streamed:
            if len(self._pending) + len(chunk) > MAX_PARSED_BYTES:
                self._has_overflowed = True
            if not self._has_overflowed:
                self._pending += chunk
            return chunk
        if self._has_overflowed:
            return chunk
        self._pending += chunk
        *events, rest = EVENT_END_PATTERN.split(bytes(self._pending))
        self._pending = bytearray(rest)
        passed = b"".join(event + end for event, end in zip(events[::2], events[1::2], strict=True) if self._read_event(event))
        if len(self._pending) > MAX_PARSED_BYTES:
            self._has_overflowed = True
            passed += bytes(self._pending)
            self._pending.clear()
        return passed

    def end(self) -> bytes:
        """Return the remaining bytes at the end of the response."""
        if not self.streamed:
            if not self._has_overflowed:
                document = _parse_json(bytes(self._pending))
                self.usage.add(document)
                self.usage.content_bytes = stream_events.measure_document(document)
                self.usage.is_final = self.usage.output_tokens is not None
                self.has_failed = stream_events.is_error_document(document)
            return b""
        return bytes(self._pending) if self._pending and self._read_event(bytes(self._pending)) else b""

    def _read_event(self, event: bytes) -> bool:
        """Add an event's usage. Return whether to pass the event on."""
        lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        name = next((line[6:].strip().decode("latin-1") for line in lines if line.startswith(b"event:")), "")
        document = _parse_json(data)
        self.complete |= stream_events.is_final(data, document)
        self.has_failed |= not self.complete and stream_events.is_error(name, document)
        self._has_stopped |= stream_events.states_end(document)
        if size := stream_events.measure_event(document):
            self.usage.content_events += 1
            self.usage.content_bytes += size
        self.usage.add(document)
        self.usage.is_final = (self.complete or self._has_stopped) and self.usage.output_tokens is not None
        is_usage_only = isinstance(document, dict) and document.get("choices") == [] and bool(document.get("usage"))
        return not (self._hide_usage and is_usage_only)


def _find_usages(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the usage objects of a document: of its first choice (Moonshot's streams), of Groq's extension, and its own."""
    choices = part.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return [
        usage
        for holder in (choice, part.get("x_groq"), part)
        if isinstance(holder, dict) and isinstance(usage := holder.get("usage"), dict)
    ]


def _clean(text: str) -> str:
    """Remove characters that the database does not store, such as NUL."""
    return "".join(character for character in text[:1000] if character.isprintable())


def _is_storable(usage: dict[str, Any]) -> bool:
    """Return whether a usage is small enough to keep, and valid JSON for the database: without NaN, NUL and lone surrogates."""
    try:
        text = json.dumps(usage, ensure_ascii=False, allow_nan=False)
        return len(text.encode()) <= MAX_DOCUMENT_BYTES and "\\u0000" not in text
    except (ValueError, RecursionError):
        return False


def _parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
