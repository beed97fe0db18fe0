"""Allow list for model requests: paths, fields, tools and content, down to the leaves.

A request comes from an untrusted program and is forwarded with the control plane's credentials. The modules
`anthropic`, `chat`, `responses` and `text` declare the known fields of each API once, and `cleaning` applies them. Imports
nothing else of this project."""

from sandboxes.egress.request_filter.betas import filter_betas, is_allowed
from sandboxes.egress.request_filter.dropped_fields import COUNT_NAME, DroppedFields
from sandboxes.egress.request_filter.errors import InvalidRequest, build_error_body
from sandboxes.egress.request_filter.requests import (
    FIELDS_BY_PATH,
    MCP_PATH,
    MODELS_PATH,
    SanitizedRequest,
    sanitize_request,
)

__all__ = [
    "COUNT_NAME", "FIELDS_BY_PATH", "MCP_PATH", "MODELS_PATH", "DroppedFields", "InvalidRequest", "SanitizedRequest",
    "build_error_body", "filter_betas", "is_allowed", "sanitize_request",
]  # fmt: skip
