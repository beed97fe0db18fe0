"""What a model's answer says about the tokens it took, read while it passes by: whole or streamed, OpenAI's shapes and
Anthropic's. Nothing of the answer is kept."""

import json
import re
from dataclasses import dataclass
from typing import Any

EVENT_END_PATTERN = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")  # of an event
FINAL_EVENT_TYPES = ("message_stop", "response.completed", "response.incomplete", "response.failed")  # types of last events
MAX_PARSED_BYTES = 8 << 20  # bytes of an answer, or of one event, that are looked at; the usage of a larger one is not known


@dataclass
class TokenUsage:
    """Tokens of one call, as the upstream counted them. None: it did not say."""

    model: str = ""
    input_tokens: int | None = None  # all that went in, also where the provider counts what its cache had apart
    output_tokens: int | None = None
    cached_tokens: int | None = None  # of the input, read from the provider's cache

    def take(self, said: Any) -> None:
        """Note what one JSON document of the answer says; a later one counts more."""
        if not isinstance(said, dict):
            return
        for part in (said, said.get("message"), said.get("response")):  # Anthropic's and the Responses API's first event
            if isinstance(part, dict):
                self._take(part)

    def _take(self, part: dict[str, Any]) -> None:
        if isinstance(model := part.get("model"), str):
            self.model = model[:200]
        usage = part.get("usage")
        if not isinstance(usage, dict):
            return
        cached = usage.get("cache_read_input_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if cached is None and isinstance(details, dict):
            cached = details.get("cached_tokens")
        self.input_tokens = _sum_input_tokens(usage, known=self.input_tokens)
        self.output_tokens = _first_count(usage, "completion_tokens", "output_tokens", known=self.output_tokens)
        self.cached_tokens = _parse_count(cached, self.cached_tokens)


class UsageReader:
    """Fed the bytes of an answer as they pass; says which of them to pass on. `usage` is what has been seen so far, `complete`
    whether a stream has said that it is over: SDKs do not read on.

    A stream's last event, which says the tokens, is kept back where `hidden`: whoever did not ask for it may choke on it."""

    def __init__(self, content_type: str, *, hidden: bool = False) -> None:
        self.usage = TokenUsage()
        self.streamed = content_type.partition(";")[0].strip().lower() == "text/event-stream"
        self.complete = False
        self._hides_usage = hidden
        self._kept = bytearray()  # of an answer in one piece, all of it; of a stream, the event that is not complete
        self._has_overflowed = False

    def feed(self, chunk: bytes) -> bytes:
        if not self.streamed:
            if len(self._kept) + len(chunk) > MAX_PARSED_BYTES:
                self._has_overflowed = True
            if not self._has_overflowed:
                self._kept += chunk
            return chunk
        if self._has_overflowed:
            return chunk
        self._kept += chunk
        *events, rest = EVENT_END_PATTERN.split(bytes(self._kept))
        self._kept = bytearray(rest)
        passed = b"".join(event + end for event, end in zip(events[::2], events[1::2], strict=True) if self._look(event))
        if len(self._kept) > MAX_PARSED_BYTES:
            self._has_overflowed = True
            passed += bytes(self._kept)
            self._kept.clear()
        return passed

    def end(self) -> bytes:
        """The answer is complete; what of it has not been passed on yet."""
        if not self.streamed:
            if not self._has_overflowed:
                self.usage.take(_parse_json(bytes(self._kept)))
            return b""
        return bytes(self._kept) if self._kept and self._look(bytes(self._kept)) else b""

    def _look(self, event: bytes) -> bool:
        """Note what an event says of usage. Is it to be passed on?"""
        lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        said = _parse_json(data)
        self.complete |= data == b"[DONE]" or (isinstance(said, dict) and said.get("type") in FINAL_EVENT_TYPES)
        self.usage.take(said)
        tokens_alone = isinstance(said, dict) and said.get("choices") == [] and bool(said.get("usage"))
        return not (self._hides_usage and tokens_alone)


def _parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sum_input_tokens(usage: dict[str, Any], *, known: int | None) -> int | None:
    """Tokens that went in. Anthropic's `input_tokens` has neither those in it that its cache had nor those it wrote there."""
    counted = _first_count(usage, "prompt_tokens", "input_tokens", known=None)
    if counted is None or "prompt_tokens" in usage:
        return known if counted is None else counted
    apart = (_parse_count(usage.get(f"cache_{way}_input_tokens"), 0) or 0 for way in ("read", "creation"))
    return _parse_count(counted + sum(apart), known)


def _first_count(usage: dict[str, Any], *names: str, known: int | None) -> int | None:
    return next((number for name in names if (number := _parse_count(usage.get(name), None)) is not None), known)


def _parse_count(value: Any, known: int | None) -> int | None:
    """A count that can be stored; an upstream's nonsense is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else known
