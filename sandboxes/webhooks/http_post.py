"""HTTP POST to a configured URL, protected against server-side request forgery and slow receivers.

The host name is resolved once and the connection uses exactly the checked addresses, so DNS rebinding has no effect.
Redirects are not followed, proxies of the environment are not used, and only the status of the answer is read."""

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from http import HTTPStatus
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import Any

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from sandboxes.webhooks.addresses import Address, get_refusal_reason

TIMEOUT_SECONDS = 10.0  # from name resolution to the status of the answer


@dataclass(frozen=True)
class PostResult:
    """Result of a POST: a status, or the reason why there is none."""

    status: int | None = None
    error: str = ""  # "" on success
    retry_after: timedelta = timedelta(0)


class _DestinationRefused(Exception):
    """The destination is not allowed or does not exist."""


def post(
    url: str, body: bytes, headers: Mapping[str, str], *, internal: bool = False, timeout: float = TIMEOUT_SECONDS
) -> PostResult:
    """Send a POST and return the result. Failures are results, not exceptions. `internal` allows private addresses."""
    until = time.monotonic() + timeout
    try:
        to = yarl.URL(url, encoded=True)  # the same parse result is checked and connected to
        host = to.host or ""
        addresses = _resolve(host, timeout)
        for address in addresses:
            if why := get_refusal_reason(address, internal=internal):
                raise _DestinationRefused(f"{host} is {address}: {why}")
        return asyncio.run(_post(to, body, headers, addresses, until - time.monotonic()))
    except _DestinationRefused as refused:
        return PostResult(error=str(refused))
    except TimeoutError:
        return PostResult(error=f"No answer within {timeout:g} s.")
    except aiohttp.ClientConnectorCertificateError as wrong:
        return PostResult(error=f"Invalid certificate: {getattr(wrong.certificate_error, 'verify_message', 'unknown')}.")
    except aiohttp.ServerDisconnectedError:
        return PostResult(error="The server closed the connection without an answer.")
    except OSError as failed:  # includes the connection errors of aiohttp
        why = os.strerror(failed.errno) if failed.errno else "the connection broke"
        return PostResult(error=f"Connection failed: {why}.")
    except (aiohttp.ClientError, ValueError) as failed:  # the texts of these errors quote the URL and the answer
        return PostResult(error=f"Invalid HTTP answer: {type(failed).__name__}.")


def _resolve(host: str, timeout: float) -> list[Address]:
    """Return all addresses of a host name. getaddrinfo has no timeout, so it runs in its own thread."""
    found: SimpleQueue[Any] = SimpleQueue()

    def resolve() -> None:
        try:
            found.put(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as unknown:
            found.put(unknown)

    threading.Thread(target=resolve, daemon=True).start()
    try:
        infos = found.get(timeout=timeout)
    except Empty:
        raise TimeoutError from None
    if isinstance(infos, Exception):
        raise _DestinationRefused(f"The host name {host} is unknown.")
    return list(dict.fromkeys(ip_address(info[4][0]) for info in infos))


class _PinnedResolver(AbstractResolver):
    """Resolver that returns the addresses checked before."""

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
    to: yarl.URL, body: bytes, headers: Mapping[str, str], addresses: Sequence[Address], timeout: float
) -> PostResult:
    trust = (
        _load_ssl_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")) if to.scheme == "https" else False
    )
    connector = aiohttp.TCPConnector(resolver=_PinnedResolver(addresses), ssl=trust, force_close=True)
    async with (
        asyncio.timeout(timeout),
        aiohttp.ClientSession(
            connector=connector, trust_env=False, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session,
        session.post(to, data=body, headers=headers, allow_redirects=False) as answer,
    ):  # fmt: skip
        return _parse_response(answer)


@cache
def _load_ssl_context(*places: str | None) -> ssl.SSLContext:
    """Return OpenSSL's trust store, by default or by its variables. Cached: loading takes longer than a request."""
    return ssl.create_default_context()


def _parse_response(answer: aiohttp.ClientResponse) -> PostResult:
    status = answer.status
    if 200 <= status < 300:
        return PostResult(status)
    phrase = HTTPStatus(status).phrase if status in {*HTTPStatus} else ""
    wait = answer.headers.get("Retry-After", "")
    return PostResult(
        status,
        f"Status {status} {phrase}".strip() + ".",
        timedelta(seconds=int(wait) if wait.isdecimal() and len(wait) < 7 else 0),
    )
