"""MCP endpoint for programs in sandboxes: tools of the control plane, as far as the policy allows them.

The caller is the sandbox of the socket's slot, as for model calls. A program needs no credential, and can name no other
lease."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from aiohttp import web
from django.conf import settings

from sandboxes.egress import authorization
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.egress.refusals import CallRefused
from sandboxes.mcp.tools import SandboxTools, Tool, ToolResult
from sandboxes.models.policies import MAX_BODY_KIB

if TYPE_CHECKING:
    from sandboxes.mcp.endpoint import McpEndpoint

MAX_CALLS_PER_SLOT = 4  # at once
INSTRUCTIONS = (
    "Tools of the control plane that runs this sandbox. They concern the lease of this sandbox. An error is a problem "
    "document: `code` is stable, and if `retryable` is true the same call may succeed later."
)
PACKAGES_OF_EXTRA = ("mcp", "mcp_types", "jsonschema")


class McpToolServer:
    """Handler of MCP_PATH. The MCP package is imported by the first request whose policy allows tools.

    Tools have threads of their own: a slow object store must not delay the rows of model calls."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now, self._threads = now, DatabaseThreads()
        self._open_calls: Counter[int] = Counter()
        self._starting = asyncio.Lock()
        self._endpoint: McpEndpoint | None = None
        self._tools: SandboxTools | None = None
        self._server: asyncio.Task[None] | None = None

    async def handle(self, request: web.Request, slot: int, call_id: str) -> web.StreamResponse:
        """Answer one message. Raise CallRefused if no active lease holds the sandbox or its policy allows no tools."""
        caller = await self._threads.run(authorization.identify_caller, slot, now=self._now())
        policy = caller.sandbox.rules
        if not policy.mcp_tools:
            raise CallRefused(403, "tools_not_allowed", "The policy of this sandbox allows no tools of the control plane.")
        if request.method != "POST":
            return web.Response(status=405, headers={"Allow": "POST"})  # clients then do without an event stream and sessions
        with self._count_call(slot):
            body = await _read_body(request, policy.largest_body_kib)
            endpoint = await self._start()
            execute = partial(self._execute, caller.holder)
            response = await endpoint.respond(request.headers, body, execute, allowed=policy.mcp_tools)
        headers = {name: value for name, value in response.headers.items() if name.lower() != "content-length"}
        return web.Response(status=response.status, headers=headers, body=response.body)

    async def _execute(self, lease_id: UUID, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        assert self._tools is not None
        return await self._threads.run(self._tools.execute, tool, arguments, lease_id, now=self._now())

    @contextmanager
    def _count_call(self, slot: int) -> Iterator[None]:
        if self._open_calls[slot] >= MAX_CALLS_PER_SLOT:
            raise CallRefused(429, "too_many_at_once", f"Concurrency limit reached: {MAX_CALLS_PER_SLOT} tool calls.")
        self._open_calls[slot] += 1
        try:
            yield
        finally:
            self._open_calls[slot] -= 1
            if not self._open_calls[slot]:
                del self._open_calls[slot]

    async def _start(self) -> "McpEndpoint":
        """Return the running endpoint. Raise CallRefused if the extra `mcp` is not installed."""
        async with self._starting:
            if self._endpoint is None:
                self._tools, endpoint = await asyncio.to_thread(_load)
                started = asyncio.get_running_loop().create_future()
                self._server = asyncio.create_task(_run(endpoint, started))
                await started
                self._endpoint = endpoint
            return self._endpoint

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
            with suppress(asyncio.CancelledError):
                await self._server
        await self._threads.close()


async def _run(endpoint: "McpEndpoint", started: "asyncio.Future[None]") -> None:
    async with endpoint.running():
        started.set_result(None)
        await asyncio.Event().wait()


def _load() -> "tuple[SandboxTools, McpEndpoint]":
    """Import the MCP package and the tools, which takes about a second."""
    try:
        from sandboxes.mcp.endpoint import McpEndpoint

        tools = cast(SandboxTools, import_module(settings.SANDBOX_TOOLS))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES_OF_EXTRA:
            raise
        raise CallRefused(501, "mcp_not_installed", "The control plane was installed without the extra `mcp`.") from None
    return tools, McpEndpoint("leasehold-sandbox", INSTRUCTIONS, tools.TOOLS, max_body_bytes=MAX_BODY_KIB << 10)


async def _read_body(request: web.Request, max_kib: int) -> bytes:
    content = bytearray()
    async for chunk in request.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > max_kib << 10:
            raise authorization.build_too_large_refusal(max_kib)
    return bytes(content)
