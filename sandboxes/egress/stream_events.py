"""Classification of events and documents of model responses: final events, errors, and the size of the generated text."""

import json
from typing import Any

FINAL_EVENT_TYPES = ("message_stop", "response.completed", "response.incomplete")
ERROR_EVENT_TYPES = ("error", "response.failed")
# Fields with generated text, and fields that contain such fields, in messages, chat completions, completions and responses.
TEXT_FIELDS = frozenset({
    "content", "text", "thinking", "partial_json", "reasoning_content", "reasoning", "refusal", "arguments", "input",
    "transcript",
})  # fmt: skip
CONTAINER_FIELDS = frozenset({
    "choices", "message", "delta", "content", "content_block", "tool_calls", "function_call", "function", "custom", "audio",
    "output", "summary",
})  # fmt: skip
MAX_DEPTH = 10  # of the containers


def is_final(data: bytes, document: Any) -> bool:
    """Return whether an event ends a stream, so that SDKs stop reading."""
    return data == b"[DONE]" or (isinstance(document, dict) and document.get("type") in FINAL_EVENT_TYPES)


def is_error(name: str, document: Any) -> bool:
    """Return whether an event, with its name in the stream if it has one, ends a stream with an error."""
    if not isinstance(document, dict):
        return name in ERROR_EVENT_TYPES
    kind = document.get("type")
    if name in ERROR_EVENT_TYPES or kind in ERROR_EVENT_TYPES:
        return True
    return kind is None and bool(document.get("error"))  # chat completions


def is_error_document(document: Any) -> bool:
    """Return whether a response that is no stream is an error in place of an answer. Some vendors send it with status 200."""
    if not is_error("", document):
        return False
    return document.get("status") == "failed" or not any(
        document.get(name) for name in ("choices", "content", "output", "data")
    )


def states_end(document: Any) -> bool:
    """Return whether an event says that the generation has ended. Usage may follow."""
    if not isinstance(document, dict):
        return False
    if document.get("type") == "message_delta":
        delta = document.get("delta")
        return isinstance(delta, dict) and bool(delta.get("stop_reason"))
    choices = document.get("choices")
    return isinstance(choices, list) and any(isinstance(choice, dict) and choice.get("finish_reason") for choice in choices)


def measure_event(document: Any) -> int:
    """Return the bytes of generated text in an event. Events that repeat the text of earlier ones count as 0."""
    if not isinstance(document, dict):
        return 0
    kind = document.get("type")
    if isinstance(kind, str) and kind.startswith("response."):
        delta = document.get("delta")
        is_text = kind.endswith(".delta") and isinstance(delta, str) and kind != "response.audio.delta"
        return len(delta.encode("utf-8", "replace")) if is_text and isinstance(delta, str) else 0
    return measure_document(document)


def measure_document(document: Any, depth: int = MAX_DEPTH) -> int:
    """Return the bytes of the generated text in a response."""
    if depth <= 0:
        return 0
    if isinstance(document, list):
        return sum(measure_document(item, depth - 1) for item in document)
    if not isinstance(document, dict):
        return 0
    size = 0
    for name, value in document.items():
        if isinstance(value, str):
            # Some vendors send the same reasoning under both names.
            is_repeated = name == "reasoning" and isinstance(document.get("reasoning_content"), str)
            size += len(value.encode("utf-8", "replace")) if name in TEXT_FIELDS and not is_repeated else 0
        elif name in CONTAINER_FIELDS:
            size += measure_document(value, depth - 1)
        elif name == "input" and isinstance(value, dict):  # arguments of a tool call
            size += len(json.dumps(value, ensure_ascii=False))
    return size
