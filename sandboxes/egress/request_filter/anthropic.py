"""Tables of Anthropic's messages API: content blocks, tools and options."""

from sandboxes.egress.request_filter.errors import TOOL_NOT_ALLOWED
from sandboxes.egress.request_filter.shapes import Either, Leaf, ListOf, RequestShape, Shape, Tagged, record, text_or

CACHE_CONTROL = record("type", "ttl", "scope")
CITED = {"cited_text": Leaf.TEXT}
CITATION = Tagged({
    "char_location": record("document_index", "document_title", "start_char_index", "end_char_index", **CITED),
    "page_location": record("document_index", "document_title", "start_page_number", "end_page_number", **CITED),
    "content_block_location": record("document_index", "document_title", "start_block_index", "end_block_index", **CITED),
    "search_result_location": record(
        "search_result_index", "source", "title", "start_block_index", "end_block_index", **CITED
    ),
})  # fmt: skip
TEXT_BLOCK = record(text=Leaf.TEXT, cache_control=CACHE_CONTROL, citations=ListOf(CITATION))
BASE64_SOURCE = record("media_type", data=Leaf.DATA)
IMAGE_BLOCK = record(
    source=Tagged({"base64": BASE64_SOURCE}), cache_control=CACHE_CONTROL, transformations=record("oversized_image")
)
DOCUMENT_SOURCE = Tagged({
    "base64": BASE64_SOURCE,
    "text": record("media_type", data=Leaf.TEXT),
    "content": record(content=text_or(Tagged({"text": TEXT_BLOCK, "image": IMAGE_BLOCK}))),
})  # fmt: skip
CITATION_OPTION = record("enabled")
DOCUMENT_BLOCK = record(
    "title", "context", source=DOCUMENT_SOURCE, cache_control=CACHE_CONTROL, citations=CITATION_OPTION,
)  # fmt: skip
SEARCH_RESULT_BLOCK = record(
    "source", "title", content=ListOf(Tagged({"text": TEXT_BLOCK})), cache_control=CACHE_CONTROL, citations=CITATION_OPTION,
)  # fmt: skip
RESULT_BLOCKS = {
    "text": TEXT_BLOCK,
    "image": IMAGE_BLOCK,
    "document": DOCUMENT_BLOCK,
    "search_result": SEARCH_RESULT_BLOCK,
    "tool_reference": record("tool_name", cache_control=CACHE_CONTROL),
}

# Tools that the client executes. The provider executes all others, such as web search.
TOOL_OPTIONS: dict[str, Shape] = {
    "name": Leaf.VALUE, "strict": Leaf.VALUE, "defer_loading": Leaf.VALUE, "eager_input_streaming": Leaf.VALUE,
    "allowed_callers": ListOf(Leaf.VALUE), "input_examples": ListOf(Leaf.JSON), "cache_control": CACHE_CONTROL,
}  # fmt: skip
CUSTOM_TOOL = record(description=Leaf.TEXT, input_schema=Leaf.JSON, **TOOL_OPTIONS).requiring("name", "input_schema")
NAMED_TOOL = record(**TOOL_OPTIONS).requiring("name")
COMPUTER_ACTIONS = (
    "cursor_position", "double_click", "hold_key", "key", "left_click", "left_click_drag", "left_mouse_down", "left_mouse_up",
    "middle_click", "mouse_move", "right_click", "screenshot", "scroll", "triple_click", "type", "wait", "zoom",
)  # fmt: skip
DISPLAY_OPTIONS = ("display_width_px", "display_height_px", "display_number", "enable_zoom")
TYPED_TOOLS = {
    "bash_20*": NAMED_TOOL,
    "text_editor_20*": record("max_characters", **TOOL_OPTIONS).requiring("name"),
    "computer_20*": record(*DISPLAY_OPTIONS, **TOOL_OPTIONS).requiring("name"),
    "computer_toolset_20*": record(
        cache_control=CACHE_CONTROL, configs=record(**dict.fromkeys(COMPUTER_ACTIONS, record("enabled", "defer_loading")))
    ),
    "memory_20*": NAMED_TOOL,
}
TOOL = Tagged({"custom": CUSTOM_TOOL, **TYPED_TOOLS}, untyped=CUSTOM_TOOL, error_code=TOOL_NOT_ALLOWED)
TOOL_CHOICE = Tagged(
    {
        **dict.fromkeys(("auto", "any", "none"), record("disable_parallel_tool_use")),
        "tool": record("name", "disable_parallel_tool_use"),
    },
    error_code=TOOL_NOT_ALLOWED,
)
TOOL_CHANGE = record(
    cache_control=CACHE_CONTROL,
    tool=Tagged(
        {"tool_reference": record("name"), "tool_definition": record(definition=TOOL)}, error_code=TOOL_NOT_ALLOWED
    ),
)  # fmt: skip
TOOL_CHANGES = {"tool_addition": TOOL_CHANGE, "tool_removal": TOOL_CHANGE}

