"""Hypothesis strategies for request bodies, written from the published schemas of both vendors.

Values whose treatment differs from that of other values are marked by their class: texts and arguments may have any content,
and ids of items are not forwarded."""

from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]


class Text(str):
    """String that the model reads: URLs in it are content."""


class Arguments(dict[str, Any]):
    """JSON Schema, or arguments of a tool call."""


class ArgumentList(list[Any]):
    """Examples of arguments of a tool call."""


class CallId(str):
    """Id that pairs a call with its output within the request. The provider looks up nothing by it."""


class NotForwarded(str):
    """Value of the published schema that the filter removes."""


def obj(required: dict[str, Any], **optional: Any) -> Strategy:
    """Build an object. Values that are no strategies are constants."""
    return st.fixed_dictionaries(
        {name: as_strategy(value) for name, value in required.items()},
        optional={name: as_strategy(value) for name, value in optional.items()},
    )


def part(kind: str, required: dict[str, Any], **optional: Any) -> Strategy:
    return obj({"type": kind} | required, **optional)


def as_strategy(value: Any) -> Strategy:
    return value if isinstance(value, st.SearchStrategy) else st.just(value)


def some(*choices: Any, least: int = 0) -> Strategy:
    return st.lists(st.one_of(*map(as_strategy, choices)), min_size=least, max_size=3)


def words(*choices: Any) -> Strategy:
    return st.sampled_from(choices)


TEXT = words("Hello.", "see https://text.test/a?b=1", "https://text.test", "file-text123", "data:x", "").map(Text)
ARGUMENTS = words({}, {"url": "https://text.test"}, {"type": "url", "a": [{"file_id": "file-text123"}]}).map(Arguments)
NAME, NUMBER, FLAG = words("get_weather", "mcp__a__b", "Read"), st.integers(0, 100_000), st.booleans()
CALL_ID = words("toolu_01AbCdEfGh23", "call_AbC123", "functions.get:0").map(CallId)
BASE64, DATA_URL = words("iVBORw0KGgo=", "AA-_9/+=\n"), words("data:image/png;base64,iVBORw0KGgo=")
ITEM_ID = words("msg_0123456789", "rs_0123456789").map(NotForwarded)

