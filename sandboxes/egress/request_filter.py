"""What of a model request leaves: nothing that is not named here. A request is data of an untrusted program, and what it
goes to next holds our key: fields that choose another upstream, another account or a cheaper record of it are not passed
on, and neither is what would make the provider's machines reach out to the network for it."""

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
MESSAGE_FIELDS = COMMON_FIELDS | {"messages", "max_tokens", "system", "stop_sequences", "top_k", "thinking", "output_config"}
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
MODELS_PATH = "/v1/models"  # which there are: answered here, and nobody pays for it
REQUIRED_FIELDS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/responses": "input"}  # else messages
# Tools that the program itself carries out. What else there is, searches of the web for one, the provider carries out.
CLIENT_TOOL_PATTERNS = ("function", "custom", "bash_*", "text_editor_*", "computer_*", "memory_*", "local_shell", "apply_patch")
SCHEMA_FIELDS = {"parameters", "input_schema", "schema"}
TOOL_CALL_TYPES = ("tool_use", "function_call", "custom_tool_call")
MAX_NESTING_DEPTH = 64


def build_error_body(code: str, message: str) -> dict[str, Any]:
    """What a sandbox is answered instead of what it asked for, in the words of both kinds of SDK."""
    return {"type": "error", "error": {"type": code, "code": code, "message": message, "param": None}}


class InvalidRequest(Exception):
    """This request does not leave as it is."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)


def sanitize_request(path: str, body: Any, *, default_model: str) -> dict[str, Any]:
    """What leaves of a request to one of FIELDS' paths. Unfit says what is wrong with it."""
    needed = REQUIRED_FIELDS.get(path, "messages")
    if not isinstance(body, dict) or not body.get(needed):
        raise InvalidRequest("invalid_request", f"A JSON object with {needed} is expected.")
    asked = {name: body[name] for name in FIELDS_BY_PATH[path] if name in body}
    model = asked.get("model") or "default"
    if not isinstance(model, str) or len(model) > 200:
        raise InvalidRequest("invalid_request", "model is a name of at most 200 characters.")
    asked["model"] = default_model if model == "default" else model
    if asked.get("stream") is not None and not isinstance(asked["stream"], bool):
        raise InvalidRequest("invalid_request", "stream is true or false.")
    _check_tools(asked.get("tools"))
    if any(_is_remote_content(part) for part in _walk_objects(asked)):
        raise InvalidRequest("urls_not_fetched", "Nobody fetches a URL for a sandbox: send what is behind it, as data.")
    if path == "/v1/responses":
        asked["store"] = False  # nothing of one agent's is there for the next one to ask for
    return asked


def is_allowed(model: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(model, pattern) for pattern in patterns)


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("invalid_request", "tools is a list of objects.")
    for tool in tools:
        kind = tool.get("type") or "function"
        if not isinstance(kind, str) or not is_allowed(kind, [*CLIENT_TOOL_PATTERNS]):
            raise InvalidRequest(
                "tool_not_allowed", f"Tools that the provider carries out are not for sandboxes: {str(kind)[:100]}."
            )


def _walk_objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a request that say something to the provider: not what a tool takes, nor what one was called with."""
    left = [(value, 0)]
    while left:
        one, depth = left.pop()
        if depth > MAX_NESTING_DEPTH:
            raise InvalidRequest("invalid_request", f"Nested more than {MAX_NESTING_DEPTH} deep.")
        if isinstance(one, dict):
            yield one
            told = {*SCHEMA_FIELDS, "input"} if one.get("type") in TOOL_CALL_TYPES else SCHEMA_FIELDS
            left += [(below, depth + 1) for name, below in one.items() if name not in told]
        elif isinstance(one, list):
            left += [(below, depth + 1) for below in one]


def _is_remote_content(part: dict[str, Any]) -> bool:
    """Is it content that the provider gets from somewhere? Such content has a type, and a URL that is no data: URL, or
    the id of a file that somebody uploaded."""
    kind = part.get("type")
    if not isinstance(kind, str):
        return False
    urls = [part.get("url"), part.get("image_url"), part.get("file_url"), part.get("video_url"), part.get("audio_url")]
    urls = [url.get("url") if isinstance(url, dict) else url for url in urls]
    return kind == "url" or "file_id" in part or any(isinstance(url, str) and not url.startswith("data:") for url in urls)
