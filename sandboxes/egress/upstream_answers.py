"""Answers of the model upstream: errors, encodings, and the headers that are passed on to the sandbox."""

import aiohttp
import structlog
from aiohttp import web
from django.conf import settings

from sandboxes.egress.request_filter import is_allowed
from sandboxes.egress.responses import build_error_response
from sandboxes.egress.settlement import CallResult
from sandboxes.models import LlmCall
from sandboxes.redaction.streams import SecretRedactor

log = structlog.get_logger(__name__)
MAX_ERROR_BYTES = 16 << 10  # of an upstream's error body that is passed on to the sandbox
PASSED_ERROR_STATUSES = (400, 404, 413, 422, 429, 503, 529)  # the sandbox can act on them: change the request, or wait
KEPT_ERROR_STATUSES = (502, 504)  # passed on without the upstream's body, which may show its internals
# Headers of the upstream that SDKs and CLIs act on. Each is passed on as the upstream sent it.
PASSED_HEADER_PATTERNS = ["retry-after", "retry-after-ms", "x-should-retry", "x-ratelimit-*", "anthropic-ratelimit-*"]
MAX_PASSED_HEADERS, MAX_PASSED_HEADER_CHARACTERS = 40, 200
DECODED_ENCODINGS = ("", "identity", "gzip", "deflate", "br", "zstd")  # by aiohttp; the request asks for identity


async def translate_error(response: aiohttp.ClientResponse, result: CallResult) -> web.Response:
    """Build the response for the sandbox to an error of the upstream, without credentials and without its internals.

    `result.status` becomes the status sent to the sandbox; the code has that of the upstream."""
    result.outcome, result.code = LlmCall.Outcome.FAILED, f"upstream_{response.status}"
    content = await _read_prefix(response, MAX_ERROR_BYTES + len(settings.LLM_API_KEY))
    content_type = {"Content-Type": response.headers["Content-Type"]} if "Content-Type" in response.headers else {}
    is_readable = get_encoding(response) in DECODED_ENCODINGS
    holds_secret = has_secret(content) or has_secret(" ".join(content_type.values()).encode())
    passed = select_headers(response)
    if response.status in PASSED_ERROR_STATUSES and is_readable and not holds_secret:
        return web.Response(status=response.status, body=content[:MAX_ERROR_BYTES], headers=passed | content_type)
    log.warning("upstream refused a call", status=response.status, body=_redact(content)[:500])
    if response.status in (401, 403, 407):
        message = "The model's provider rejected the control plane's credentials."
    else:
        message = f"The model's provider answered {response.status}."
    result.status = response.status if response.status in KEPT_ERROR_STATUSES else 502
    answer = build_error_response(result.status, result.code, message)
    answer.headers.update(passed)
    return answer


def get_encoding(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("Content-Encoding", "").strip().lower()


def is_decoding_error(error: BaseException | None) -> bool:
    """Return whether an error of the client comes from the decoding of a body."""
    while error is not None and not isinstance(error, aiohttp.http_exceptions.ContentEncodingError):
        error = error.__cause__
    return error is not None


def select_headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    """Return the headers of the upstream's response that are passed on. Long ones and those with the credential are not."""
    passed: dict[str, str] = {}
    for name, value in response.headers.items():
        is_plain = value.isascii() and len(value) <= MAX_PASSED_HEADER_CHARACTERS and len(passed) < MAX_PASSED_HEADERS
        if is_plain and is_allowed(name.lower(), PASSED_HEADER_PATTERNS) and not has_secret(value.encode()):
            passed[name] = value
    return passed


async def _read_prefix(response: aiohttp.ClientResponse, size: int) -> bytes:
    """Read up to the first `size` bytes of a response body."""
    content = b""
    while len(content) < size and (chunk := await response.content.read(size - len(content))):
        content += chunk
    return content


def has_secret(content: bytes) -> bool:
    return SecretRedactor(settings.LLM_API_KEY).redact(content) != content


def _redact(content: bytes) -> str:
    text = SecretRedactor(settings.LLM_API_KEY).redact(content).decode("utf-8", "replace")
    return text.replace(settings.LLM_API_KEY, "********") if settings.LLM_API_KEY else text
