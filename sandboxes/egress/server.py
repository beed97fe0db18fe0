"""LLM egress server: routes requests of sandboxes to the model upstream, the relay and the tools of the control plane.

nginx in front of this server terminates HTTP from sandboxes, admits the allowed paths, drops most headers of the requests, and
adds a header with the slot. Only this process holds the upstream credentials. Where sandboxes are not containers there is no
nginx, and the server listens on the slots' sockets itself."""

import asyncio
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from django.conf import settings
from django.db import Error as DatabaseError

from sandboxes.agent import internal
from sandboxes.agent.gateway import AgentGateway
from sandboxes.db import database_time
from sandboxes.egress import authorization, gateway_tokens, settlement
from sandboxes.egress.agent_sessions.server import AgentSessionServer
from sandboxes.egress.call_tracking import CallTracker, DatabaseThreads
from sandboxes.egress.mcp_tools import McpToolServer
from sandboxes.egress.model_calls import ModelCallProxy
from sandboxes.egress.public_listener import PublicListener
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.relay import RelayProxy
from sandboxes.egress.request_filter import FIELDS_BY_PATH, MCP_PATH, MODELS_PATH, DroppedFields
from sandboxes.egress.responses import CALL_ID_HEADER, SLOT_HEADER, ClientDisconnected, build_error_response, read_bearer
from sandboxes.egress.runner_channels import MAX_RESULT_BYTES, RunnerChannels
from sandboxes.errors import SandboxError, SigningKeyRevoked
from sandboxes.hosts import agent_routes
from sandboxes.hosts.directories import chmod_no_follow, ensure_directory, ensure_private_directory

log = structlog.get_logger(__name__)
CONNECT_TIMEOUT_SECONDS = 10.0  # to reach an upstream
READ_TIMEOUT_SECONDS = 300.0  # between two reads of an upstream's response
SLOT_KEY: web.AppKey[int | None] = web.AppKey("slot")
TOKEN_KEY: web.AppKey[bool] = web.AppKey("by_token")  # callers state a token: the gateway for remote sandboxes
RequestHandler = Callable[[web.Request, int, str], Awaitable[web.StreamResponse]]  # (request, slot, call id)


@dataclass(frozen=True)
class GatewayListener:
    """Address of the gateway for remote sandboxes. Without a certificate it speaks plain HTTP, behind a proxy that ends TLS."""

    host: str
    port: int
    certificate: str = ""  # path of a PEM file with the chain
    key: str = ""  # path of a PEM file; empty: in the file of the certificate
    internal_host: str = "127.0.0.1"  # for the processes of the control plane
    internal_port: int = 0  # 0: chosen by the kernel
    internal_address: str = ""  # host:port by which they reach it; empty: the host and port above
    internal_certificate: str = ""  # path of a PEM file with the chain; empty: without TLS
    internal_key: str = ""  # path of a PEM file; empty: in the file of the certificate


