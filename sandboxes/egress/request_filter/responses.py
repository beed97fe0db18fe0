"""Tables of OpenAI's responses API: items, content parts, tools and options.

Nothing is stored upstream, and other agents use the same account. The ids of items are therefore not forwarded: an item has its
content inline. Ids that pair a call with its output (`call_id`) concern the request alone."""

from sandboxes.egress.request_filter.chat import IGNORED_FIELDS
from sandboxes.egress.request_filter.errors import TOOL_NOT_ALLOWED
from sandboxes.egress.request_filter.shapes import Constant, Either, Leaf, ListOf, RequestShape, Shape, Tagged, record, text_or

BREAKPOINT = record("mode", "ttl")
INPUT_PARTS = {
    "input_text": record(text=Leaf.TEXT, prompt_cache_breakpoint=BREAKPOINT),
    "input_image": record("detail", image_url=Leaf.DATA, file_id=Leaf.REFUSED, prompt_cache_breakpoint=BREAKPOINT),
    "input_file": record(
        "filename", "detail", file_data=Leaf.DATA, file_url=Leaf.REFUSED, file_id=Leaf.REFUSED,
        prompt_cache_breakpoint=BREAKPOINT,
    ),
    "input_audio": record(input_audio=record("format", data=Leaf.DATA)),
}  # fmt: skip
MESSAGE_PARTS = {
    **INPUT_PARTS,
    "text": record(text=Leaf.TEXT),
    "output_text": record(text=Leaf.TEXT, annotations=Leaf.EMPTY, logprobs=Leaf.IGNORED),
    "refusal": record(refusal=Leaf.TEXT),
}
# Without its id an assistant's message has the form of an input message, which has no status.
MESSAGE = record(
    "role", "phase", content=text_or(Tagged(MESSAGE_PARTS)), id=Leaf.IGNORED, status=Leaf.IGNORED,
).requiring("role", "content")  # fmt: skip

GRAMMAR = record("type", "syntax", definition=Leaf.TEXT)
CALLERS = ListOf(Leaf.VALUE)
FUNCTION_TOOL = record(
    "name", "strict", "defer_loading", description=Leaf.TEXT, parameters=Leaf.JSON, output_schema=Leaf.JSON,
    allowed_callers=CALLERS,
).requiring("name")  # fmt: skip
CUSTOM_TOOL = record("name", "defer_loading", description=Leaf.TEXT, format=GRAMMAR, allowed_callers=CALLERS).requiring("name")
NAMED_TOOLS = {"function": FUNCTION_TOOL, "custom": CUSTOM_TOOL}
TOOL = Tagged(
    {
        **NAMED_TOOLS,
        "namespace": record(
            "name", description=Leaf.TEXT, tools=ListOf(Tagged(NAMED_TOOLS, error_code=TOOL_NOT_ALLOWED))
        ),
        "local_shell": record(),
        "apply_patch": record(allowed_callers=CALLERS),
        "computer_use_preview": record("display_width", "display_height", "environment"),
        # The provider executes a search without this value.
        "tool_search": record(
            execution=Constant("client"), description=Leaf.TEXT, parameters=Leaf.JSON
        ).requiring("execution"),
    },
    error_code=TOOL_NOT_ALLOWED,
)  # fmt: skip
TOOL_NAMES = {
    **dict.fromkeys(("function", "custom", "namespace"), record("name")),
    **dict.fromkeys(("local_shell", "apply_patch", "computer_use_preview", "tool_search"), record()),
}
TOOL_CHOICE = Either(
    string=Leaf.VALUE,
    object=Tagged(
        {**TOOL_NAMES, "allowed_tools": record("mode", tools=ListOf(Tagged(TOOL_NAMES, error_code=TOOL_NOT_ALLOWED)))},
        error_code=TOOL_NOT_ALLOWED,
    ),
)

CALL: dict[str, Shape] = {
    "id": Leaf.IGNORED, "call_id": Leaf.VALUE, "status": Leaf.VALUE, "caller": Tagged({"direct": record()}),
}  # fmt: skip
OUTPUT = text_or(Tagged(INPUT_PARTS))
SAFETY_CHECKS = ListOf(record("id", "code", message=Leaf.TEXT))
SCREENSHOT = Tagged({"computer_screenshot": record("detail", image_url=Leaf.DATA, file_id=Leaf.REFUSED)})
ITEM = Tagged(
    {
        "message": MESSAGE,
        "reasoning": record(
            "status", "encrypted_content", id=Leaf.IGNORED,
            summary=ListOf(Tagged({"summary_text": record(text=Leaf.TEXT)})),
            content=ListOf(Tagged({"reasoning_text": record(text=Leaf.TEXT), "text": record(text=Leaf.TEXT)})),
        ),
        "compaction": record("encrypted_content", id=Leaf.IGNORED),
        "function_call": record("name", "namespace", arguments=Leaf.TEXT, **CALL),
        "function_call_output": record("name", "namespace", output=OUTPUT, **CALL),
        "custom_tool_call": record("name", "namespace", input=Leaf.TEXT, **CALL),
        "custom_tool_call_output": record("name", "namespace", output=OUTPUT, **CALL),
        "apply_patch_call": record(operation=Leaf.JSON, **CALL),
        "apply_patch_call_output": record(output=Leaf.TEXT, **CALL),
        "computer_call": record(action=Leaf.JSON, actions=Leaf.JSON, pending_safety_checks=SAFETY_CHECKS, **CALL),
        "computer_call_output": record(output=SCREENSHOT, acknowledged_safety_checks=SAFETY_CHECKS, **CALL),
        "local_shell_call": record(action=Leaf.JSON, **CALL | {"id": Leaf.VALUE}),
        "local_shell_call_output": record("id", "call_id", "status", output=Leaf.TEXT),  # the id is that of the call
        "tool_search_call": record(execution=Constant("client"), arguments=Leaf.JSON, **CALL),
        "tool_search_output": record(execution=Constant("client"), tools=ListOf(TOOL), **CALL),
        "additional_tools": record("role", id=Leaf.IGNORED, tools=ListOf(TOOL)),
    },
    untyped=MESSAGE,
)  # fmt: skip

RESPONSES_REQUEST = RequestShape(
    required="input",
    fields={
        **dict.fromkeys(
            (
                "model", "stream", "temperature", "top_p", "max_output_tokens", "parallel_tool_calls", "truncation",
            ),
            Leaf.VALUE,
        ),
        "input": text_or(ITEM),
        "instructions": Leaf.TEXT,
        "tools": ListOf(TOOL),
        "tool_choice": TOOL_CHOICE,
        "include": ListOf(Leaf.VALUE),
        "reasoning": record("effort", "summary", "generate_summary", "context", "mode"),
        "text": record(
            "verbosity", format=record("type", "name", "strict", description=Leaf.TEXT, schema=Leaf.JSON)
        ),
        **dict.fromkeys((*IGNORED_FIELDS, "client_metadata", "stream_options"), Leaf.IGNORED),
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), Leaf.REFUSED),
    },
)  # fmt: skip
