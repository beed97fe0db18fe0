"""Codex CLI (npm @openai/codex), `codex exec --json`. Options and messages: tried with 0.169.0.

Sessions are in $HOME/.codex/sessions/<date>/rollout-<time>-<thread id>.jsonl, which snapshots of the workspace include. The CLI
has no limit of turns, tools or costs of its own: those of the policy are checked on its messages alone."""

import json
from collections.abc import Mapping
from typing import Any

from leases.agent_runs.clis.base import AgentCli, AgentOptions, AgentResult, Message, SessionFile, get_text
from leases.agent_runs.policy import ToolCall
from sandboxes.providers.base import EGRESS_ENVIRONMENT

PROVIDER = {
    "name": "leasehold",
    "base_url": EGRESS_ENVIRONMENT["OPENAI_BASE_URL"],
    "env_key": "OPENAI_API_KEY",
    "wire_api": "responses",
}
# The CLI restricts commands by a sandbox of its own, which needs user namespaces. The container grants none: with the modes
# read-only and workspace-write every command fails. The CLI can therefore not enforce `plan` and `acceptEdits`.
BYPASS_SANDBOX = "--dangerously-bypass-approvals-and-sandbox"


class Codex(AgentCli):
    name = "codex"
    npm_package = "@openai/codex@0.169.0"
    unsupported_options = frozenset({"argv", "system_prompt"})
    permission_modes = ("default", "bypassPermissions")

    def build_argv(self, options: AgentOptions, *, session_id: str = "") -> list[str]:
        provider = ", ".join(f"{name} = {json.dumps(value)}" for name, value in PROVIDER.items())
        argv = ["codex", "exec", *(["resume", session_id] if session_id else []), "--json", "--skip-git-repo-check"]
        argv += [BYPASS_SANDBOX, "-c", "model_provider=leasehold", "-c", f"model_providers.leasehold={{{provider}}}"]
        argv += ["-c", 'web_search="disabled"']  # executed by the provider, which the egress proxy refuses
        if options.model:
            argv += ["--model", options.model]
        return [*argv, "-"]

    def find_session(self, session_id: str) -> SessionFile:
        return SessionFile("~/.codex/sessions", f"*{session_id}.jsonl")

    def interpret(self, document: Mapping[str, Any]) -> Message:
        kind = get_text(document, "type")
        if kind == "turn.completed":
            return Message("result", result=AgentResult())
        if kind in ("turn.failed", "error"):
            text = get_text(document.get("error"), "message") or get_text(document, "message")
            return Message("result", result=AgentResult(text, is_error=True))
        if kind in ("item.started", "item.completed"):
            return _read_item(document.get("item"), is_new=kind == "item.started")
        return Message("system", session_id=get_text(document, "thread_id"))


def _read_item(item: Any, *, is_new: bool) -> Message:
    kind, item_id = get_text(item, "type"), get_text(item, "id")
    if kind == "agent_message":
        return Message("assistant", text=get_text(item, "text"), turn_id=item_id)
    if kind in ("error", "reasoning", "todo_list", ""):
        return Message("system")
    calls = (ToolCall(kind, get_text(item, "command")),)
    return Message("assistant" if is_new else "tool", turn_id=item_id, tool_calls=calls)
