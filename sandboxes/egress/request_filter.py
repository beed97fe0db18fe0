"""Allow list for model requests: paths, fields, tools and content.

A request comes from an untrusted program and is forwarded with the control plane's credentials. Fields that select another
upstream or account, or that falsify the cost record, are dropped. Content that the provider would fetch from the network is
rejected."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

COMMON_FIELDS = {"model", "stream", "temperature", "top_p", "tools", "tool_choice"}
CHAT_FIELDS = COMMON_FIELDS | {
    "messages", "max_tokens", "max_completion_tokens", "stop", "n", "seed", "response_format", "logprobs", "top_logprobs",
    "logit_bias", "presence_penalty", "frequency_penalty", "parallel_tool_calls", "reasoning_effort", "stream_options",
    "verbosity", "prediction",
}  # fmt: skip
COMPLETION_FIELDS = {
    "model", "stream", "temperature", "top_p", "prompt", "suffix", "max_tokens", "stop", "n", "seed", "logprobs", "echo",
    "presence_penalty", "frequency_penalty", "best_of", "logit_bias", "stream_options",
}  # fmt: skip
MESSAGE_FIELDS = COMMON_FIELDS | {
    "messages", "max_tokens", "system", "stop_sequences", "top_k", "thinking", "output_config", "context_management",
    "cache_control",
}  # fmt: skip
RESPONSE_FIELDS = COMMON_FIELDS | {
    "input",
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "truncation",
    "include",
}
EMBEDDING_FIELDS = {"model", "input", "dimensions", "encoding_format"}
FIELDS_BY_PATH = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/embeddings": EMBEDDING_FIELDS,
    "/v1/messages": MESSAGE_FIELDS,
    "/v1/messages/count_tokens": MESSAGE_FIELDS,
    "/v1/responses": RESPONSE_FIELDS,
}
MODELS_PATH = "/v1/models"  # answered by the egress server, free of charge
MCP_PATH = "/mcp"  # tools of the control plane, answered by the egress server
REQUIRED_FIELDS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/responses": "input"}  # other paths: messages
# Types of tools that the client executes. The provider executes all others, such as web search.
CLIENT_TOOL_PATTERNS = ("function", "custom", "bash_*", "text_editor_*", "computer_*", "memory_*", "local_shell", "apply_patch")
# Features of Anthropic's API that agent CLIs announce in the header anthropic-beta. They change how the model reads and answers
# a request. Features with which the provider executes tools, fetches content or stores files are not among them.
BETA_PATTERNS = (
    "advanced-tool-use-*", "claude-code-*", "compact-*", "context-1m-*", "context-management-*", "effort-*",
    "extended-cache-ttl-*", "fine-grained-tool-streaming-*", "interleaved-thinking-*", "mid-conversation-tool-changes-*",
    "output-128k-*", "prompt-caching-*", "structured-outputs-*", "thinking-display-updates-*", "thinking-token-count-*",
    "token-efficient-tools-*", "tool-examples-*",
)  # fmt: skip
SCHEMA_FIELDS = {"parameters", "input_schema", "schema"}
TOOL_CALL_TYPES = ("tool_use", "function_call", "custom_tool_call")
MAX_NESTING_DEPTH = 64


def build_error_body(code: str, message: str) -> dict[str, Any]:
    """Build an error body that both the OpenAI and the Anthropic SDK understand."""
    return {"type": "error", "error": {"type": code, "code": code, "message": message, "param": None}}


class InvalidRequest(Exception):
    """The request cannot be forwarded. `code` and `message` give the reason."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)


def sanitize_request(path: str, body: Any, *, default_model: str) -> dict[str, Any]:
    """Return the allowed fields of a request to one of the paths in FIELDS_BY_PATH. Raise InvalidRequest."""
    required = REQUIRED_FIELDS.get(path, "messages")
    if not isinstance(body, dict) or not body.get(required):
        raise InvalidRequest("invalid_request", f"The body must be a JSON object with the field {required}.")
    allowed = {name: body[name] for name in FIELDS_BY_PATH[path] if name in body}
    model = allowed.get("model") or "default"
    if not isinstance(model, str) or len(model) > 200:
        raise InvalidRequest("invalid_request", "model must be a string of at most 200 characters.")
    allowed["model"] = default_model if model == "default" else model
    if allowed.get("stream") is not None and not isinstance(allowed["stream"], bool):
        raise InvalidRequest("invalid_request", "stream must be true or false.")
    _check_tools(allowed.get("tools"))
    if any(_is_remote_content(part) for part in _walk_objects(allowed)):
        raise InvalidRequest("urls_not_fetched", "URLs and file ids are not fetched for sandboxes. Send the content inline.")
    if path == "/v1/responses":
        allowed["store"] = False  # other agents use the same account and could read stored responses
    return allowed


def filter_betas(header: str) -> str:
    """Return the allowed features of an anthropic-beta header, comma-separated. Others are dropped, and the call goes on."""
    return ",".join(name for name in (part.strip() for part in header.split(",")[:64]) if is_allowed(name, [*BETA_PATTERNS]))


def is_allowed(model: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(model, pattern) for pattern in patterns)


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("invalid_request", "tools must be a list of objects.")
    for tool in tools:
        kind = tool.get("type") or "function"
        if kind == "namespace":  # a named group of tools
            _check_tools(tool.get("tools"))
            continue
        if not isinstance(kind, str) or not is_allowed(kind, [*CLIENT_TOOL_PATTERNS]):
            raise InvalidRequest(
                "tool_not_allowed", f"Tools executed by the provider are not allowed from a sandbox: {str(kind)[:100]}."
            )


def _walk_objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a request, except tool schemas and arguments of tool calls, which may have any content."""
    pending = [(value, 0)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_NESTING_DEPTH:
            raise InvalidRequest("invalid_request", f"The body is nested more than {MAX_NESTING_DEPTH} levels deep.")
        if isinstance(node, dict):
            yield node
            skipped = {*SCHEMA_FIELDS, "input"} if node.get("type") in TOOL_CALL_TYPES else SCHEMA_FIELDS
            pending += [(child, depth + 1) for name, child in node.items() if name not in skipped]
        elif isinstance(node, list):
            pending += [(child, depth + 1) for child in node]


def _is_remote_content(part: dict[str, Any]) -> bool:
    """Return whether the provider would fetch this content: an object with a type, and a URL other than data: or a file id."""
    kind = part.get("type")
    if not isinstance(kind, str):
        return False
    urls = [part.get("url"), part.get("image_url"), part.get("file_url"), part.get("video_url"), part.get("audio_url")]
    urls = [url.get("url") if isinstance(url, dict) else url for url in urls]
    return kind == "url" or "file_id" in part or any(isinstance(url, str) and not url.startswith("data:") for url in urls)
