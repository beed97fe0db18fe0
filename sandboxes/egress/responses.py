"""Headers, error responses and write failures shared by the egress server's handlers."""

from collections.abc import Awaitable
from typing import Any

from aiohttp import web

from sandboxes.egress.request_filter import build_error_body

# Of a model answer: the rest of the limits, after this call's estimate.
REMAINING_USD_HEADER, REMAINING_TOKENS_HEADER = "X-Leasehold-Remaining-USD", "X-Leasehold-Remaining-Tokens"
# Headers between nginx and the egress server.
SLOT_HEADER, CALL_ID_HEADER, CODE_HEADER = "X-Leasehold-Slot", "X-Request-Id", "X-Leasehold-Code"


class ClientDisconnected(Exception):
    """The sandbox closed its connection before the response was complete."""


async def await_write(write: Awaitable[Any]) -> None:
    """Await a write to the sandbox. Raise ClientDisconnected if the sandbox has closed the connection."""
    try:
        await write
    except ConnectionResetError:
        raise ClientDisconnected from None


def build_error_response(status: int, code: str, message: str, **details: Any) -> web.Response:
    """Build an error response in the format of the OpenAI and Anthropic SDKs. 429 and 503 carry Retry-After: 1 (second).

    402 carries `x-should-retry: false`, which these SDKs obey. `details` are further fields of the error."""
    headers = {CODE_HEADER: code} | ({"Retry-After": "1"} if status in (429, 503) else {})
    headers |= {"x-should-retry": "false"} if status == 402 else {}
    return web.json_response(build_error_body(code, message, **details), status=status, headers=headers)


def read_bearer(request: web.BaseRequest) -> str:
    """Return the bearer token of a request, or an empty text."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
