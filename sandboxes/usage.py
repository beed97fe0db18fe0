"""What a model's answer says about the tokens it took, in OpenAI's shapes and Anthropic's. Nothing of the answer is kept."""

from dataclasses import dataclass
from typing import Any


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


def _count(usage: dict[str, Any], *names: str, known: int | None) -> int | None:
    return next((number for name in names if (number := _number(usage.get(name), None)) is not None), known)


def _number(value: Any, known: int | None) -> int | None:
    """A count that can be stored; an upstream's nonsense is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else known
