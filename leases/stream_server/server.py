"""Stream server of a host: terminals and previews. Runs in the process of the gateway, which is connected to the agents."""

import asyncio
import html
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import structlog
from aiohttp import web
from django.conf import settings
from django.db import Error as DatabaseError

from billing.errors import BudgetExhausted
from leases.errors import GrantEnded, LeaseEnded, PreviewsForbidden, TerminalNotFound
from leases.models import Lease
from leases.stream_server import address
from leases.stream_server.connections import Connections, TooManyConnections
from leases.stream_server.grants import InvalidGrant
from leases.stream_server.port_connections import Ports
from leases.stream_server.previews import Previews
from leases.stream_server.terminals import Terminals
from sandboxes.agent.gateway import AgentGateway
from sandboxes.background import repeat
from sandboxes.db import database_time
from sandboxes.db.clock import Clock
from sandboxes.db.connection_errors import CONNECTION_ERRORS
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.errors import ProcessEnded, SandboxError
from sandboxes.redaction.texts import omit_answers

log = structlog.get_logger(__name__)
BIND_RETRY_SECONDS = 5.0
IDLE_CHECK_SECONDS = 10.0
STATUS_BY_ERROR: dict[type[Exception], int] = {
    InvalidGrant: 403, GrantEnded: 403, PreviewsForbidden: 403, TerminalNotFound: 404, Lease.DoesNotExist: 404, LeaseEnded: 410,
    ProcessEnded: 410, BudgetExhausted: 402, TooManyConnections: 429, SandboxError: 503,
    DatabaseError: 503,
}  # fmt: skip
PROBLEM_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">{again}<title>{title}</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 36rem; margin: 20vh auto; padding: 0 1rem; }}</style></head>
<body><h1>{title}</h1><p>{detail}</p></body></html>
"""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(gateway: AgentGateway, now: Clock = database_time.now_without_query) -> AsyncIterator[None]:
    """Serve during the body of the `with`. A port that is in use is tried again, and nothing else waits for that."""
    directory = settings.RUNTIME_DIR / "previews"
    directory.mkdir(mode=0o700, exist_ok=True)
    for left in directory.glob("*.sock"):  # by a process that was killed
        left.unlink(missing_ok=True)
    database = DatabaseThreads()
    connections, ports = Connections(database, now), Ports(gateway, directory)
    runner = web.AppRunner(
        build_application(
            Terminals(gateway, database, connections, now), Previews(database, connections, ports, now)
        ),
        access_log=None, handler_cancellation=True, shutdown_timeout=1.0,
    )  # fmt: skip
    await runner.setup()
    close_idle = repeat(ports.close_idle, "idle previews not closed", seconds=IDLE_CHECK_SECONDS)
    tasks = [
        asyncio.create_task(_bind(runner)), asyncio.create_task(connections.watch()), asyncio.create_task(close_idle)
    ]  # fmt: skip
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        await ports.close()
        await database.close()


async def _bind(runner: web.AppRunner) -> None:
    """Listen on LEASEHOLD_STREAM_PORT, or else on the port of the previous process, so that its URLs stay valid."""
    port = settings.STREAM_PORT or address.read_port() or 0
    while True:
        site = web.TCPSite(runner, settings.STREAM_HOST, port, backlog=512)
        try:
            await site.start()
        except OSError as error:
            if settings.STREAM_PORT or not port:
                log.error("stream server cannot listen, trying again", port=port, error=str(error))
                await asyncio.sleep(BIND_RETRY_SECONDS)
            port = settings.STREAM_PORT
            continue
        address.record_port(int(runner.addresses[0][1]))
        return


def build_application(terminals: Terminals, previews: Previews) -> web.Application:
    """Build the application: previews by host name, and the paths of terminals and previews."""

    @web.middleware
    async def route_hosts(request: web.Request, handler: Handler) -> web.StreamResponse:
        suffix = f".{settings.PREVIEW_DOMAIN}"
        host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
        try:
            if settings.PREVIEW_DOMAIN and host.lower().endswith(suffix):
                return await previews.handle_host(request, host.lower().removesuffix(suffix))
            return await handler(request)
        except web.HTTPError as error:
            return build_problem(request, error.status, error.text or error.reason)
        except tuple(STATUS_BY_ERROR) as error:
            status = next(status for kind, status in STATUS_BY_ERROR.items() if isinstance(error, kind))
            if not isinstance(error, DatabaseError):
                retry_after = getattr(error, "retry_after", None)
                return build_problem(request, status, str(error), code=getattr(error, "code", ""), retry_after=retry_after)
            if not isinstance(error, CONNECTION_ERRORS):
                log.error("unexpected", path=request.path, exc_info=error)
                return build_problem(request, 500, "Internal error in the control plane. It was logged.")
            log.error("database", error=str(error))
            return build_problem(request, status, "The database did not answer.")

    application = web.Application(middlewares=[route_hosts])
    application.router.add_get("/healthz", _report_health)
    application.router.add_get("/terminals/{grant}", terminals.handle)
    application.router.add_route("*", "/previews/{grant}{path:(?:/.*)?}", previews.handle_path)
    return application


def build_problem(
    request: web.Request, status: int, detail: str, *, code: str = "", retry_after: int | None = None
) -> web.Response:
    """Build a problem document (RFC 9457), or its page if the client is a browser that opens a page.

    With `retry_after`, in seconds, the page opens the address again after this time."""
    title, detail = HTTPStatus(status).phrase, omit_answers(detail)
    headers = {"Retry-After": str(retry_after)} if retry_after else {}
    if "text/html" in request.headers.get("Accept", ""):
        again = f'<meta http-equiv="refresh" content="{retry_after}">' if retry_after else ""
        text = PROBLEM_PAGE.format(again=again, title=html.escape(title), detail=html.escape(detail))
        headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
        return web.Response(status=status, text=text, content_type="text/html", headers=headers)
    problem = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    if isinstance(code, str) and code:
        problem |= {"type": f"urn:leasehold:problem:{code}", "code": code}
    return web.Response(status=status, text=json.dumps(problem), content_type="application/problem+json", headers=headers)


async def _report_health(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")
