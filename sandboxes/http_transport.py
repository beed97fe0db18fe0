"""Transport of outgoing HTTP calls: name resolution, proxy, TLS, time limit and size limit."""

import asyncio
import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult
from requests.utils import DEFAULT_CA_BUNDLE_PATH

from sandboxes.http_calls import CallFailed, HttpAnswer

READ_BYTES = 64 << 10


class AnswerTooLarge(ValueError):
    """The body of the answer is larger than the limit of the call."""


class ThreadResolver(AbstractResolver):
    """Resolver whose calls run in threads of their own: getaddrinfo has no timeout, and a loop would wait for its pool."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Any] = loop.create_future()

        def finish(infos: Any) -> None:
            if not found.done():
                found.set_result(infos)

        def look_up() -> None:
            try:
                infos: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                infos = error
            with suppress(RuntimeError):  # the call has timed out, and its loop is closed
                loop.call_soon_threadsafe(finish, infos)

        threading.Thread(target=look_up, name="resolver", daemon=True).start()
        infos = await found
        if isinstance(infos, Exception):
            raise OSError(None, f"The host name {host} is unknown.") from infos
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, proto=0, flags=socket.AI_NUMERICHOST, family=int(family)
            )
            for family, _, _, _, address in infos
        ]  # fmt: skip

    async def close(self) -> None:
        pass


def send(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    json: Any,
    params: Mapping[str, str | int] | None,
    timeout: float,
    max_bytes: int,
) -> HttpAnswer:
    """Like `http_calls.send`."""
    request = fetch(
        method, yarl.URL(url), resolver=ThreadResolver(), ssl_context=_load_service_context(), headers=headers, json=json,
        params=params, proxy=_find_proxy(url), timeout=timeout, max_bytes=max_bytes,
    )  # fmt: skip
    try:
        return asyncio.run(request)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise CallFailed(type(error).__name__) from None


async def fetch(
    method: str,
    url: yarl.URL,
    *,
    resolver: AbstractResolver,
    ssl_context: ssl.SSLContext | bool,
    timeout: float,
    max_bytes: int,
    **options: Any,
) -> HttpAnswer:
    """Send a request on a connection of its own. With `max_bytes` 0 the body of the answer is not read.

    Raise TimeoutError, AnswerTooLarge, OSError, and the errors of aiohttp."""
    connector = aiohttp.TCPConnector(resolver=resolver, ssl=ssl_context, force_close=True)
    async with (
        asyncio.timeout(timeout),
        aiohttp.ClientSession(
            connector=connector, trust_env=False, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None), skip_auto_headers=["Accept-Encoding"],
        ) as session,
        session.request(method, url, allow_redirects=False, **options) as response,
    ):  # fmt: skip
        content = bytearray()
        while max_bytes and (chunk := await response.content.read(READ_BYTES)):
            content += chunk
            if len(content) > max_bytes:
                raise AnswerTooLarge
        return HttpAnswer(response.status, response.headers, bytes(content))


def load_ssl_context() -> ssl.SSLContext:
    """Return a context with OpenSSL's trust store, which SSL_CERT_FILE and SSL_CERT_DIR may replace."""
    return _load_default_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _load_default_context(*locations: str | None) -> ssl.SSLContext:
    """Return the default context. OpenSSL reads both variables itself: `locations` are their values, as the cache key, because
    loading the trust store takes longer than a request."""
    return ssl.create_default_context()


def _load_service_context() -> ssl.SSLContext:
    """Return a context with the authorities of REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE, else OpenSSL's and Mozilla's."""
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or ""
    return _load_bundle_context(bundle, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _load_bundle_context(bundle: str, *locations: str | None) -> ssl.SSLContext:
    if bundle:
        is_directory = os.path.isdir(bundle)
        return ssl.create_default_context(cafile=None if is_directory else bundle, capath=bundle if is_directory else None)
    context = ssl.create_default_context()
    context.load_verify_locations(cafile=DEFAULT_CA_BUNDLE_PATH)
    return context


def _find_proxy(url: str) -> str | None:
    """Return the URL of the proxy that the environment sets for a URL. Credentials of ~/.netrc are not used."""
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.hostname):
        return None
    proxies: Sequence[str] = [urllib.request.getproxies().get(name, "") for name in (parts.scheme, "all")]
    return next(filter(None, proxies), None)
