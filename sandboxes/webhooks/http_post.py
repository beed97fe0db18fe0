"""HTTP POST to a configured URL, protected against server-side request forgery and slow receivers.

The host name is resolved once, and the connection uses exactly the checked addresses: DNS rebinding has no effect. Redirects
are not followed, and proxy settings of the environment are ignored. Only the status and the Retry-After header of the response
are read."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from http import HTTPStatus
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import Any

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from sandboxes import http_transport
from sandboxes.http_calls import HttpAnswer
from sandboxes.webhooks.addresses import Address, get_refusal_reason
from sandboxes.webhooks.post_result import PostResult

TIMEOUT_SECONDS = 10.0  # from name resolution to the status of the response


class _DestinationRefused(Exception):
    """The destination is not allowed or does not exist."""


def post(
    url: str, body: bytes, headers: Mapping[str, str], *, internal: bool = False, timeout: float = TIMEOUT_SECONDS
) -> PostResult:
    """Send a POST and return the result. Failures are results, not exceptions. `internal` allows private addresses."""
    deadline = time.monotonic() + timeout
    try:
        destination = yarl.URL(url, encoded=True)  # parsed once, so that the check and the connection have the same host
        host = destination.host or ""
        addresses = _resolve(host, timeout)
        for address in addresses:
            if reason := get_refusal_reason(address, internal=internal):
                raise _DestinationRefused(f"{host} is {address}: {reason}")
        return asyncio.run(_post(destination, body, headers, addresses, deadline - time.monotonic()))
    except _DestinationRefused as refused:
        return PostResult(error=str(refused))
    except TimeoutError:
        return PostResult(error=f"No response within {timeout:g} s.")
    except aiohttp.ClientConnectorCertificateError as failed:
        return PostResult(error=f"Invalid certificate: {getattr(failed.certificate_error, 'verify_message', 'unknown')}.")
    except aiohttp.ServerDisconnectedError:
        return PostResult(error="The server closed the connection without a response.")
    except OSError as failed:  # includes the connection errors of aiohttp
        cause = os.strerror(failed.errno) if failed.errno else "the connection broke"
        return PostResult(error=f"Connection failed: {cause}.")
    except (aiohttp.ClientError, ValueError) as failed:  # the texts of these errors quote the URL and the response
        return PostResult(error=f"Invalid HTTP response: {type(failed).__name__}.")


def _resolve(host: str, timeout: float) -> list[Address]:
    """Return all addresses of a host name. getaddrinfo has no timeout and therefore runs in its own thread."""
    results: SimpleQueue[Any] = SimpleQueue()

    def resolve() -> None:
        try:
            results.put(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as failed:
            results.put(failed)

    threading.Thread(target=resolve, daemon=True).start()
    try:
        infos = results.get(timeout=timeout)
    except Empty:
        raise TimeoutError from None
    if isinstance(infos, Exception):
        raise _DestinationRefused(f"The host name {host} is unknown.")
    return list(dict.fromkeys(ip_address(info[4][0]) for info in infos))


class _PinnedResolver(AbstractResolver):
    """Resolver that returns only the addresses that passed the address filter."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.addresses = addresses

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=str(address), port=port, proto=0, flags=socket.AI_NUMERICHOST,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
            )
            for address in self.addresses
        ]  # fmt: skip

    async def close(self) -> None:
        pass


async def _post(
    destination: yarl.URL, body: bytes, headers: Mapping[str, str], addresses: Sequence[Address], timeout: float
) -> PostResult:
    answer = await http_transport.fetch(
        "POST", destination, resolver=_PinnedResolver(addresses), timeout=timeout, max_bytes=0, data=body, headers=headers,
        ssl_context=http_transport.load_ssl_context() if destination.scheme == "https" else False,
    )  # fmt: skip
    return _parse_answer(answer)


def _parse_answer(answer: HttpAnswer) -> PostResult:
    status = answer.status
    if 200 <= status < 300:
        return PostResult(status)
    phrase = HTTPStatus(status).phrase if status in {*HTTPStatus} else ""
    retry_after = answer.headers.get("Retry-After", "")
    return PostResult(
        status,
        f"Status {status} {phrase}".strip() + ".",
        timedelta(seconds=int(retry_after) if retry_after.isdecimal() and len(retry_after) < 7 else 0),
    )
