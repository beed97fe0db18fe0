"""Token estimates of model calls: of a request before the call, and of a call whose usage the upstream did not report."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sandboxes.egress.token_usage import TokenUsage

COUNT_TOKENS_PATH = "/v1/messages/count_tokens"  # free of charge
EMBEDDINGS_PATH = "/v1/embeddings"  # generates no tokens
FREE_PATHS = (COUNT_TOKENS_PATH,)
# English text has about 4 bytes per token, source code and JSON about 3, Chinese text 3 and less.
BYTES_PER_TOKEN = 3
# Base64 of images and documents: an image of 1 MB has up to 1,600 tokens, a page of a document of 100 KB up to 3,000.
ENCODED_BYTES_PER_TOKEN = 24
DEFAULT_OUTPUT_TOKENS = 4096  # of a request that states no maximum
OUTPUT_LIMIT_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
CHOICE_FIELDS = ("n", "best_of")
MAX_ESTIMATED_TOKENS = 10**7  # of one kind, so that no price is out of range


@dataclass(frozen=True)
class TokenEstimate:
    """Estimated tokens of one call. `output_tokens` is the stated maximum of the request, for all choices together."""

    input_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens


def estimate_request(path: str, body: dict[str, Any], size: int) -> TokenEstimate:
    """Estimate the tokens of a sanitized request. `size` is the body's size in bytes."""
    encoded = min(sum(_iter_encoded_sizes(body)), size)
    input_tokens = math.ceil((size - encoded) / BYTES_PER_TOKEN) + math.ceil(encoded / ENCODED_BYTES_PER_TOKEN)
    return TokenEstimate(min(input_tokens, MAX_ESTIMATED_TOKENS), min(_read_output_limit(path, body), MAX_ESTIMATED_TOKENS))


def estimate_usage(
    request: TokenEstimate, usage: TokenUsage | None, *, streamed: bool, answered: bool, received_bytes: int
) -> TokenEstimate:
    """Estimate the tokens of a call that ended without complete usage. Reported counts are lower bounds of the output.

    `answered` says that the whole response was received. The output of a stream is estimated from the events received, and
    the output of a document from its bytes. A document that was not received may have been generated to the maximum."""
    input_tokens = request.input_tokens if usage is None or usage.input_tokens is None else usage.input_tokens
    reported = (usage and usage.output_tokens) or 0
    if streamed or answered:
        received = math.ceil(received_bytes / BYTES_PER_TOKEN) if answered and not streamed else 0
        if usage is not None:
            received = max(received, usage.content_events, math.ceil(usage.content_bytes / BYTES_PER_TOKEN))
        output_tokens = max(reported, min(received, request.output_tokens))
    else:
        output_tokens = max(reported, request.output_tokens)
    return TokenEstimate(input_tokens, output_tokens)


def _read_output_limit(path: str, body: dict[str, Any]) -> int:
    if path in (COUNT_TOKENS_PATH, EMBEDDINGS_PATH):
        return 0
    limits = (_read_count(body.get(name)) for name in OUTPUT_LIMIT_FIELDS)
    choices = max((_read_count(body.get(name)) or 1 for name in CHOICE_FIELDS), default=1)
    return next((limit for limit in limits if limit is not None), DEFAULT_OUTPUT_TOKENS) * choices


def _read_count(value: Any) -> int | None:
    """Return a count that the sandbox stated, at least 1. None if the value is no number: the upstream decides then."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return max(1, min(math.ceil(value), MAX_ESTIMATED_TOKENS)) if is_number else None


def _iter_encoded_sizes(value: Any) -> Iterator[int]:
    """Yield the sizes of base64 content: the `data` of a block, and data URLs."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if isinstance(data := node.get("data"), str):
                yield len(data)
            pending += [child for name, child in node.items() if name != "data" or not isinstance(child, str)]
        elif isinstance(node, list):
            pending += node
        elif isinstance(node, str) and node.startswith("data:") and ";base64," in node[:200]:
            yield len(node)
