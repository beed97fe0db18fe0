"""HTTP requests to services that operators have configured: one time limit for the whole call, and a size limit of the answer.

A timeout of each read, as the client `requests` has it, does not limit a call: a server may send a byte every few seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ANSWER_BYTES = 8 << 20


class CallFailed(Exception):
    """No answer was received. The message names the kind of the failure, and neither the URL nor a credential."""


@dataclass(frozen=True)
class HttpAnswer:
    """Complete answer. `headers` is case-insensitive."""

    status: int
    headers: Mapping[str, str]
    content: bytes


def send(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    json: Any = None,
    params: Mapping[str, str | int] | None = None,
    timeout: float,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> HttpAnswer:
    """Send a request and return its answer, of any status. Redirects are not followed. Raise CallFailed.

    `timeout` is that of the whole call, from the name resolution to the last byte of the answer, in seconds. The proxy settings
    of the environment apply."""
    from sandboxes import http_transport  # imports aiohttp, 9 MiB that an installation without such services does not need

    return http_transport.send(method, url, headers=headers, json=json, params=params, timeout=timeout, max_bytes=max_bytes)