@dataclass
class EgressServer:
    """Egress server of one process. `now` is the clock used for rows and tokens."""

    now: Callable[[], datetime] = database_time.now_without_query

    agents: AgentGateway = field(default_factory=AgentGateway)  # that gets the sessions of agents on other machines

    def __post_init__(self) -> None:
        self.database = DatabaseThreads()
        self.calls = CallTracker(self.now, self.database)
        self.tools = McpToolServer(self.now)
        self.runners = RunnerChannels(self.database, self.confirm)
        self.sessions = AgentSessionServer(self.agents, self.database, self.now, self.confirm)
        self.dropped_fields = DroppedFields()
        self._public: PublicListener | None = None

    @asynccontextmanager
    async def listening(self, sockets: dict[Path, int | None], gateway: GatewayListener | None = None) -> AsyncIterator[None]:
        """Serve on unix sockets (path -> slot), and as the gateway for remote sandboxes, during the body of the `with`.

        nginx connects to the socket whose slot is None; its requests name their slot in a header. At the end of the body all
        calls in flight are cancelled, and the sockets are removed."""
        runners: list[web.AppRunner] = []
        await self.database.run(settlement.close_calls_of_dead_servers, now=self.now())
        async with _open_client_session() as session, AsyncExitStack() as listeners:
            handlers = self._build_handlers(session)
            watcher = asyncio.create_task(self.calls.watch_leases())
            try:
                for path, slot in sockets.items():
                    runners.append(await self._listen(path, slot, handlers))
                if gateway:
                    runners.append(await self._listen_as_gateway(gateway, handlers, listeners))
                    runners.append(await self._listen_for_runner_calls())
                yield
            finally:
                watcher.cancel()
                await listeners.aclose()
                self.calls.cancel_all()
                self.runners.close()
                for runner in runners:
                    await runner.cleanup()
                for path in sockets:
                    path.unlink(missing_ok=True)
                await self.tools.close()
                await self.database.close()

    def _build_handlers(self, session: aiohttp.ClientSession) -> list[web.RouteDef]:
        models, relay = ModelCallProxy(self.calls, session, self.dropped_fields), RelayProxy(self.calls, session)
        return [
            web.get("/healthz", self._report_health),
            web.get(MODELS_PATH, self._with_errors(self._list_models)),
            web.get("/relay/{path:.*}", self._with_errors(relay.handle)),
            *(web.post(path, self._with_errors(models.handle)) for path in FIELDS_BY_PATH),
            web.route("*", MCP_PATH, self._with_errors(self.tools.handle)),
            web.route("*", "/{path:.*}", self._with_errors(self._reject_path)),
        ]

    async def _listen(self, path: Path, slot: int | None, routes: list[web.RouteDef]) -> web.AppRunner:
        runner = await _set_up_runner(routes, slot=slot)
        await web.SockSite(runner, bind_unix_socket(path), backlog=512).start()
        return runner

    async def _listen_as_gateway(
        self, gateway: GatewayListener, handlers: list[web.RouteDef], listeners: AsyncExitStack
    ) -> web.AppRunner:
        """Serve remote sandboxes until `listeners` is closed, and processes that call their agents."""
        routes = [*self.runners.build_gateway_routes(), *self.sessions.build_routes(), *handlers]
        runner = await _set_up_runner(routes, by_token=True, max_body_bytes=MAX_RESULT_BYTES)
        context = _build_server_context(gateway.certificate, gateway.key)
        internal_context = _build_server_context(gateway.internal_certificate, gateway.internal_key)
        secret = agent_routes.derive_gateway_secret()
        port = await listeners.enter_async_context(
            internal.listening(self.agents, gateway.internal_host, gateway.internal_port, secret, internal_context)
        )
        address = gateway.internal_address or f"{gateway.internal_host}:{port}"
        await listeners.enter_async_context(self.sessions.serving(address))
        assert runner.server
        self._public = PublicListener(runner.server, context)
        await listeners.enter_async_context(self._public.listening(gateway.host, gateway.port))
        return runner

    def confirm(self, request: web.BaseRequest) -> None:
        """Note that the caller of a request is authenticated."""
        if self._public:
            self._public.confirm(request)

    async def _listen_for_runner_calls(self) -> web.AppRunner:
        """Serve this host's processes, which call the runners of connected sandboxes."""
        runner = await _set_up_runner(self.runners.build_local_routes(), max_body_bytes=MAX_RESULT_BYTES)
        ensure_private_directory(settings.RUNTIME_DIR)
        path = ensure_directory(settings.RUNNER_GATEWAY.parent) / settings.RUNNER_GATEWAY.name
        await web.SockSite(runner, bind_unix_socket(path, mode=0o600), backlog=512).start()
        return runner

    async def _find_slot(self, request: web.Request) -> int:
        """Return the slot of the caller: that of the socket, the one that nginx states, or the one of the token.

        Raise CallRefused without a valid token."""
        if not request.app[TOKEN_KEY]:
            slot = request.app[SLOT_KEY]
            return int(request.headers[SLOT_HEADER]) if slot is None else slot
        found = await self.database.run(gateway_tokens.find_slot, read_bearer(request))
        if found is None:
            raise CallRefused(401, "invalid_token", "The gateway does not know this token, or its sandbox is gone.")
        self.confirm(request)
        return found

    def _with_errors(self, handle: RequestHandler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler: supply slot and call id, and translate exceptions into error bodies that SDKs display."""

        async def handler(request: web.Request) -> web.StreamResponse:
            behind_nginx = request.app[SLOT_KEY] is None and not request.app[TOKEN_KEY]
            call_id = request.headers[CALL_ID_HEADER] if behind_nginx else uuid.uuid4().hex
            try:
                return await handle(request, await self._find_slot(request), call_id)
            except CallRefused as refusal:
                return build_error_response(refusal.status, refusal.code, refusal.message, **refusal.details)
            except ClientDisconnected:
                request.protocol.force_close()
                return web.Response(status=499)  # never read: the connection is closed
            except SandboxError as error:
                return build_error_response(403 if isinstance(error, SigningKeyRevoked) else 503, error.code, str(error))
            except DatabaseError as error:
                log.error("call not recorded", error=str(error))
                message = "The call could not be recorded and was not forwarded. Try again."
                return build_error_response(503, "not_recorded", message)

        return handler

    async def _report_health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _reject_path(self, request: web.Request, slot: int, call_id: str) -> web.Response:
        return build_error_response(403, "path_forbidden", "Only model calls, tools and the relay are allowed from a sandbox.")

    async def _list_models(self, request: web.Request, slot: int, call_id: str) -> web.Response:
        authorization.require_enabled(await self.database.run(authorization.identify_caller, slot, now=self.now()))
        names = [name for name in (settings.LLM_MODEL, *settings.LLM_MODELS) if "*" not in name]
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "leasehold"} for name in dict.fromkeys(names)]
        return web.json_response({"object": "list", "data": models})


async def _set_up_runner(
    routes: list[web.RouteDef], *, slot: int | None = None, by_token: bool = False, max_body_bytes: int = 1 << 20
) -> web.AppRunner:
    app = web.Application(client_max_size=max_body_bytes)
    app[SLOT_KEY], app[TOKEN_KEY] = slot, by_token
    app.router.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0, keepalive_timeout=75.0)
    await runner.setup()
    return runner


def _build_server_context(certificate: str, key: str) -> ssl.SSLContext | None:
    """Return the TLS of a listener, or None without a certificate. Raise OSError, ssl.SSLError."""
    if not certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key or None)
    return context


def _open_client_session() -> aiohttp.ClientSession:
    """Create the client session for upstreams: no redirects, no proxy settings from the environment."""
    timeout = aiohttp.ClientTimeout(
        total=settings.LLM_TIMEOUT.total_seconds(), sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=READ_TIMEOUT_SECONDS
    )
    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(_refuse_redirect)
    connector = aiohttp.TCPConnector(limit=0)  # unlimited: concurrency is limited per lease by its policy
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=True, trust_env=False, trace_configs=[tracing]
    )


async def _refuse_redirect(session: aiohttp.ClientSession, context: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    """Refuse every redirect. A sandbox chooses the path on the relay, and a redirect could lead the server to another host."""
    redirect.response.close()
    raise aiohttp.ClientError("redirect refused")


def bind_unix_socket(path: Path, *, mode: int = 0o666) -> socket.socket:
    """Bind a unix socket at `path`, replacing an existing one. By default every user of the directory may connect."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    chmod_no_follow(path, mode)  # the proxy's user may write in the directory of a slot
    return listener
