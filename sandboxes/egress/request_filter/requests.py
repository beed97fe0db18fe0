"""Paths of model requests, and the check of a whole body."""

from dataclasses import dataclass
from typing import Any

from sandboxes.egress.request_filter.anthropic import MESSAGES_REQUEST
from sandboxes.egress.request_filter.chat import CHAT_REQUEST
from sandboxes.egress.request_filter.cleaning import Cleaner
from sandboxes.egress.request_filter.errors import INVALID_REQUEST, InvalidRequest
from sandboxes.egress.request_filter.responses import RESPONSES_REQUEST
from sandboxes.egress.request_filter.shapes import RequestShape
from sandboxes.egress.request_filter.text import COMPLETIONS_REQUEST, EMBEDDINGS_REQUEST

RESPONSES_PATH = "/v1/responses"
FIELDS_BY_PATH: dict[str, RequestShape] = {
    "/v1/chat/completions": CHAT_REQUEST,
    "/v1/completions": COMPLETIONS_REQUEST,
    "/v1/embeddings": EMBEDDINGS_REQUEST,
    "/v1/messages": MESSAGES_REQUEST,
    "/v1/messages/count_tokens": MESSAGES_REQUEST,
    RESPONSES_PATH: RESPONSES_REQUEST,
}
MODELS_PATH = "/v1/models"  # answered by the egress server, free of charge
MCP_PATH = "/mcp"  # tools of the control plane, answered by the egress server
MAX_MODEL_CHARACTERS = 200


@dataclass(frozen=True)
class SanitizedRequest:
    """Body to forward, and the unknown fields that were dropped: their number, and up to 20 names such as `messages.name`."""

    body: dict[str, Any]
    dropped_count: int
    dropped_names: frozenset[str]


def sanitize_request(path: str, body: Any, *, default_model: str) -> SanitizedRequest:
    """Check the body of a request to one of the paths in FIELDS_BY_PATH. Raise InvalidRequest.

    Fields that would select another upstream or account, or that would falsify the cost record, are in no table."""
    shape = FIELDS_BY_PATH[path]
    if not isinstance(body, dict) or not body.get(shape.required):
        raise InvalidRequest(INVALID_REQUEST, f"The body must be a JSON object with the field {shape.required}.")
    model = body.get("model") or "default"
    if not isinstance(model, str) or len(model) > MAX_MODEL_CHARACTERS:
        raise InvalidRequest(INVALID_REQUEST, f"model must be a string of at most {MAX_MODEL_CHARACTERS} characters.")
    if body.get("stream") is not None and not isinstance(body["stream"], bool):
        raise InvalidRequest(INVALID_REQUEST, "stream must be true or false.")
    cleaner = Cleaner()
    allowed = cleaner.clean_request(body, shape)
    allowed["model"] = default_model if model == "default" else model
    if path == RESPONSES_PATH:
        allowed["store"] = False  # other agents use the same account and could read stored responses
    return SanitizedRequest(allowed, cleaner.dropped_count, frozenset(cleaner.dropped_names))