# --- Anthropic ---------------------------------------------------------------------------------------------------------
CACHE = {"cache_control": part("ephemeral", {}, ttl=words("5m", "1h"))}
PLACES = {"cited_text": TEXT, "document_index": NUMBER, "document_title": words(None, "Report")}
CITATION = st.one_of(
    part("char_location", {**PLACES, "start_char_index": NUMBER, "end_char_index": NUMBER}),
    part("page_location", {**PLACES, "start_page_number": NUMBER, "end_page_number": NUMBER}),
)
TEXT_BLOCK = part("text", {"text": TEXT}, citations=st.one_of(st.none(), some(CITATION)), **CACHE)
SOURCE = part("base64", {"media_type": words("image/png", "application/pdf"), "data": BASE64})
IMAGE_BLOCK = part("image", {"source": SOURCE}, **CACHE)
DOCUMENT_SOURCE = st.one_of(
    SOURCE,
    part("text", {"media_type": "text/plain", "data": TEXT}),
    part("content", {"content": st.one_of(TEXT, some(TEXT_BLOCK, IMAGE_BLOCK))}),
)
DOCUMENT_BLOCK = part(
    "document", {"source": DOCUMENT_SOURCE}, title=words(None, "Report"), context=words(None, "From 2026"),
    citations=obj({"enabled": FLAG}), **CACHE,
)  # fmt: skip
SEARCH_RESULT = part("search_result", {"source": "notes", "title": "Notes", "content": some(TEXT_BLOCK)}, **CACHE)
RESULT_CONTENT = st.one_of(
    TEXT, some(TEXT_BLOCK, IMAGE_BLOCK, DOCUMENT_BLOCK, SEARCH_RESULT, part("tool_reference", {"tool_name": NAME}))
)
TOOL_OPTIONS = {
    "strict": FLAG,
    "defer_loading": FLAG,
    "allowed_callers": some("direct"),
    "input_examples": some(ARGUMENTS).map(ArgumentList),
    **CACHE,
}
ANTHROPIC_TOOL = st.one_of(
    obj({"name": NAME, "input_schema": ARGUMENTS}, type=words(None, "custom"), description=TEXT, **TOOL_OPTIONS),
    part("bash_20250124", {"name": "bash"}, **TOOL_OPTIONS),
    part("text_editor_20250728", {"name": "str_replace_based_edit_tool"}, max_characters=NUMBER, **TOOL_OPTIONS),
    part("computer_20251124", {"name": "computer", "display_width_px": NUMBER, "display_height_px": NUMBER}, enable_zoom=FLAG),
    part("computer_toolset_20260801", {}, configs=obj({}, zoom=obj({"enabled": FLAG}), type=obj({"defer_loading": FLAG}))),
    part("memory_20250818", {"name": "memory"}, **TOOL_OPTIONS),
)
TOOL_CHANGE = st.one_of(
    part("tool_addition", {"tool": part("tool_definition", {"definition": ANTHROPIC_TOOL})}),
    part("tool_removal", {"tool": part("tool_reference", {"name": NAME})}),
)
BLOCKS = some(
    TEXT_BLOCK, IMAGE_BLOCK, DOCUMENT_BLOCK, SEARCH_RESULT, TOOL_CHANGE,
    part("thinking", {"thinking": TEXT, "signature": BASE64}),
    part("redacted_thinking", {"data": BASE64}),
    part("tool_use", {"id": CALL_ID, "name": NAME, "input": ARGUMENTS}, caller=part("direct", {}), **CACHE),
    part("tool_result", {"tool_use_id": CALL_ID}, content=RESULT_CONTENT, is_error=FLAG, **CACHE),
    part("compaction", {"content": TEXT}, encrypted_content=words(None, "eA==")),
)  # fmt: skip
AMOUNT = {"type": "input_tokens", "value": NUMBER}
EDIT = st.one_of(
    part(
        "clear_tool_uses_20250919", {}, trigger=obj(AMOUNT), keep=obj(AMOUNT), clear_at_least=words(None),
        exclude_tools=some(NAME),
        clear_tool_inputs=st.one_of(FLAG, some(NAME)),
    ),
    part("clear_thinking_20251015", {"keep": st.one_of(words("all"), obj({"type": "thinking_turns", "value": NUMBER}))}),
    part("compact_20260112", {}, instructions=TEXT, pause_after_compaction=FLAG),
)  # fmt: skip
MESSAGES_BODY = obj(
    {"messages": some(obj({"role": words("user", "assistant", "system"), "content": st.one_of(TEXT, BLOCKS)}), least=1)},
    max_tokens=NUMBER, temperature=words(0, 0.5), stream=FLAG, stop_sequences=some("END"),
    system=st.one_of(TEXT, some(TEXT_BLOCK)),
    tools=some(ANTHROPIC_TOOL),
    tool_choice=st.one_of(part("auto", {}), part("tool", {"name": NAME}, disable_parallel_tool_use=FLAG)),
    thinking=st.one_of(part("enabled", {"budget_tokens": NUMBER}), part("adaptive", {}, display="omitted")),
    output_config=obj({}, effort="high", format=part("json_schema", {"schema": ARGUMENTS})),
    context_management=obj({"edits": some(EDIT)}), **CACHE,
)  # fmt: skip

