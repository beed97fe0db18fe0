"""Tools of an MCP server: description, arguments and results. Does not import the MCP package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

Schema = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """Tool as `tools/list` describes it. The flags are the annotations of the protocol."""

    name: str
    title: str
    description: str
    arguments: Mapping[str, Schema]
    required: Sequence[str] = ()
    reads_only: bool = field(default=False, kw_only=True)
    destructive: bool = field(default=False, kw_only=True)
    idempotent: bool = field(default=False, kw_only=True)

    @property
    def input_schema(self) -> Schema:
        return {
            "type": "object", "properties": dict(self.arguments), "required": list(self.required),
            "additionalProperties": False,
        }  # fmt: skip


@dataclass(frozen=True)
class ToolResult:
    """Result of a call. With `is_error`, `content` is a problem document."""

    content: Mapping[str, Any]
    is_error: bool = False


class SandboxTools(Protocol):
    """Tools for programs in sandboxes: the module that the setting SANDBOX_TOOLS names."""

    TOOLS: Sequence[Tool]

    def execute(self, tool: Tool, arguments: Mapping[str, Any], lease_id: UUID, *, now: datetime) -> ToolResult:
        """Execute a tool for the lease that holds the sandbox. An error is a result with a problem document."""
        ...