CONTENT_BLOCKS = {
    **RESULT_BLOCKS,
    **TOOL_CHANGES,
    "thinking": record("signature", thinking=Leaf.TEXT),
    "redacted_thinking": record("data"),
    "tool_use": record(
        "id", "name", "toolset_name", input=Leaf.JSON, cache_control=CACHE_CONTROL, caller=Tagged({"direct": record()}),
    ),
    "tool_result": record(
        "tool_use_id", "is_error", "toolset_name", content=text_or(Tagged(RESULT_BLOCKS)), cache_control=CACHE_CONTROL,
    ),
    "compaction": record(
        "encrypted_content", "signature", content=Leaf.TEXT, cache_control=CACHE_CONTROL,
        tool_changes=ListOf(Tagged(TOOL_CHANGES)),
    ),
}  # fmt: skip
MESSAGE = record("role", "clear_at", content=text_or(Tagged(CONTENT_BLOCKS)), output_config=record("effort"))

AMOUNT = record("type", "value")
CONTEXT_EDIT = record(
    "pause_after_compaction", trigger=AMOUNT, clear_at_least=AMOUNT, exclude_tools=ListOf(Leaf.VALUE),
    keep=Either(string=Leaf.VALUE, object=AMOUNT), clear_tool_inputs=Either(number=Leaf.VALUE, items=Leaf.VALUE),
    instructions=Leaf.TEXT,
)  # fmt: skip
CONTEXT_EDITS = Tagged(dict.fromkeys(("clear_tool_uses_20*", "clear_thinking_20*", "compact_20*"), CONTEXT_EDIT))
THINKING = record("type", "budget_tokens", "display", block_binding=record("prefix_mismatch_behavior"))
OUTPUT_CONFIG = record(
    "effort", format=record("type", schema=Leaf.JSON), task_budget=record("type", "total", "remaining")
)  # fmt: skip

MESSAGES_REQUEST = RequestShape(
    required="messages",
    fields={
        **dict.fromkeys(("model", "stream", "temperature", "top_p", "top_k", "max_tokens"), Leaf.VALUE),
        "messages": ListOf(MESSAGE),
        "system": text_or(Tagged({"text": TEXT_BLOCK})),
        "stop_sequences": ListOf(Leaf.VALUE),
        "tools": ListOf(TOOL),
        "tool_choice": TOOL_CHOICE,
        "thinking": THINKING,
        "output_config": OUTPUT_CONFIG,
        "context_management": record(edits=ListOf(CONTEXT_EDITS)),
        "cache_control": CACHE_CONTROL,
        **dict.fromkeys(("metadata", "service_tier", "inference_geo", "speed", "diagnostics"), Leaf.IGNORED),
        **dict.fromkeys(("container", "thread"), Leaf.REFUSED),
        "mcp_servers": Leaf.PROVIDER_TOOL,
    },
)
