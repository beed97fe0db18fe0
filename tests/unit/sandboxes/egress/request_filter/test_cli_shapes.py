"""Shapes of the requests that Claude Code 2.1.330 and 2.1.332, and Codex 0.169.0 and 0.171.0, send.

Recorded against a scripted model: prompts with images, files, tools of an MCP server, subagents, resumed sessions and
structured output. Texts are replaced. A field that is not here was not sent."""

import copy
from typing import Any

import pytest

from sandboxes.egress.request_filter import InvalidRequest, filter_betas, sanitize_request

EPHEMERAL = {"type": "ephemeral"}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
SCHEMA = {"type": "object", "properties": {"url": {"type": "string", "format": "uri"}}}
CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-x", "max_tokens": 32_000, "stream": True,
    "system": [{"type": "text", "text": "x"}, {"type": "text", "text": "x", "cache_control": EPHEMERAL}],
    "thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "tool_choice": {"type": "auto"},
    "tools": [
        {"name": "Bash", "description": "See https://x.test.", "input_schema": SCHEMA},
        {"name": "mcp__t__pic", "description": "x", "input_schema": SCHEMA, "defer_loading": True},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "source": PNG}]},
        {"role": "system", "content": "x", "output_config": {"effort": "medium"}},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x", "signature": "c2ln"}, {"type": "redacted_thinking", "data": "eA=="},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"url": "https://x.test"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [
                {"type": "text", "text": "x"}, {"type": "image", "source": PNG}, {"type": "document", "source": PDF},
                {"type": "tool_reference", "tool_name": "WebFetch"},
            ]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "x", "is_error": True, "cache_control": EPHEMERAL},
            {"type": "text", "text": "x", "cache_control": EPHEMERAL},
        ]},
    ],
}  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "gpt-x", "stream": True, "store": False, "parallel_tool_calls": True, "tool_choice": "auto",
    "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {
        "verbosity": "low", "format": {"type": "json_schema", "name": "codex_output_schema", "schema": SCHEMA, "strict": True},
    },
    "tools": [
        {"type": "function", "name": "exec_command", "description": "x", "parameters": SCHEMA, "strict": False},
        {"type": "custom", "name": "apply_patch", "description": "x",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "namespace", "name": "mcp__t", "description": "x", "tools": [
            {"type": "function", "name": "pic", "description": "x", "parameters": SCHEMA, "strict": False}]},
        {"type": "tool_search", "execution": "client", "description": "x", "parameters": SCHEMA},
    ],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": None, "encrypted_content": "abc"},
        {"type": "function_call", "name": "exec_command", "arguments": "{}", "call_id": "call_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "https://x.test"},
        {"type": "function_call_output", "call_id": "call_2", "output": [
            {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "original"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
    ],
}  # fmt: skip
CODEX_METADATA = {"client_metadata": {"session_id": "x", "turn_id": "x"}, "prompt_cache_key": "x"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_request_of_claude_code_is_forwarded_without_its_metadata(path: str) -> None:
    result = sanitize_request(path, CLAUDE_CODE | {"metadata": {"user_id": "{}"}}, default_model="m")
    assert (result.body, result.dropped_count) == (CLAUDE_CODE, 0)


def test_request_of_codex_is_forwarded_without_metadata_and_ids_of_items() -> None:
    sent = copy.deepcopy(CODEX) | CODEX_METADATA
    for number, item in enumerate(sent["input"]):
        item["id"] = f"msg_{number}"
    sent["input"][-1]["status"] = "completed"
    result = sanitize_request("/v1/responses", sent, default_model="m")
    assert (result.body, result.dropped_count) == (CODEX, 0)


@pytest.mark.parametrize(
    ("path", "body", "tool"),
    [
        ("/v1/messages", CLAUDE_CODE, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}),
        (
            "/v1/responses",
            CODEX,
            {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]},
        ),
    ],
)
def test_web_search_of_a_cli_is_refused(path: str, body: dict[str, Any], tool: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sanitize_request(path, body | {"tools": [*body["tools"], tool]}, default_model="m")
    assert (refused.value.code, "web_search" in refused.value.message) == ("tool_not_allowed", True)


def test_betas_of_claude_code_for_its_fields_are_forwarded() -> None:
    sent = (
        "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24,per-turn-control-2026-07-01,"
        "thinking-display-updates-2026-08-18,advanced-tool-use-2025-11-20,interleaved-thinking-2025-05-14"
    )
    assert filter_betas(f"{sent},fallback-credit-2026-06-01") == sent
