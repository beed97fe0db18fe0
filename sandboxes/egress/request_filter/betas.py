"""Allow list for the header anthropic-beta, and matching of names with patterns."""

from fnmatch import fnmatchcase

# Features of Anthropic's API that agent CLIs announce in the header anthropic-beta. They change how the model reads and answers
# a request. Features with which the provider executes tools, fetches content or stores files are not among them.
BETA_PATTERNS = (
    "advanced-tool-use-*", "claude-code-*", "compact-*", "context-1m-*", "context-management-*", "effort-*",
    "extended-cache-ttl-*", "fine-grained-tool-streaming-*", "interleaved-thinking-*", "mid-conversation-tool-changes-*",
    "output-128k-*", "per-turn-control-*", "prompt-caching-*", "structured-outputs-*", "thinking-display-updates-*",
    "thinking-token-count-*", "token-efficient-tools-*", "tool-examples-*",
)  # fmt: skip


def filter_betas(header: str) -> str:
    """Return the allowed features of an anthropic-beta header, comma-separated. Others are dropped, and the call goes on."""
    return ",".join(name for name in (part.strip() for part in header.split(",")[:64]) if is_allowed(name, [*BETA_PATTERNS]))


def is_allowed(model: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(model, pattern) for pattern in patterns)
