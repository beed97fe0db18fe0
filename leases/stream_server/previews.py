"""Reverse proxy of previews: HTTP and WebSocket requests to a TCP port in a sandbox.

Everything that a program in a sandbox responds is untrusted. Below a path, previews share the host name of other pages, so a
response runs in an opaque origin (CSP sandbox) and cookies pass in neither direction. A preview with a host name of its own has
an origin of its own."""

import asyncio
import re
import time
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

import aiohttp
import structlog
from aiohttp import web
from django.conf import settings
from multidict import CIMultiDict
from yarl import URL

from leases.api_keys import KEY_PATTERN
from leases.stream_server import access
from leases.stream_server.address import build_preview_url
from leases.stream_server.connections import Connection, Connections
from leases.stream_server.grants import PreviewGrant
from leases.stream_server.port_connections import Ports
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.egress.relay import relay_messages

log = structlog.get_logger(__name__)
CHECK_SECONDS = 1.0  # for which the result of a check of the lease and the policy is used
MAX_CHECKS = 1024  # kept
MAX_MESSAGE_BYTES = 4 << 20  # one WebSocket message, in either direction
PING_INTERVAL_SECONDS = 30.0
# RFC 9110, section 7.6.1, and headers that concern one connection only.
HOP_HEADERS = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host",
})  # fmt: skip
FORWARDING_HEADERS = frozenset({
    "forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-prefix", "x-real-ip",
})  # fmt: skip
# Of a response below a path, whose origin all previews and terminals share.
PATH_RESPONSE_HEADERS = frozenset({
    "accept-ranges", "age", "allow", "cache-control", "content-disposition", "content-encoding", "content-language",
    "content-length", "content-location", "content-range", "content-security-policy", "content-type", "date", "etag", "expires",
    "last-modified", "location", "pragma", "retry-after", "vary", "x-content-type-options",
})  # fmt: skip
# Of any other response: they act on more than it, such as on the whole origin, its site, or a proxy before this server.
DROPPED_RESPONSE_HEADERS = HOP_HEADERS | {
    "alt-svc", "clear-site-data", "expect-ct", "nel", "origin-agent-cluster", "public-key-pins", "report-to",
    "reporting-endpoints", "service-worker-allowed", "strict-transport-security", "x-sendfile", "x-lighttpd-send-file",
}  # fmt: skip
DROPPED_RESPONSE_PREFIXES = ("access-control-", "x-accel-")
DOMAIN_ATTRIBUTE = re.compile(r";\s*domain\s*(=|;|$)", re.I)  # of a cookie that other hosts get, too
API_KEY = re.compile(rf"(?i:bearer\s+){KEY_PATTERN}")  # that a client sends to every URL of this installation
SANDBOX_POLICY = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts"


@dataclass
class WebSocketBytes:
    """Bytes of the messages of one WebSocket connection."""

    sent_bytes: int | None = 0
    received_bytes: int = 0


@dataclass
class Previews:
    """Handler of previews. `handle_path` serves /previews/GRANT/..., and `handle_host` GRANT.LEASEHOLD_PREVIEW_DOMAIN."""

    database: DatabaseThreads
    connections: Connections
    ports: Ports
    now: Callable[[], datetime]
    _checks: dict[PreviewGrant, tuple[float, str]] = field(default_factory=dict)

    async def handle_path(self, request: web.Request) -> web.StreamResponse:
        """Forward a request below a path. Raise the errors of `find_preview_agent`."""
        text = request.match_info["grant"]
        prefix = f"/previews/{text}"
        path = request.rel_url.raw_path.removeprefix(prefix)
        if not path:
            query = f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else ""
            raise web.HTTPPermanentRedirect(f"./{text}/{query}")  # relative: a proxy may serve this path below another
        return await self._handle(request, text, path, prefix=prefix)

    async def handle_host(self, request: web.Request, text: str) -> web.StreamResponse:
        """Forward a request to a host name of its own. Raise the errors of `find_preview_agent`."""
        return await self._handle(request, text, request.rel_url.raw_path, prefix="")

    async def _handle(self, request: web.Request, text: str, path: str, *, prefix: str) -> web.StreamResponse:
        grant = PreviewGrant.decode(text, now=self.now())
        url = URL.build(
            scheme="http", host="localhost", port=grant.port, path=path, query_string=request.rel_url.raw_query_string,
            encoded=True,
        )  # fmt: skip
        with self.connections.track(grant) as connection:
            container = await self._find_agent(grant)
            public_url = build_preview_url(grant) if settings.STREAM_URL else ""
            headers = _build_request_headers(request, prefix=prefix, public_url=public_url)
            async with self.ports.use(container, grant.port) as session:
                try:
                    if _is_websocket(request):
                        return await _forward_websocket(request, session, url, headers, connection)
                    return await _forward_http(request, session, url, headers, connection, has_own_host=not prefix)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    log.info("preview failed", lease=str(grant.lease), port=grant.port, error=type(error).__name__)
                    if connection.has_response:
                        _abort(request)
                        raise
                    raise web.HTTPBadGateway(text=f"No response from port {grant.port} in the sandbox.") from error
                except asyncio.CancelledError:
                    _end_revoked(request, connection)
                    raise

    async def _find_agent(self, grant: PreviewGrant) -> str:
        """Return the agent's id of the sandbox. A page of many files is checked once."""
        checked_at, container = self._checks.get(grant, (0.0, ""))
        if time.monotonic() > checked_at + CHECK_SECONDS:
            container = await self.database.run(access.find_preview_agent, grant, now=self.now())
            if len(self._checks) >= MAX_CHECKS:
                self._checks.clear()
            self._checks[grant] = time.monotonic(), container
        return container


