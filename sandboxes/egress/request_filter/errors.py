"""Refusals of model requests."""

from typing import Any

INVALID_REQUEST = "invalid_request"
URLS_NOT_FETCHED = "urls_not_fetched"  # URLs, and ids of files and other objects that the provider stores
TOOL_NOT_ALLOWED = "tool_not_allowed"


def build_error_body(code: str, message: str, **details: Any) -> dict[str, Any]:
    """Build an error body that both the OpenAI and the Anthropic SDK understand. `details` are further fields of the error."""
    return {"type": "error", "error": {"type": code, "code": code, "message": message, "param": None, **details}}


class InvalidRequest(Exception):
    """The request cannot be forwarded. `code` and `message` give the reason."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)
