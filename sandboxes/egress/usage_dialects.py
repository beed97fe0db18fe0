"""Usage fields of the model APIs, one row each, and the token counts by kind that follow from them.

Sources: the types of the SDKs `anthropic` 2.14 and `openai` 3.57, LiteLLM 1.106, and the vendors' documentation. A vendor whose
API is compatible with OpenAI's uses the row of that API; where it names a quantity differently, the row lists both names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandboxes.egress.amounts import MAX_TOKENS, parse_tokens
from sandboxes.models.llm_calls import TokenKind

Paths = tuple[str, ...]  # alternative names of one quantity, dotted; the largest value counts
MAX_ITERATIONS = 1000  # of a usage that are read


@dataclass(frozen=True)
class Dialect:
    """Usage fields of one API.

    The kinds of `input_parts` are parts of the input, those of `output_parts` parts of the output. `cache_writes` is the sum of
    both kinds of cache writes. If `excludes_cache`, the input does not include cache reads and writes. If `has_total`, the sum
    of all tokens shows whether the output includes the reasoning."""

    name: str
    input: Paths
    output: Paths
    input_parts: Mapping[TokenKind, Paths] = field(default_factory=dict)
    output_parts: Mapping[TokenKind, Paths] = field(default_factory=dict)
    cache_writes: Paths = ()
    web_searches: Paths = ()
    excludes_cache: bool = False
    has_total: bool = False

    @property
    def all_paths(self) -> Iterator[str]:
        for paths in (self.input, self.output, self.cache_writes, self.web_searches):
            yield from paths
        for paths in (*self.input_parts.values(), *self.output_parts.values()):
            yield from paths


MESSAGES = Dialect(
    "messages",
    input=("input_tokens",),
    output=("output_tokens",),
    input_parts={
        TokenKind.CACHE_READ: ("cache_read_input_tokens",),
        TokenKind.CACHE_WRITE_5M: ("cache_creation.ephemeral_5m_input_tokens",),
        TokenKind.CACHE_WRITE_1H: ("cache_creation.ephemeral_1h_input_tokens",),
    },
    output_parts={TokenKind.REASONING: ("output_tokens_details.thinking_tokens",)},
    cache_writes=("cache_creation_input_tokens",),
    web_searches=("server_tool_use.web_search_requests",),
    excludes_cache=True,
)
CHAT = Dialect(
    "chat completions",
    input=("prompt_tokens",),
    output=("completion_tokens", "output_tokens"),
    input_parts={
        TokenKind.CACHE_READ: (
            "prompt_tokens_details.cached_tokens",
            "cache_read_input_tokens",  # LiteLLM
            "prompt_cache_hit_tokens",  # DeepSeek
            "cached_tokens",  # Moonshot
        ),
        TokenKind.CACHE_WRITE_5M: ("prompt_tokens_details.cache_creation_token_details.ephemeral_5m_input_tokens",),
        TokenKind.CACHE_WRITE_1H: ("prompt_tokens_details.cache_creation_token_details.ephemeral_1h_input_tokens",),
        TokenKind.AUDIO_INPUT: ("prompt_tokens_details.audio_tokens",),
        TokenKind.IMAGE_INPUT: ("prompt_tokens_details.image_tokens",),
    },
    output_parts={
        TokenKind.REASONING: ("completion_tokens_details.reasoning_tokens", "reasoning_tokens"),
        TokenKind.AUDIO_OUTPUT: ("completion_tokens_details.audio_tokens",),
        TokenKind.IMAGE_OUTPUT: ("completion_tokens_details.image_tokens",),
    },
    cache_writes=(
        "prompt_tokens_details.cache_write_tokens",
        "prompt_tokens_details.cache_creation_tokens",  # LiteLLM
        "cache_creation_input_tokens",  # LiteLLM
    ),
    web_searches=("prompt_tokens_details.web_search_requests", "server_tool_use.web_search_requests"),  # LiteLLM
    has_total=True,
)
RESPONSES = Dialect(
    "responses",
    input=("input_tokens",),
    output=("output_tokens",),
    input_parts={
        TokenKind.CACHE_READ: ("input_tokens_details.cached_tokens",),
        # Writes for 30 minutes are the rest of `cache_writes`, and count as those for 5 minutes: both are the vendors' short
        # term, whose price a rate states.
        TokenKind.CACHE_WRITE_1H: ("input_tokens_details.cache_write_tokens_details.ttl_12h_tokens",),
        TokenKind.AUDIO_INPUT: ("input_tokens_details.audio_tokens",),
        TokenKind.IMAGE_INPUT: ("input_tokens_details.image_tokens",),
    },
    output_parts={
        TokenKind.REASONING: ("output_tokens_details.reasoning_tokens",),
        TokenKind.AUDIO_OUTPUT: ("output_tokens_details.audio_tokens",),
        TokenKind.IMAGE_OUTPUT: ("output_tokens_details.image_tokens",),
    },
    cache_writes=("input_tokens_details.cache_write_tokens",),
    has_total=True,
)
EMBEDDINGS = Dialect("embeddings", input=("prompt_tokens", "total_tokens"), output=())
DIALECTS = (MESSAGES, CHAT, RESPONSES, EMBEDDINGS)
COUNT_NAMES = frozenset(path.rpartition(".")[2] for dialect in DIALECTS for path in dialect.all_paths) | {"total_tokens"}
# In the order in which they are taken from a whole that is smaller than their sum: the dearest first.
INPUT_PART_ORDER = (
    TokenKind.CACHE_WRITE_1H, TokenKind.CACHE_WRITE_5M, TokenKind.AUDIO_INPUT, TokenKind.IMAGE_INPUT, TokenKind.CACHE_READ,
)  # fmt: skip
OUTPUT_PART_ORDER = (TokenKind.AUDIO_OUTPUT, TokenKind.IMAGE_OUTPUT, TokenKind.REASONING)


@dataclass
class UsageCounts:
    """Counts of one usage document. None: not reported, or out of range, which `has_refused_sum` says.

    `counts` has the positive counts by TokenKind, which are disjoint: their sum, without searches, is input plus output."""

    input_tokens: int | None = None  # with cache reads and writes
    output_tokens: int | None = None  # with reasoning
    cached_tokens: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    has_refused_sum: bool = False


def derive_counts(document: Mapping[str, Any], *, is_embedding: bool = False) -> UsageCounts:
    """Derive the counts from a merged usage document. `is_embedding`: the response is a list of embeddings.

    Context compactions of the messages API are reported as iterations and are not part of the sums, so they are added."""
    dialect = find_dialect(document, is_embedding=is_embedding)
    result = _derive_own_counts(document, dialect)
    iterations = document.get("iterations")
    if dialect is MESSAGES and isinstance(iterations, list):
        for iteration in iterations[:MAX_ITERATIONS]:
            if isinstance(iteration, dict) and iteration.get("type") == "compaction":
                _add(result, _derive_own_counts(iteration, dialect))
    return result


def find_dialect(document: Mapping[str, Any], *, is_embedding: bool = False) -> Dialect:
    """Return the row of a usage document, by the names of its fields."""
    if is_embedding:
        return EMBEDDINGS
    if _find(document, ("prompt_tokens", "completion_tokens")) is not None:
        is_input_alone = _find(document, ("completion_tokens", "output_tokens")) is None
        # Embeddings have no output. A chat completion states its output, also if it is 0.
        return EMBEDDINGS if is_input_alone and document.get("prompt_tokens") == document.get("total_tokens") else CHAT
    if isinstance(document.get("input_tokens_details"), dict):
        return RESPONSES
    names_cache = any(name in document for name in ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation"))
    return RESPONSES if "total_tokens" in document and not names_cache else MESSAGES


def _derive_own_counts(document: Mapping[str, Any], dialect: Dialect) -> UsageCounts:
    parts = {kind: _find(document, paths) or 0 for kind, paths in dialect.input_parts.items()}
    short_writes, long_writes = parts.get(TokenKind.CACHE_WRITE_5M, 0), parts.get(TokenKind.CACHE_WRITE_1H, 0)
    writes = max(_find(document, dialect.cache_writes) or 0, short_writes + long_writes)
    parts[TokenKind.CACHE_WRITE_5M] = writes - long_writes
    result = UsageCounts(cached_tokens=_find(document, dialect.input_parts.get(TokenKind.CACHE_READ, ())))
    whole = _find(document, dialect.input)
    if whole is not None and dialect.excludes_cache:
        whole += writes + parts[TokenKind.CACHE_READ]
    if whole is not None:
        result.input_tokens = _accept(result, whole)
    if result.input_tokens is not None:
        if result.cached_tokens is not None:
            result.cached_tokens = min(result.cached_tokens, result.input_tokens)
        _split(result.counts, result.input_tokens, parts, INPUT_PART_ORDER, rest=TokenKind.INPUT)
    parts = {kind: _find(document, paths) or 0 for kind, paths in dialect.output_parts.items()}
    whole = 0 if dialect is EMBEDDINGS and result.input_tokens is not None else _find(document, dialect.output)
    if whole is not None and dialect.has_total:
        outside = _find_output_outside(document, result.input_tokens, whole, parts.get(TokenKind.REASONING, 0))
        whole += outside
        parts[TokenKind.REASONING] = max(parts.get(TokenKind.REASONING, 0), outside)
    if whole is not None:
        result.output_tokens = _accept(result, whole)
    if result.output_tokens is not None:
        _split(result.counts, result.output_tokens, parts, OUTPUT_PART_ORDER, rest=TokenKind.OUTPUT)
    if searches := _find(document, dialect.web_searches):
        result.counts[TokenKind.WEB_SEARCH.value] = searches
    return result


def _find_output_outside(document: Mapping[str, Any], input_tokens: int | None, output_tokens: int, reasoning: int) -> int:
    """Return the reasoning tokens that the output does not include.

    xAI and Gemini report reasoning beside the completion, and the total includes both. Gemini's own endpoint does not name it
    at all. Without a total, reasoning that exceeds the output cannot be a part of the output."""
    total = _find(document, ("total_tokens",))
    if total is None or input_tokens is None:
        return reasoning if reasoning > output_tokens else 0
    return max(total - input_tokens - output_tokens, 0)


def _split(
    counts: dict[str, int], whole: int, parts: Mapping[TokenKind, int], order: tuple[TokenKind, ...], *, rest: TokenKind
) -> None:
    """Add the parts of a whole, each at most what remains of the whole, and the rest."""
    remaining = whole
    for kind in order:
        count = min(parts.get(kind, 0), remaining)
        remaining -= count
        if count:
            counts[kind.value] = count
    if remaining:
        counts[rest.value] = remaining


def _add(result: UsageCounts, other: UsageCounts) -> None:
    for name in ("input_tokens", "output_tokens", "cached_tokens"):
        values = [value for value in (getattr(result, name), getattr(other, name)) if value is not None]
        setattr(result, name, _accept(result, sum(values)) if values else None)
    for kind, count in other.counts.items():
        result.counts[kind] = result.counts.get(kind, 0) + count
    result.has_refused_sum |= other.has_refused_sum


def _accept(result: UsageCounts, count: int) -> int | None:
    """Return a sum, or None if it is out of range."""
    if count <= MAX_TOKENS:
        return count
    result.has_refused_sum = True
    return None


def _find(document: Mapping[str, Any], paths: Paths) -> int | None:
    """Return the largest valid count at the paths, or None."""
    found = [count for path in paths if (count := parse_tokens(_follow(document, path))) is not None]
    return max(found, default=None)


def _follow(document: Mapping[str, Any], path: str) -> Any:
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
