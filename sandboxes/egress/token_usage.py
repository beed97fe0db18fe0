"""Token usage, read from model responses in transit. Supports streams and single documents in OpenAI's and Anthropic's formats.

No content is stored beyond the current event or document."""

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sandboxes.egress.amounts import parse_tokens

EVENT_END_PATTERN = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")  # blank line that ends a server-sent event
FINAL_EVENT_TYPES = ("message_stop", "response.completed", "response.incomplete", "response.failed")
TOKEN_FIELDS = (
    "prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "cache_read_input_tokens",
    "cache_creation_input_tokens",
)  # fmt: skip
MAX_PARSED_BYTES = 8 << 20  # a larger document or event passes unparsed, and its usage stays unknown


@dataclass
class TokenUsage:
    """Tokens of one call as reported by the upstream. None means not reported.

    `has_refused_counts` is set if the upstream reported a count that is out of range, which is ignored."""

    model: str = ""
    input_tokens: int | None = None  # includes cache reads and writes, also where the provider reports them separately
    output_tokens: int | None = None
    cached_tokens: int | None = None  # part of the input, read from the provider's cache
    has_refused_counts: bool = False
    document: dict[str, Any] | None = None
    tier: str = ""
    cost: Decimal | None = None
    content_events: int = 0
    content_bytes: int = 0

    @property
    def counts(self) -> dict[str, int]:
        cached = min(self.cached_tokens or 0, self.input_tokens or 0)
        counts = {"input": (self.input_tokens or 0) - cached, "cache_read": cached, "output": self.output_tokens or 0}
        return {kind: count for kind, count in counts.items() if count}

    @property
    def is_complete(self) -> bool:
        return self.input_tokens is not None and self.output_tokens is not None

    def add(self, document: Any) -> None:
        """Merge the usage of one JSON document of the response. Later values replace earlier ones."""
        if not isinstance(document, dict):
            return
        # Anthropic's message_start nests its usage in `message`, the Responses API's events in `response`.
        for part in (document, document.get("message"), document.get("response")):
            if isinstance(part, dict):
                self._add_part(part)

    def _add_part(self, part: dict[str, Any]) -> None:
        if isinstance(model := part.get("model"), str):
            self.model = model[:200]
        usage = part.get("usage")
        if not isinstance(usage, dict):
            return
        cached = usage.get("cache_read_input_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if cached is None and isinstance(details, dict):
            cached = details.get("cached_tokens")
        counts = (*(usage.get(name) for name in TOKEN_FIELDS), cached)
        self.has_refused_counts |= any(count is not None and parse_tokens(count) is None for count in counts)
        self.input_tokens = _sum_input_tokens(usage, known=self.input_tokens)
        self.output_tokens = _first_count(usage, "completion_tokens", "output_tokens", known=self.output_tokens)
        self.cached_tokens = _parse_count(cached, self.cached_tokens)


class UsageReader:
    """Streaming parser of a response. `feed` returns the bytes to pass on.

    `usage` is the usage read so far. `complete` is set by a stream's final event, after which SDKs stop reading. With
    `hide_usage` the event that carries only usage is dropped from a stream, because a client that did not request such an event
    may fail on it."""

    def __init__(self, content_type: str, *, hide_usage: bool = False) -> None:
        self.usage = TokenUsage()
        self.streamed = content_type.partition(";")[0].strip().lower() == "text/event-stream"
        self.complete = False
        self._hide_usage = hide_usage
        self._pending = bytearray()  # of a stream the incomplete last event, otherwise the document so far
        self._has_overflowed = False

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
                self.usage.add(_parse_json(bytes(self._pending)))
            return b""
        return bytes(self._pending) if self._pending and self._read_event(bytes(self._pending)) else b""

    def _read_event(self, event: bytes) -> bool:
        """Add an event's usage. Return whether to pass the event on."""
        lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        document = _parse_json(data)
        self.complete |= data == b"[DONE]" or (isinstance(document, dict) and document.get("type") in FINAL_EVENT_TYPES)
        self.usage.add(document)
        is_usage_only = isinstance(document, dict) and document.get("choices") == [] and bool(document.get("usage"))
        return not (self._hide_usage and is_usage_only)


def _parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sum_input_tokens(usage: dict[str, Any], *, known: int | None) -> int | None:
    """Sum the input tokens. Anthropic's `input_tokens` excludes tokens read from and written to its cache."""
    counted = _first_count(usage, "prompt_tokens", "input_tokens", known=None)
    if counted is None or "prompt_tokens" in usage:
        return known if counted is None else counted
    cache_tokens = (_parse_count(usage.get(f"cache_{kind}_input_tokens"), 0) or 0 for kind in ("read", "creation"))
    return _parse_count(counted + sum(cache_tokens), known)


def _first_count(usage: dict[str, Any], *names: str, known: int | None) -> int | None:
    return next((number for name in names if (number := _parse_count(usage.get(name), None)) is not None), known)


def _parse_count(value: Any, known: int | None) -> int | None:
    """Return `value` if it is a count in range, else `known`."""
    count = parse_tokens(value)
    return known if count is None else count
