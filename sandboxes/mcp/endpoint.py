"""MCP server with a fixed list of tools, over streamable HTTP without sessions. Needs the extra `mcp`.

The official package implements the protocol: versions, negotiation, JSON-RPC. This module gives it one HTTP request at a time
and takes the response, so that any web server can be in front."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    ToolAnnotations,
)
from mcp_types import Tool as ToolDescription

from sandboxes.mcp.tools import Tool, ToolResult

EXECUTE_KEY, ALLOWED_KEY = "leasehold.execute", "leasehold.allowed"  # of the ASGI scope
FORWARDED_HEADERS = ("accept", "content-type")  # and those of the protocol, MCP-*

ToolExecutor = Callable[[Tool, dict[str, Any]], Awaitable[ToolResult]]


@dataclass
class McpResponse:
    """HTTP response of the protocol."""

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class McpEndpoint:
    """MCP server. `respond` is called in the event loop that has entered `running`."""

    def __init__(self, name: str, instructions: str, tools: Sequence[Tool], *, max_body_bytes: int) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._descriptions = [_describe_tool(tool) for tool in tools]
        server: Server[Any] = Server(
            name, instructions=instructions, on_list_tools=self._list_tools, on_call_tool=self._call_tool,
            get_tool_input_schema=self._find_input_schema,
        )  # fmt: skip
        # The web server in front checks Host and Origin, which the package compares with fixed lists.
        self._manager = StreamableHTTPSessionManager(
            server, json_response=True, stateless=True, max_request_body_size=max_body_bytes,
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept requests during the body of the `with`, which can be entered once."""
        async with self._manager.run():
            yield

    async def respond(
        self, headers: Mapping[str, str], body: bytes, execute: ToolExecutor, *, allowed: Collection[str] | None = None
    ) -> McpResponse:
        """Return the response to a POST. `execute` executes a tool of this endpoint that the request calls.

        `allowed` has the names of the tools that exist for this client; None: all."""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/mcp", "raw_path": b"/mcp", "query_string": b"", "root_path": "", "client": None, "server": None,
            "headers": _select_headers(headers), EXECUTE_KEY: execute, ALLOWED_KEY: allowed,
        }  # fmt: skip
        response, unread = McpResponse(), [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if unread:
                return unread.pop()
            return await asyncio.Event().wait()  # a disconnection is not reported: the tool goes on, like an exec

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            elif message["type"] == "http.response.body":
                response.body += message.get("body", b"")

        await self._manager.asgi_app(scope, receive, send)
        return response

    async def _list_tools(self, context: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        allowed = context.request.scope[ALLOWED_KEY]
        return ListToolsResult(tools=[each for each in self._descriptions if allowed is None or each.name in allowed])

    async def _call_tool(self, context: Any, params: CallToolRequestParams) -> CallToolResult:
        tool, allowed = self._tools.get(params.name), context.request.scope[ALLOWED_KEY]
        if tool is None or (allowed is not None and tool.name not in allowed):
            raise MCPError(INVALID_PARAMS, f"Unknown tool: {params.name[:100]}")
        execute: ToolExecutor = context.request.scope[EXECUTE_KEY]
        result = await execute(tool, params.arguments or {})
        content = dict(result.content)
        text = TextContent(type="text", text=json.dumps(content, ensure_ascii=False))
        return CallToolResult(content=[text], structured_content=content, is_error=result.is_error)

    def _find_input_schema(self, name: str) -> dict[str, Any] | None:
        tool = self._tools.get(name)
        return tool.input_schema if tool else None


def _describe_tool(tool: Tool) -> ToolDescription:
    annotations = ToolAnnotations(
        title=tool.title, read_only_hint=tool.reads_only, destructive_hint=tool.destructive,
        idempotent_hint=tool.idempotent or tool.reads_only, open_world_hint=False,
    )  # fmt: skip
    return ToolDescription(
        name=tool.name, title=tool.title, description=tool.description, input_schema=tool.input_schema, annotations=annotations
    )


def _select_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in headers.items()
        if name.lower() in FORWARDED_HEADERS or name.lower().startswith("mcp-")
    ]
