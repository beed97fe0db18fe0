"""JSON rendering and content negotiation of the API."""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from rest_framework.exceptions import NotAcceptable
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from sandboxes.db.clock import format_timestamp


class JsonRenderer(BaseRenderer):
    """Render JSON in ASCII, with datetimes in ISO 8601 UTC.

    Non-ASCII characters are escaped: text from a sandbox can contain lone surrogates, which UTF-8 cannot encode."""

    media_type, format, charset = "application/json", "json", None

    def render(
        self, data: Any, accepted_media_type: str | None = None, renderer_context: Mapping[str, Any] | None = None
    ) -> bytes:
        return encode_json(data)


class Negotiation(DefaultContentNegotiation):
    """Select the view's first renderer if the request selects none. An unknown Accept is not an error."""

    def select_renderer(
        self, request: Request, renderers: Iterable[BaseRenderer], format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        renderers = list(renderers)
        default = renderers[0], renderers[0].media_type
        if len(renderers) == 1:
            return default
        try:
            return super().select_renderer(request, renderers, format_suffix)
        except NotAcceptable:
            return default


def encode_json(data: Any) -> bytes:
    return json.dumps(data, default=_encode_value).encode()


def _encode_value(value: Any) -> str:
    if isinstance(value, datetime):
        return format_timestamp(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
