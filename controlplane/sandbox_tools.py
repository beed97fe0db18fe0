"""Tools for programs in sandboxes (setting SANDBOX_TOOLS): those of the leases, with errors as problem documents."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from controlplane import errors
from leases import sandbox_tools
from leases.errors import InvalidRequest
from sandboxes.mcp.arguments import find_argument_error, omit_nulls
from sandboxes.mcp.tools import Tool, ToolResult

TOOLS = sandbox_tools.TOOLS


def execute(tool: Tool, arguments: Mapping[str, Any], lease_id: UUID, *, now: datetime) -> ToolResult:
    """Execute a tool for the lease that holds the sandbox."""
    try:
        arguments = omit_nulls(tool, arguments)
        if error := find_argument_error(tool, arguments):
            raise InvalidRequest(*error)
        return ToolResult(sandbox_tools.execute(tool.name, arguments, lease_id, now=now))
    except Exception as failed:
        return ToolResult(json.loads(errors.build_error_response(failed, "/mcp", tool.name).content), is_error=True)
