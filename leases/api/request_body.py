"""The body of a request: read no further than its limit, and the JSON in it."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from django.http import HttpRequest
from rest_framework.exceptions import UnsupportedMediaType

from leases.errors import InvalidRequest, LengthRequired, RequestTooLarge

CHUNK_BYTES = 1 << 16
MAX_JSON_DEPTH = 100  # levels of nesting: less than any reader's stack, here and in a sandbox
SURROGATE_ESCAPE_RE = re.compile(r"\\u[dD][89a-fA-F]")


def read_body(request: HttpRequest, limit: int) -> bytes:
    """The whole body; see `chunks`."""
    return b"".join(iter_body(request, limit))


def iter_body(request: HttpRequest, limit: int) -> Iterator[bytes]:
    """The body, piece by piece. TooLarge past `limit` bytes: before any is read if the length was announced, else on the
    way."""
    too_large = RequestTooLarge(f"The body is larger than {limit} bytes.")
    chunked = "HTTP_TRANSFER_ENCODING" in request.META
    announced = 0 if chunked else _parse_content_length(request)
    if announced > limit:
        raise too_large
    if chunked and not request.META.get("wsgi.input_terminated"):
        raise LengthRequired()
    # Django takes a body without a Content-Length for an empty one: a chunked one is read from the server itself.
    source, size = request.META["wsgi.input"] if chunked else request, 0
    while chunk := source.read(CHUNK_BYTES):
        size += len(chunk)
        if size > limit:
            raise too_large
        yield chunk
    if size < announced:
        raise InvalidRequest("", "The body ended before its Content-Length.")


def _parse_content_length(request: HttpRequest) -> int:
    length = request.META.get("CONTENT_LENGTH") or "0"
    if not re.fullmatch(r"[0-9]{1,18}", length, re.ASCII):
        raise InvalidRequest("Content-Length", "Not a number of bytes.")
    return int(length)


def parse_json_object(request: HttpRequest, body: bytes) -> dict[str, Any]:
    """The JSON object in a body, {} if that is empty. Invalid for whatever could not be passed on as it is: NaN, lone
    surrogates, and nesting deeper than DEEPEST."""
    if body and request.content_type != "application/json":
        raise UnsupportedMediaType(request.content_type or "", 'Send "Content-Type: application/json".')
    try:
        text = body.decode() or "{}"
        document = json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite_float)
        if SURROGATE_ESCAPE_RE.search(text):
            json.dumps(document, ensure_ascii=False).encode()
    except json.JSONDecodeError as wrong:
        raise InvalidRequest("", f"The body is not JSON: {wrong}") from None
    except UnicodeError:
        raise InvalidRequest("", "The body is not valid Unicode: its JSON is UTF-8, and surrogates come in pairs.") from None
    except ValueError as wrong:
        raise InvalidRequest("", f"A number in the body is out of range: {wrong}") from None
    except RecursionError:
        raise InvalidRequest("", f"The body is nested deeper than {MAX_JSON_DEPTH} levels.") from None
    if not isinstance(document, dict):
        raise InvalidRequest("", "The body is not a JSON object.")
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _measure_depth(document) > MAX_JSON_DEPTH:
        raise InvalidRequest("", f"The body is nested deeper than {MAX_JSON_DEPTH} levels.")
    return document


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON.")


def _parse_finite_float(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is too large.")
    return value


def _measure_depth(document: Any) -> int:
    """How deep a document is nested, counted no further than one level too many."""
    levels, present = 0, [document]
    while levels <= MAX_JSON_DEPTH and (present := [value for value in present if isinstance(value, dict | list)]):
        levels += 1
        present = [inner for value in present for inner in (value.values() if isinstance(value, dict) else value)]
    return levels
