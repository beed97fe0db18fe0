"""Tables of OpenAI's chat completions: content parts, tools and options.

LiteLLM accepts blocks and tools of Anthropic's API in chat completions as well, and so do these tables."""

from sandboxes.egress.request_filter import anthropic
from sandboxes.egress.request_filter.errors import TOOL_NOT_ALLOWED
from sandboxes.egress.request_filter.shapes import Either, Leaf, ListOf, RequestShape, Shape, Tagged, TokenMap, record, text_or

PART_OPTIONS: dict[str, Shape] = {
    "cache_control": anthropic.CACHE_CONTROL,
    "prompt_cache_breakpoint": record("mode", "ttl"),
}
TEXT_PART = record(text=Leaf.TEXT, citations=ListOf(anthropic.CITATION), **PART_OPTIONS)
MEDIA_URL = Either(string=Leaf.DATA, object=record("detail", "format", url=Leaf.DATA))
CONTENT_PARTS = {
    **anthropic.CONTENT_BLOCKS,
    "text": TEXT_PART,
    "refusal": record(refusal=Leaf.TEXT),
    "image_url": record(image_url=MEDIA_URL, **PART_OPTIONS),
    "video_url": record(video_url=MEDIA_URL, **PART_OPTIONS),
    "audio_url": record(audio_url=MEDIA_URL, **PART_OPTIONS),
    "input_audio": record(input_audio=record("format", data=Leaf.DATA), **PART_OPTIONS),
    "file": record(file=record("filename", "format", file_data=Leaf.DATA, file_id=Leaf.REFUSED), **PART_OPTIONS),
}
CALLED_FUNCTION = record("name", arguments=Leaf.TEXT)
TOOL_CALL = Tagged({
    "function": record("id", "index", function=CALLED_FUNCTION, provider_specific_fields=Leaf.IGNORED),
    "custom": record("id", "index", custom=record("name", input=Leaf.TEXT), provider_specific_fields=Leaf.IGNORED),
})  # fmt: skip
# Reasoning of earlier answers, as LiteLLM and OpenRouter report it.
THINKING_BLOCK = Tagged({kind: anthropic.CONTENT_BLOCKS[kind] for kind in ("thinking", "redacted_thinking")})
REASONING_DETAIL = record("type", "format", "index", "data", "signature", id=Leaf.IGNORED, text=Leaf.TEXT, summary=Leaf.TEXT)
MESSAGE = record(
    "role", "name", "tool_call_id", "prefix",
    content=text_or(Tagged(CONTENT_PARTS)),
    refusal=Leaf.TEXT,
    tool_calls=ListOf(TOOL_CALL),
    function_call=CALLED_FUNCTION,
    audio=Leaf.REFUSED,  # id of an earlier answer
    annotations=Leaf.EMPTY,
    cache_control=anthropic.CACHE_CONTROL,
    reasoning=Leaf.TEXT,
    reasoning_content=Leaf.TEXT,
    reasoning_details=ListOf(REASONING_DETAIL),
    thinking_blocks=ListOf(THINKING_BLOCK),
    images=ListOf(Tagged({"image_url": record("index", image_url=MEDIA_URL)})),  # of an earlier answer
    provider_specific_fields=Leaf.IGNORED,
)  # fmt: skip

FUNCTION = record(
    "name", "strict", description=Leaf.TEXT, parameters=Leaf.JSON, cache_control=anthropic.CACHE_CONTROL
).requiring("name")
GRAMMAR = record("type", grammar=record("syntax", definition=Leaf.TEXT))
CUSTOM = record("name", description=Leaf.TEXT, format=GRAMMAR).requiring("name")
FUNCTION_TOOL = record(function=FUNCTION, cache_control=anthropic.CACHE_CONTROL).requiring("function")
TOOL = Tagged(
    {
        "function": FUNCTION_TOOL,
        "custom": record(custom=CUSTOM).requiring("custom"),
        **anthropic.TYPED_TOOLS,
        # In LiteLLM's form, with the size of the display among the parameters.
        "computer_20*": FUNCTION_TOOL,
    },
    error_code=TOOL_NOT_ALLOWED,
)
NAMED_CHOICES = {"function": record(function=record("name")), "custom": record(custom=record("name"))}
ALLOWED_TOOLS = record("mode", tools=ListOf(Tagged(NAMED_CHOICES, error_code=TOOL_NOT_ALLOWED)))
TOOL_CHOICE = Either(
    string=Leaf.VALUE,
    object=Tagged(
        {**anthropic.TOOL_CHOICE.records, **NAMED_CHOICES, "allowed_tools": record(allowed_tools=ALLOWED_TOOLS)},
        error_code=TOOL_NOT_ALLOWED,
    ),
)
STREAM_OPTIONS = record("include_usage", "include_obfuscation")
STOP = Either(string=Leaf.VALUE, items=Leaf.VALUE)
RESPONSE_FORMAT = record(
    "type", json_schema=record("name", "strict", description=Leaf.TEXT, schema=Leaf.JSON), response_schema=Leaf.JSON
)  # fmt: skip
IGNORED_FIELDS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options",
)  # fmt: skip

CHAT_REQUEST = RequestShape(
    required="messages",
    fields={
        **dict.fromkeys(
            (
                "model", "stream", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "seed", "logprobs",
                "top_logprobs", "presence_penalty", "frequency_penalty", "parallel_tool_calls", "reasoning_effort", "verbosity",
            ),
            Leaf.VALUE,
        ),
        "messages": ListOf(MESSAGE),
        "tools": ListOf(TOOL),
        "tool_choice": TOOL_CHOICE,
        "stop": STOP,
        "logit_bias": TokenMap(Leaf.NUMBER),
        "response_format": RESPONSE_FORMAT,
        "prediction": record("type", content=text_or(Tagged({"text": TEXT_PART}))),
        "stream_options": STREAM_OPTIONS,
        **dict.fromkeys(IGNORED_FIELDS, Leaf.IGNORED),
        **dict.fromkeys(("web_search_options", "plugins"), Leaf.PROVIDER_TOOL),
    },
)  # fmt: skip
