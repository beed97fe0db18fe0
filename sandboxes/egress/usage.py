"""What a model's answer says about the tokens it took, read while it passes by: whole or streamed, OpenAI's shapes and
Anthropic's. Nothing of the answer is kept."""

import codecs
import json
from dataclasses import dataclass
from typing import Any

LARGEST = 8 << 20  # bytes of an answer, or of one event, that are looked at; the usage of a larger one is not known


@dataclass
class Usage:
    """Tokens of one call, as the upstream counted them. None: it did not say."""

    model: str = ""
    input_tokens: int | None = None
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
        self.input_tokens = _count(usage, "prompt_tokens", "input_tokens", known=self.input_tokens)
        self.output_tokens = _count(usage, "completion_tokens", "output_tokens", known=self.output_tokens)
        self.cached_tokens = _number(cached, self.cached_tokens)


class Reader:
    """Fed the bytes of an answer as they pass. `usage` is what has been seen so far."""

    def __init__(self, content_type: str) -> None:
        self.usage = Usage()
        self._streamed = content_type.partition(";")[0].strip() == "text/event-stream"
        self._whole = bytearray()
        self._line = ""
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._lost = False

    def feed(self, chunk: bytes) -> None:
        if self._streamed:
            self._events(self._text.decode(chunk))
        elif len(self._whole) + len(chunk) <= LARGEST:
            self._whole += chunk
        else:
            self._lost = True

    def end(self) -> Usage:
        """The answer is complete."""
        if self._streamed:
            self._events("\n")
        elif not self._lost:
            self.usage.take(_json(bytes(self._whole)))
        return self.usage

    def _events(self, text: str) -> None:
        *lines, self._line = (self._line + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            if line.startswith("data:"):
                self.usage.take(_json(line[5:].strip()))
        if len(self._line) > LARGEST:
            self._line = ""


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _count(usage: dict[str, Any], *names: str, known: int | None) -> int | None:
    return next((number for name in names if (number := _number(usage.get(name), None)) is not None), known)


def _number(value: Any, known: int | None) -> int | None:
    """A count that can be stored; an upstream's nonsense is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else known
