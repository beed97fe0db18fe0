"""One POST to an address that an operator wrote down: where it may lead, and for how long it may take.

The name is resolved once and what was found is what is connected to: a name that leads elsewhere at the second look gains
nothing. No redirect is followed, no proxy of the environment is used, and of the answer only its status is read."""

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

TIMEOUT_SECONDS = 10.0  # seconds, from the name's resolution to the answer's status


@dataclass(frozen=True)
class PostResult:
    """What became of it: a status, or why there is none."""

    status: int | None = None
    error: str = ""  # "": it arrived
    retry_after: timedelta = timedelta(0)


class _DestinationRefused(Exception):
    """It may not go there, or there is no such place."""


def post(
    url: str, body: bytes, headers: Mapping[str, str], *, internal: bool = False, timeout: float = TIMEOUT_SECONDS
) -> PostResult:
    """Send it there, and say what came back; whatever goes wrong is an answer. `internal`: the address need not be public."""
    until = time.monotonic() + timeout
    try:
        to = yarl.URL(url, encoded=True)  # by whose parts we judge is by whose parts we connect
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
        return PostResult(
            error=f"Its certificate is not good: {getattr(wrong.certificate_error, 'verify_message', 'unknown')}."
        )
    except aiohttp.ServerDisconnectedError:
        return PostResult(error="It closed the connection without an answer.")
    except OSError as failed:  # aiohttp's errors of connections are some, too
        why = os.strerror(failed.errno) if failed.errno else "the connection broke"
        return PostResult(error=f"It could not be reached: {why}.")
    except (aiohttp.ClientError, ValueError) as failed:  # their texts quote the address and the answer
        return PostResult(error=f"No answer in HTTP: {type(failed).__name__}.")


def _resolve(host: str, timeout: float) -> list[Address]:
    """Every address of a name. In a thread of its own, as nothing else can stop waiting for it."""
    found: SimpleQueue[Any] = SimpleQueue()

    def look() -> None:
        try:
            found.put(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as unknown:
            found.put(unknown)

    threading.Thread(target=look, daemon=True).start()
    try:
        infos = found.get(timeout=timeout)
    except Empty:
        raise TimeoutError from None
    if isinstance(infos, Exception):
        raise _DestinationRefused(f"The name {host} is not known.")
    return list(dict.fromkeys(ip_address(info[4][0]) for info in infos))


class _PinnedResolver(AbstractResolver):
    """Knows one name."""

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
    """Whom OpenSSL trusts, by default or by its variables. Reading all of them takes longer than a request."""
    return ssl.create_default_context()


def _parse_response(answer: aiohttp.ClientResponse) -> PostResult:
    status = answer.status
    if 200 <= status < 300:
        return PostResult(status)
    said = HTTPStatus(status).phrase if status in {*HTTPStatus} else ""
    wait = answer.headers.get("Retry-After", "")
    return PostResult(
        status,
        f"It answered {status} {said}".strip() + ".",
        timedelta(seconds=int(wait) if wait.isdecimal() and len(wait) < 7 else 0),
    )
