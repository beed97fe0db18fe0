"""Limits of an agent run: passed to the CLI, and checked again on its messages.

The check reads the messages that the CLI prints. It stops an agent that goes astray, and is no security boundary: a program
that the agent writes does what it wants inside its sandbox. The sandbox is the boundary."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

MAX_PATTERNS = 64
MCP_SERVER_NAME = "leasehold"  # of the tools of the control plane, in a CLI
SHELL_OPERATORS = re.compile(r"&&|\|\||[;|&\n]")


@dataclass(frozen=True)
class ToolCall:
    """Use of a tool by the agent. `command` is that of a shell."""

    name: str
    command: str = ""


@dataclass(frozen=True)
class AgentPolicy:
    """Limits. Empty tuples and None mean no limit."""

    allowed_tools: tuple[str, ...] = ()  # names
    denied_commands: tuple[str, ...] = ()  # patterns with *, of single commands in a shell
    max_turns: int | None = None
    max_cost: Decimal | None = None  # USD
    mcp_tools: tuple[str, ...] = ()  # tools of the control plane; none is the default, and only operators add some

    @property
    def offered_mcp_tools(self) -> tuple[str, ...]:
        """Names under which the CLI calls the tools of the control plane. A list of allowed tools restricts these as well."""
        names = tuple(f"mcp__{MCP_SERVER_NAME}__{name}" for name in self.mcp_tools)
        return tuple(name for name in names if name in self.allowed_tools) if self.allowed_tools else names

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "AgentPolicy":
        cost = document.get("max_cost_usd")
        return cls(
            tuple(document.get("allowed_tools") or ()),
            tuple(document.get("denied_commands") or ()),
            document.get("max_turns"),
            None if cost is None else Decimal(cost),
            tuple(document.get("mcp_tools") or ()),
        )

    def to_document(self) -> dict[str, Any]:
        return {
            "allowed_tools": list(self.allowed_tools),
            "denied_commands": list(self.denied_commands),
            "max_turns": self.max_turns,
            "max_cost_usd": None if self.max_cost is None else str(self.max_cost),
            "mcp_tools": list(self.mcp_tools),
        }

    def restrict(self, other: "AgentPolicy") -> "AgentPolicy":
        """Return the limits of both policies. Two lists of tools without a common name allow no tool."""
        tools = self.allowed_tools or other.allowed_tools
        if self.allowed_tools and other.allowed_tools:
            tools = tuple(name for name in self.allowed_tools if name in other.allowed_tools) or ("",)
        return AgentPolicy(
            tools,
            tuple(dict.fromkeys((*self.denied_commands, *other.denied_commands))),
            _min(self.max_turns, other.max_turns),
            _min(self.max_cost, other.max_cost),
            self.mcp_tools or other.mcp_tools,
        )

    def find_violation(self, calls: Iterable[ToolCall], *, turns: int, cost: Decimal | None) -> str:
        """Return the violation of a limit by these tool calls or totals, or ""."""
        for call in calls:
            if self.allowed_tools and call.name not in self.allowed_tools:
                return f"Tool not allowed: {call.name}"
            if pattern := self._find_denied(call.command):
                return f"Command denied by {pattern!r}: {call.command[:200]}"
        if self.max_turns is not None and turns > self.max_turns:
            return f"Turn limit exceeded: {turns} of {self.max_turns}"
        if self.max_cost is not None and cost is not None and cost > self.max_cost:
            return f"Cost limit exceeded: {cost} of {self.max_cost} USD"
        return ""

    def _find_denied(self, command: str) -> str:
        parts = [part.strip() for part in (command, *SHELL_OPERATORS.split(command))]
        return next((pattern for pattern in self.denied_commands if any(fnmatchcase(part, pattern) for part in parts)), "")


def _min(first: Any, second: Any) -> Any:
    return min((value for value in (first, second) if value is not None), default=None)
