"""Request body parsers: size limits, strict JSON and raw streams.

Each view has exactly one parser, which gets the HttpRequest as its stream. It takes its size limit from the view's
`max_body_bytes`. Parsers that hold the whole body leave it in `request.raw_body`: the fingerprint of a request with an
Idempotency-Key is computed from it."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from django.http import HttpRequest
from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.parsers import BaseParser

from leases.errors import InvalidRequest, LengthRequired, RequestTooLarge, UnsupportedEncoding

CHUNK_BYTES = 1 << 16
MAX_DISCARDED_BYTES = 128 << 20  # of a refused body: twice the largest file
MAX_JSON_DEPTH = 100  # levels of nesting; below the recursion limit of the JSON parsers here and in a sandbox
MAX_REPORTED_NAME_CHARS = 200
SURROGATE_ESCAPE_RE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonParser(BaseParser):
    """Read one JSON object, {} for an empty body."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        assert parser_context is not None
        body = parser_context["request"].raw_body = read_body(stream, parser_context["view"].max_body_bytes)
        return parse_json_object(stream, body)


class StreamParser(BaseParser):
    """Iterate over the body in chunks, of any media type, without holding it in memory, as long as the view permits that."""

    media_type = "*/*"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        assert parser_context is not None
        view = parser_context["view"]
        body = iter_body(stream, view.max_body_bytes, decodes=view.decodes_bodies)
        chunks: Iterator[bytes] = view.iter_while_permitted(body)
        return chunks


def read_body(request: HttpRequest, limit: int) -> bytes:
    """Return the whole body. Raises like `iter_body`."""
    return b"".join(iter_body(request, limit))


def iter_body(request: HttpRequest, limit: int, *, decodes: bool = False) -> Iterator[bytes]:
    """Yield the body in chunks. A body with a Content-Encoding is refused, unless the caller `decodes` it.

    Raises UnsupportedEncoding. Raises RequestTooLarge past `limit` bytes, before reading if the Content-Length announces more.
    Raises LengthRequired for a chunked body whose end the server does not mark, InvalidRequest for a body shorter than its
    Content-Length."""
    if not decodes and request.META.get("HTTP_CONTENT_ENCODING", "").strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding()
    too_large = RequestTooLarge(f"The body is larger than {limit} bytes.")
    chunked = "HTTP_TRANSFER_ENCODING" in request.META
    announced = 0 if chunked else _parse_content_length(request)
    if announced > limit:
        raise too_large
    if chunked and not request.META.get("wsgi.input_terminated"):
        raise LengthRequired()
    # Django treats a body without a Content-Length as empty, so a chunked one is read from the server's stream.
    source, size = request.META["wsgi.input"] if chunked else request, 0
    while chunk := source.read(CHUNK_BYTES):
        size += len(chunk)
        if size > limit:
            raise too_large
        yield chunk
    if size < announced:
        raise InvalidRequest("", "The body ended before its Content-Length.")


def discard_body(request: HttpRequest) -> None:
    """Read the rest of a refused body, so that a client that sends its whole request first can read the response.

    The web server resets a connection with an unread body, and the response is lost. At most MAX_DISCARDED_BYTES are read,
    and nothing of a longer announced body. A client that waits for "100 Continue" has sent no body yet."""
    chunked = "HTTP_TRANSFER_ENCODING" in request.META
    waits = request.META.get("HTTP_EXPECT", "").lower() == "100-continue" and not chunked
    if waits or not request.META.get("wsgi.input_terminated"):
        return
    remaining = MAX_DISCARDED_BYTES
    with suppress(InvalidRequest, OSError):  # the Content-Length is no number, or the client has closed the connection
        if not chunked and _parse_content_length(request) > MAX_DISCARDED_BYTES:
            return
        while remaining > 0 and (chunk := request.META["wsgi.input"].read(CHUNK_BYTES)):
            remaining -= len(chunk)


def _parse_content_length(request: HttpRequest) -> int:
    length = request.META.get("CONTENT_LENGTH") or "0"
    if not re.fullmatch(r"[0-9]{1,18}", length, re.ASCII):
        raise InvalidRequest("Content-Length", "Not a number of bytes.")
    return int(length)


def parse_json_object(request: HttpRequest, body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, {} if the body is empty.

    Raises UnsupportedMediaType for another Content-Type. Raises InvalidRequest for anything that could not be passed on
    unchanged: NaN and infinite numbers, lone surrogates, repeated names, nesting deeper than MAX_JSON_DEPTH."""
    if body and request.content_type != "application/json":
        raise UnsupportedMediaType(request.content_type or "", 'Send "Content-Type: application/json".')
    try:
        text = body.decode() or "{}"
        document = json.loads(
            text, parse_constant=_reject_constant, parse_float=_parse_finite_float, object_pairs_hook=_build_object
        )
        if SURROGATE_ESCAPE_RE.search(text):
            json.dumps(document, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise InvalidRequest("", f"The body is not JSON: {error}") from None
    except UnicodeError:
        raise InvalidRequest("", "The body is not valid Unicode: its JSON is UTF-8, and surrogates come in pairs.") from None
    except ValueError as error:
        raise InvalidRequest("", f"A number in the body is out of range: {error}") from None
    except RecursionError:
        raise InvalidRequest("", f"The body is nested deeper than {MAX_JSON_DEPTH} levels.") from None
    if not isinstance(document, dict):
        raise InvalidRequest("", "The body is not a JSON object.")
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _measure_depth(document) > MAX_JSON_DEPTH:
        raise InvalidRequest("", f"The body is nested deeper than {MAX_JSON_DEPTH} levels.")
    return document


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises InvalidRequest for a repeated name: parsers differ in which value counts (RFC 8259, 4)."""
    document = dict(pairs)
    if len(document) < len(pairs):
        names = Counter(name for name, _ in pairs)
        repeated = next(name for name, number in names.items() if number > 1)
        raise InvalidRequest(repeated[:MAX_REPORTED_NAME_CHARS], "Given more than once in one JSON object.")
    return document


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON.")


def _parse_finite_float(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is too large.")
    return value


def _measure_depth(document: Any) -> int:
    """Return the nesting depth of a document, counted up to MAX_JSON_DEPTH + 1."""
    levels, containers = 0, [document]
    while levels <= MAX_JSON_DEPTH and (containers := [value for value in containers if isinstance(value, dict | list)]):
        levels += 1
        containers = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
    return levels