def _end_revoked(request: web.Request, connection: Connection) -> None:
    """End the request of a preview that has ended: with its error, or an incomplete response, which must not look complete."""
    if connection.ended is None:
        return
    if not connection.has_response:
        raise connection.ended
    _abort(request)


def _abort(request: web.Request) -> None:
    """Cut the connection of a response that has begun. An error would be written into its body, or follow it as another one."""
    if request.transport:
        request.transport.abort()


def _is_websocket(request: web.Request) -> bool:
    return request.headers.get("Upgrade", "").lower() == "websocket"


def _build_request_headers(request: web.Request, *, prefix: str, public_url: str = "") -> "CIMultiDict[str]":
    """Build the headers for the program: without credentials of the control plane, and with the client's view of the URL.

    `public_url` is that of the preview behind a proxy, which the headers of a request cannot replace."""
    headers = _filter_headers(request.headers.items(), HOP_HEADERS | FORWARDING_HEADERS | {"cookie"})
    if prefix or API_KEY.match(headers.get("Authorization", "")):
        headers.pop("Authorization", None)
    if not prefix and (cookies := _filter_cookies(request.headers.get("Cookie", ""))):
        headers["Cookie"] = cookies
    public = urlsplit(public_url or f"{request.scheme}://{request.host}{prefix}/")
    headers["X-Forwarded-Host"], headers["X-Forwarded-Proto"] = public.netloc, public.scheme
    if prefix:
        headers["X-Forwarded-Prefix"] = public.path.rstrip("/")
    return headers


def _filter_headers(items: Iterable[tuple[str, str]], dropped: Container[str]) -> "CIMultiDict[str]":
    return CIMultiDict((name, value) for name, value in items if name.lower() not in dropped)


def build_response_headers(items: Iterable[tuple[str, str]], *, has_own_host: bool) -> "CIMultiDict[str]":
    """Build the headers for the visitor: none that acts on other previews, on the console, or on a proxy before this server."""
    headers = CIMultiDict[str]()
    for name, value in items:
        lower = name.lower()
        if has_own_host:
            is_passed = lower not in DROPPED_RESPONSE_HEADERS and not lower.startswith(DROPPED_RESPONSE_PREFIXES)
            is_passed = is_passed and not (lower == "set-cookie" and DOMAIN_ATTRIBUTE.search(value))
        else:
            is_passed = lower in PATH_RESPONSE_HEADERS
        if is_passed:
            headers.add(name, value)
    headers["Referrer-Policy"] = "no-referrer"  # the URL is a credential
    headers["X-Robots-Tag"] = "noindex"
    if not has_own_host:
        headers.add("Content-Security-Policy", SANDBOX_POLICY)
    return headers


def _filter_cookies(header: str) -> str:
    """Return the cookies without those of the console, which a browser sends if its domain covers previews."""
    cookies = SimpleCookie()
    with suppress(CookieError):
        cookies.load(header)
    for name in (settings.SESSION_COOKIE_NAME, settings.CSRF_COOKIE_NAME):
        cookies.pop(name, None)
    return "; ".join(f"{morsel.key}={morsel.coded_value}" for morsel in cookies.values())


async def _forward_http(
    request: web.Request, session: aiohttp.ClientSession, url: URL, headers: "CIMultiDict[str]", connection: Connection,
    *, has_own_host: bool,
) -> web.StreamResponse:  # fmt: skip
    body = request.content if request.can_read_body else None
    forwarding = session.request(
        request.method, url, headers=headers, data=body, allow_redirects=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )  # fmt: skip
    async with forwarding as upstream:
        passed = build_response_headers(upstream.headers.items(), has_own_host=has_own_host)
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=passed)
        connection.has_response = True
        await response.prepare(request)
        async for chunk in upstream.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def _forward_websocket(
    request: web.Request, session: aiohttp.ClientSession, url: URL, headers: "CIMultiDict[str]", connection: Connection
) -> web.StreamResponse:
    if not web.WebSocketResponse().can_prepare(request):
        raise web.HTTPBadRequest(text="Malformed WebSocket handshake.")
    protocols = [name.strip() for name in headers.popall("Sec-WebSocket-Protocol", [""])[0].split(",") if name.strip()]
    passed = _filter_headers(headers.items(), {name.lower() for name in headers if name.lower().startswith("sec-websocket-")})
    connect = session.ws_connect(
        url, protocols=protocols, headers=passed, max_msg_size=MAX_MESSAGE_BYTES, heartbeat=PING_INTERVAL_SECONDS,
        timeout=aiohttp.ClientWSTimeout(ws_close=5.0),
    )  # fmt: skip
    async with connect as upstream:
        client = web.WebSocketResponse(
            protocols=[upstream.protocol] if upstream.protocol else [],
            max_msg_size=MAX_MESSAGE_BYTES, heartbeat=PING_INTERVAL_SECONDS,
        )  # fmt: skip
        connection.has_response = True
        await client.prepare(request)
        await relay_messages(client, upstream, WebSocketBytes())
        return client