# --- OpenAI: chat completions ------------------------------------------------------------------------------------------
FUNCTION = obj({"name": NAME}, description=TEXT, parameters=ARGUMENTS, strict=words(None, True))
CHAT_PART = st.one_of(
    part("text", {"text": TEXT}),
    part("image_url", {"image_url": obj({"url": DATA_URL}, detail="low")}),
    part("input_audio", {"input_audio": obj({"data": "AA==", "format": "wav"})}),
    part("file", {"file": obj({"file_data": st.one_of(DATA_URL, BASE64)}, filename="a.pdf")}),
)
FORMAT = st.one_of(part("text", {}), part("grammar", {"grammar": obj({"syntax": "lark", "definition": TEXT})}))
CHAT_CALL = st.one_of(
    part("function", {"id": CALL_ID, "function": obj({"name": NAME, "arguments": TEXT})}),
    part("custom", {"id": CALL_ID, "custom": obj({"name": NAME, "input": TEXT})}),
)
CHAT_MESSAGE = st.one_of(
    obj({"role": words("user", "system", "developer"), "content": st.one_of(TEXT, some(CHAT_PART))}, name=NAME),
    obj(
        {"role": "assistant", "content": st.one_of(st.none(), TEXT, some(part("refusal", {"refusal": TEXT})))},
        tool_calls=some(CHAT_CALL), refusal=words(None), annotations=st.just([]),
    ),
    obj({"role": "tool", "tool_call_id": CALL_ID, "content": st.one_of(TEXT, some(part("text", {"text": TEXT})))}),
)  # fmt: skip
STREAM_OPTIONS = obj({}, include_usage=FLAG)
STOP = st.one_of(words(None, "END"), some("END"))
CHAT_CHOICES = some(part("function", {"function": obj({"name": NAME})}), part("custom", {"custom": obj({"name": NAME})}))
CHAT_BODY = obj(
    {"messages": some(CHAT_MESSAGE, least=1)},
    max_completion_tokens=NUMBER, n=words(1), seed=NUMBER, stop=STOP, logit_bias=words({"50256": -100}, {}), stream=FLAG,
    tools=some(
        part("function", {"function": FUNCTION}),
        part("custom", {"custom": obj({"name": NAME}, description=TEXT, format=FORMAT)}),
    ),
    tool_choice=st.one_of(
        words("auto", "none"), part("function", {"function": obj({"name": NAME})}),
        part("allowed_tools", {"allowed_tools": obj({"mode": "auto", "tools": CHAT_CHOICES})}),
    ),
    response_format=st.one_of(
        part("json_object", {}),
        part("json_schema", {"json_schema": obj({"name": NAME, "schema": ARGUMENTS}, description=TEXT)}),
    ),
    prediction=part("content", {"content": st.one_of(TEXT, some(part("text", {"text": TEXT})))}),
    stream_options=STREAM_OPTIONS, parallel_tool_calls=FLAG, reasoning_effort="low", verbosity="low", logprobs=FLAG,
)  # fmt: skip

