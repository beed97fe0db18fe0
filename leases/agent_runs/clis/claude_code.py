"""Claude Code (npm @anthropic-ai/claude-code), non-interactive with stream-json output.

Options and messages: tried with 2.1.330. Sessions are in $HOME/.claude/projects/<from the working directory>/. Snapshots of the
workspace include them."""

import json
from collections.abc import Mapping
from typing import Any

from leases.agent_runs.clis.base import (
    AgentCli,
    AgentOptions,
    AgentResult,
    Message,
    SessionFile,
    get_cost,
    get_objects,
    get_text,
)
from leases.agent_runs.policy import MCP_SERVER_NAME, ToolCall
from sandboxes.egress.request_filter import MCP_PATH
from sandboxes.providers.base import EGRESS_LOOPBACK_ADDRESS

ROLES = {"assistant": "assistant", "user": "tool", "result": "result"}  # "user" messages are results of tools


class ClaudeCode(AgentCli):
    name = "claude-code"
    npm_package = "@anthropic-ai/claude-code@2.1.330"
    default_model = "sonnet"
    unsupported_options = frozenset({"argv"})

    def build_argv(self, options: AgentOptions, *, session_id: str = "") -> list[str]:
        policy = options.policy
        argv = ["claude", "-p", "--output-format", "stream-json", "--verbose", "--model", options.model or self.default_model]
        if session_id:
            argv += ["--resume", session_id]
        if options.permission_mode == "bypassPermissions":
            argv.append("--dangerously-skip-permissions")
        elif options.permission_mode != "default":
            argv += ["--permission-mode", options.permission_mode]
        if options.system_prompt:
            argv += ["--append-system-prompt", options.system_prompt]
        if policy.max_turns is not None:
            argv += ["--max-turns", str(policy.max_turns)]
        if policy.max_cost is not None:
            argv += ["--max-budget-usd", str(policy.max_cost)]
        if policy.allowed_tools:
            built_in = [name for name in policy.allowed_tools if not name.startswith("mcp__")]
            argv += ["--tools", ",".join(built_in), "--allowed-tools", ",".join(policy.allowed_tools)]
        elif policy.offered_mcp_tools:
            argv += ["--allowed-tools", ",".join(policy.offered_mcp_tools)]
        if policy.offered_mcp_tools:
            server = {"type": "http", "url": f"http://{EGRESS_LOOPBACK_ADDRESS}{MCP_PATH}"}
            argv += ["--mcp-config", json.dumps({"mcpServers": {MCP_SERVER_NAME: server}})]
        if policy.denied_commands:
            rules = [f"Bash({pattern})" for pattern in policy.denied_commands]
            argv += ["--settings", json.dumps({"permissions": {"deny": rules}})]
        return argv

    def build_env(self) -> Mapping[str, str]:
        return {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1"}

    def find_session(self, session_id: str) -> SessionFile:
        return SessionFile("~/.claude/projects", f"{session_id}.jsonl")

    def interpret(self, document: Mapping[str, Any]) -> Message:
        kind, message = get_text(document, "type"), document.get("message")
        blocks = get_objects(message, "content") if kind == "assistant" else []
        return Message(
            ROLES.get(kind, "system"),
            text="".join(get_text(block, "text") for block in blocks if block.get("type") == "text"),
            session_id=get_text(document, "session_id"),
            turn_id=get_text(message, "id") if kind == "assistant" else "",
            tool_calls=tuple(
                ToolCall(get_text(block, "name"), get_text(block.get("input"), "command"))
                for block in blocks
                if block.get("type") == "tool_use"
            ),
            result=_read_result(document) if kind == "result" else None,
        )


def _read_result(document: Mapping[str, Any]) -> AgentResult:
    text = get_text(document, "result") or get_text(document, "subtype")
    return AgentResult(text, document.get("is_error") is not False, get_cost(document, "total_cost_usd"))
