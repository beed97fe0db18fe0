"""Bridge from threads of the web server to the MCP package, which needs an event loop.

The event loop is in one thread of the process and only parses and answers: a tool is executed by the thread of its request,
like any other request of the HTTP API, with that thread's database connection and within the limits on long calls."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from sandboxes.mcp.endpoint import McpEndpoint, McpResponse
from sandboxes.mcp.tools import Tool, ToolResult

Execute = Callable[[Tool, dict[str, Any]], ToolResult]


@dataclass
class ToolCall:
    """Call that waits in the event loop for its result."""

    tool: Tool
    arguments: dict[str, Any]
    result: "asyncio.Future[ToolResult]"


class McpBridge:
    """Event-loop thread of an endpoint. It runs until the process ends."""

    def __init__(self, endpoint: McpEndpoint) -> None:
        self._endpoint = endpoint
        started: Future[asyncio.AbstractEventLoop] = Future()
        threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="mcp", daemon=True).start()
        self._loop = started.result()

    async def _serve(self, started: "Future[asyncio.AbstractEventLoop]") -> None:
        try:
            async with self._endpoint.running():
                started.set_result(asyncio.get_running_loop())
                await asyncio.Event().wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    def respond(self, headers: Mapping[str, str], body: bytes, execute: Execute) -> McpResponse:
        """Return the response to a POST. Calls `execute` in this thread for each tool that the request calls."""
        calls: SimpleQueue[ToolCall | None] = SimpleQueue()

        async def execute_in_request_thread(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
            call = ToolCall(tool, arguments, self._loop.create_future())
            calls.put(call)
            return await call.result

        exchange = asyncio.run_coroutine_threadsafe(
            self._endpoint.respond(headers, body, execute_in_request_thread), self._loop
        )
        exchange.add_done_callback(lambda _: calls.put(None))
        try:
            while call := calls.get():
                self._loop.call_soon_threadsafe(_set_result, call.result, execute(call.tool, call.arguments))
        except BaseException:
            exchange.cancel()
            raise
        return exchange.result()


def _set_result(future: "asyncio.Future[ToolResult]", result: ToolResult) -> None:
    if not future.done():
        future.set_result(result)
