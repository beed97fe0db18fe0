"""MCP server of the web process, started by its first request. Needs the extra `mcp`."""

import threading
from functools import partial

from django.http import HttpResponse

from leases.api.base.views import ApiView
from leases.api.mcp.bridge import McpBridge
from leases.api.mcp.catalog import TOOLS
from leases.api.mcp.execution import execute_tool
from sandboxes.mcp.endpoint import McpEndpoint

INSTRUCTIONS = (
    "Leasehold leases sandboxes. Acquire a lease with lease_acquire, then use its id with the other tools, and release it with "
    "lease_release when the work is done. Each use renews the lease. An error is a problem document: `code` is stable, and if "
    "`retryable` is true the same call may succeed later."
)

_lock = threading.Lock()
_bridges: list[McpBridge] = []


def respond(view: ApiView, body: bytes) -> HttpResponse:
    """Return the response to the body of the view's request."""
    response = _get_bridge(view.max_body_bytes).respond(view.request.headers, body, partial(execute_tool, view))
    return HttpResponse(response.body, status=response.status, headers=response.headers)


def _get_bridge(max_body_bytes: int) -> McpBridge:
    """Return the bridge of this process. Its thread begins after the process was forked, with the first request."""
    with _lock:
        if not _bridges:
            _bridges.append(McpBridge(McpEndpoint("leasehold", INSTRUCTIONS, TOOLS, max_body_bytes=max_body_bytes)))
        return _bridges[0]
