"""Any program that reads a prompt from stdin and prints one JSON object a line: its command line is part of the request."""

from collections.abc import Mapping
from typing import Any

from leases.agent_runs.clis.base import AgentCli, AgentOptions, AgentResult, Message, get_cost, get_objects, get_text
from leases.agent_runs.policy import ToolCall
from leases.errors import InvalidRequest

ROLES = ("system", "assistant", "tool", "result")


class Program(AgentCli):
    """Understood fields of a message: `type` (system, assistant, tool, result), `text`, `session_id`, `turn_id`, `tool_calls`
    (`name`, `command`), and of a result `is_error` and `cost_usd`. All others are passed on."""

    name = "program"
    unsupported_options = frozenset({"model", "system_prompt", "session_id"})

    def check(self, options: AgentOptions) -> None:
        super().check(options)
        if not options.argv:
            raise InvalidRequest("argv", f"Required with cli {self.name}: the program and its arguments.")

    def build_argv(self, options: AgentOptions, *, session_id: str = "") -> list[str]:
        return [*options.argv]

    def interpret(self, document: Mapping[str, Any]) -> Message:
        kind, text = get_text(document, "type"), get_text(document, "text")
        calls = (ToolCall(get_text(call, "name"), get_text(call, "command")) for call in get_objects(document, "tool_calls"))
        is_result = kind == "result"
        return Message(
            kind if kind in ROLES else "system",
            text=text if kind == "assistant" else "",
            session_id=get_text(document, "session_id"),
            turn_id=get_text(document, "turn_id"),
            tool_calls=tuple(calls),
            result=AgentResult(text or None, document.get("is_error") is True, get_cost(document, "cost_usd"))
            if is_result
            else None,
        )