# --- OpenAI: responses -------------------------------------------------------------------------------------------------
INPUT_PARTS = some(
    part("input_text", {"text": TEXT}),
    part("input_image", {"detail": "auto"}, image_url=DATA_URL),
    part("input_file", {}, file_data=st.one_of(DATA_URL, BASE64), filename="a.pdf"),
)
OUTPUT_PARTS = some(part("output_text", {"text": TEXT, "annotations": st.just([])}), part("refusal", {"refusal": TEXT}))
CALL = {"id": ITEM_ID, "status": "completed"}
OUTPUT = st.one_of(TEXT, INPUT_PARTS)
RESPONSE_FUNCTION = part(
    "function", {"name": NAME, "parameters": ARGUMENTS, "strict": FLAG}, description=TEXT, defer_loading=FLAG
)
RESPONSE_CUSTOM = part("custom", {"name": NAME}, format=part("grammar", {"syntax": "lark", "definition": TEXT}))
RESPONSE_TOOL = st.one_of(
    RESPONSE_FUNCTION, RESPONSE_CUSTOM, part("local_shell", {}), part("apply_patch", {}),
    part("namespace", {"name": NAME, "description": TEXT, "tools": some(RESPONSE_FUNCTION, RESPONSE_CUSTOM)}),
    part("tool_search", {"execution": "client", "description": TEXT, "parameters": ARGUMENTS}),
    part("computer_use_preview", {"display_width": NUMBER, "display_height": NUMBER, "environment": "linux"}),
)  # fmt: skip
CHECKS = some(obj({"id": CALL_ID, "code": words(None, "x"), "message": TEXT}))
ITEM = st.one_of(
    obj({"role": words("user", "developer"), "content": st.one_of(TEXT, INPUT_PARTS)}, type="message", phase=words(None)),
    part(
        "message", {"role": "assistant", "content": OUTPUT_PARTS}, id=ITEM_ID, status=words("completed").map(NotForwarded),
        phase=words("final_answer"),
    ),
    part(
        "reasoning", {"id": ITEM_ID, "summary": some(part("summary_text", {"text": TEXT})), "encrypted_content": BASE64},
        content=words(None),
    ),
    part("function_call", {"call_id": CALL_ID, "name": NAME, "arguments": TEXT}, namespace=NAME, **CALL),
    part("function_call_output", {"call_id": CALL_ID, "output": OUTPUT}, **CALL),
    part("custom_tool_call", {"call_id": CALL_ID, "name": NAME, "input": TEXT}, id=ITEM_ID),
    part("custom_tool_call_output", {"call_id": CALL_ID, "output": OUTPUT}, id=ITEM_ID),
    part("local_shell_call", {"id": CALL_ID, "call_id": CALL_ID, "action": ARGUMENTS, "status": "completed"}),
    part("local_shell_call_output", {"id": CALL_ID, "output": TEXT}),
    part("apply_patch_call", {"call_id": CALL_ID, "operation": ARGUMENTS, "status": "completed"}, id=ITEM_ID),
    part("apply_patch_call_output", {"call_id": CALL_ID, "status": "failed"}, output=TEXT),
    part("computer_call", {"call_id": CALL_ID, "action": ARGUMENTS, "pending_safety_checks": CHECKS}, **CALL),
    part("computer_call_output", {"call_id": CALL_ID, "output": part("computer_screenshot", {"image_url": DATA_URL})}),
    part("tool_search_call", {"call_id": CALL_ID, "execution": "client", "arguments": ARGUMENTS, "status": "completed"}),
    part("tool_search_output", {"call_id": CALL_ID, "execution": "client", "tools": some(RESPONSE_TOOL)}, status="completed"),
    part("compaction", {"encrypted_content": BASE64}, id=ITEM_ID),
)  # fmt: skip
RESPONSES_BODY = obj(
    {"input": st.one_of(words("Hello.").map(Text), some(ITEM, least=1))},
    instructions=TEXT, max_output_tokens=NUMBER, stream=FLAG, include=some("reasoning.encrypted_content"),
    tools=some(RESPONSE_TOOL), parallel_tool_calls=FLAG, truncation="auto",
    tool_choice=st.one_of(
        words("auto"), part("function", {"name": NAME}),
        part("allowed_tools", {"mode": "auto", "tools": some(part("function", {"name": NAME}), part("apply_patch", {}))}),
    ),
    reasoning=obj({}, effort="low", summary="auto"),
    text=obj({}, verbosity="low", format=part("json_schema", {"name": NAME, "schema": ARGUMENTS}, strict=FLAG)),
)  # fmt: skip

# --- OpenAI: completions and embeddings --------------------------------------------------------------------------------
TOKENS = st.lists(NUMBER, min_size=1, max_size=3)
COMPLETIONS_BODY = obj(
    {"prompt": st.one_of(words("Hello.").map(Text), some(TEXT, least=1), TOKENS, some(TOKENS, least=1))},
    max_tokens=NUMBER, suffix=TEXT, stop=STOP, echo=FLAG, stream=FLAG, stream_options=STREAM_OPTIONS, best_of=words(1),
)  # fmt: skip
EMBEDDED = words("Hello.", "see https://text.test").map(Text)  # an input that is a URL as a whole is refused
EMBEDDINGS_BODY = obj(
    {"input": st.one_of(EMBEDDED, some(EMBEDDED, least=1), TOKENS, some(TOKENS, least=1))},
    dimensions=NUMBER, encoding_format="float",
)  # fmt: skip

BODIES = {
    "/v1/messages": MESSAGES_BODY,
    "/v1/messages/count_tokens": MESSAGES_BODY,
    "/v1/chat/completions": CHAT_BODY,
    "/v1/responses": RESPONSES_BODY,
    "/v1/completions": COMPLETIONS_BODY,
    "/v1/embeddings": EMBEDDINGS_BODY,
}
