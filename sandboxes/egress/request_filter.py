"""What of a model request leaves: nothing that is not named here. A request is data of an untrusted program, and what it
goes to next holds our key: fields that choose another upstream, another account or a cheaper record of it are not passed
on, and neither is what would make the provider's machines reach out to the network for it."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

COMMON = {"model", "stream", "temperature", "top_p", "tools", "tool_choice"}
CHAT = COMMON | {
    "messages", "max_tokens", "max_completion_tokens", "stop", "n", "seed", "response_format", "logprobs", "top_logprobs",
    "logit_bias", "presence_penalty", "frequency_penalty", "parallel_tool_calls", "reasoning_effort", "stream_options",
    "verbosity", "prediction",
}  # fmt: skip
COMPLETIONS = {
    "model", "stream", "temperature", "top_p", "prompt", "suffix", "max_tokens", "stop", "n", "seed", "logprobs", "echo",
    "presence_penalty", "frequency_penalty", "best_of", "logit_bias", "stream_options",
}  # fmt: skip
MESSAGES = COMMON | {"messages", "max_tokens", "system", "stop_sequences", "top_k", "thinking", "output_config"}
RESPONSES = COMMON | {
    "input",
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "truncation",
    "include",
}
EMBEDDINGS = {"model", "input", "dimensions", "encoding_format"}
FIELDS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
}
MODELS = "/v1/models"  # which there are: answered here, and nobody pays for it
NEEDED = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/responses": "input"}  # else messages
# Tools that the program itself carries out. What else there is, searches of the web for one, the provider carries out.
OWN_TOOLS = ("function", "custom", "bash_*", "text_editor_*", "computer_*", "memory_*", "local_shell", "apply_patch")
SCHEMAS = {"parameters", "input_schema", "schema"}
CALLS = ("tool_use", "function_call", "custom_tool_call")
DEEPEST = 64


def error(code: str, message: str) -> dict[str, Any]:
    """What a sandbox is answered instead of what it asked for, in the words of both kinds of SDK."""
    return {"type": "error", "error": {"type": code, "code": code, "message": message, "param": None}}


class Unfit(Exception):
    """This request does not leave as it is."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)


def fit(path: str, body: Any, *, default_model: str) -> dict[str, Any]:
    """What leaves of a request to one of FIELDS' paths. Unfit says what is wrong with it."""
    needed = NEEDED.get(path, "messages")
    if not isinstance(body, dict) or not body.get(needed):
        raise Unfit("invalid_request", f"A JSON object with {needed} is expected.")
    asked = {name: body[name] for name in FIELDS[path] if name in body}
    model = asked.get("model") or "default"
    if not isinstance(model, str) or len(model) > 200:
        raise Unfit("invalid_request", "model is a name of at most 200 characters.")
    asked["model"] = default_model if model == "default" else model
    if asked.get("stream") is not None and not isinstance(asked["stream"], bool):
        raise Unfit("invalid_request", "stream is true or false.")
    _refuse_tools(asked.get("tools"))
    if any(_fetched(part) for part in _objects(asked)):
        raise Unfit("urls_not_fetched", "Nobody fetches a URL for a sandbox: send what is behind it, as data.")
    if path == "/v1/responses":
        asked["store"] = False  # nothing of one agent's is there for the next one to ask for
    return asked


def allowed(model: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(model, pattern) for pattern in patterns)


def _refuse_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unfit("invalid_request", "tools is a list of objects.")
    for tool in tools:
        kind = tool.get("type") or "function"
        if not isinstance(kind, str) or not allowed(kind, [*OWN_TOOLS]):
            raise Unfit("tool_not_allowed", f"Tools that the provider carries out are not for sandboxes: {str(kind)[:100]}.")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a request that say something to the provider: not what a tool takes, nor what one was called with."""
    left = [(value, 0)]
    while left:
        one, depth = left.pop()
        if depth > DEEPEST:
            raise Unfit("invalid_request", f"Nested more than {DEEPEST} deep.")
        if isinstance(one, dict):
            yield one
            told = {*SCHEMAS, "input"} if one.get("type") in CALLS else SCHEMAS
            left += [(below, depth + 1) for name, below in one.items() if name not in told]
        elif isinstance(one, list):
            left += [(below, depth + 1) for below in one]


def _fetched(part: dict[str, Any]) -> bool:
    """Is it content that the provider gets from somewhere? Such content has a type, and a URL that is no data: URL, or
    the id of a file that somebody uploaded."""
    kind = part.get("type")
    if not isinstance(kind, str):
        return False
    urls = [part.get("url"), part.get("image_url"), part.get("file_url"), part.get("video_url"), part.get("audio_url")]
    urls = [url.get("url") if isinstance(url, dict) else url for url in urls]
    return kind == "url" or "file_id" in part or any(isinstance(url, str) and not url.startswith("data:") for url in urls)
