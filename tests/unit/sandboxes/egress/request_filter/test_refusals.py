"""Attacks with model requests: tools of the provider, URLs to fetch, ids of stored objects, and shapes that no table knows."""

from typing import Any

import pytest

from sandboxes.egress.request_filter import FIELDS_BY_PATH, InvalidRequest, SanitizedRequest, sanitize_request

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
METADATA_URL, FILE_ID = "http://169.254.169.254/latest/meta-data", "file-ABC123"
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello."}]},
    MESSAGES: {"messages": [{"role": "user", "content": "Hello."}]},
    RESPONSES: {"input": "Hello."},
    COMPLETIONS: {"prompt": "Hello."},
    EMBEDDINGS: {"input": "Hello."},
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "get", "parameters": {}}},
    MESSAGES: {"name": "get", "input_schema": {}},
    RESPONSES: {"type": "function", "name": "get", "parameters": {}},
}


def sanitize(path: str, **fields: Any) -> SanitizedRequest:
    return sanitize_request(path, VALID[path] | fields, default_model="m")


def send_part(path: str, part: Any) -> SanitizedRequest:
    """Send a message with one content part."""
    return sanitize(path, **{"input" if path == RESPONSES else "messages": [{"role": "user", "content": [part]}]})


def refuse(path: str, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        sanitize(path, **fields)
    return refused.value


PROVIDER_TOOLS: list[Any] = [
    *({name: {}} for name in ("googleSearch", "google_search", "url_context", "urlContext", "code_execution", "googleMaps")),
    {"enterpriseWebSearch": {}}, {"googleSearchRetrieval": {}}, {"computerUse": {}}, {"function_declarations": []},
    {"googleSearch": None}, {"googleSearch": True}, {"name": "x", "googleSearch": {}}, {}, {"type": "googleSearch"},
    {"type": "web_search"}, {"type": "web_search_20250305", "name": "web_search"}, {"type": "web_fetch_20250910"},
    {"type": "code_execution_20250825", "name": "code_execution"}, {"type": "bash_code_execution_20250825"},
    {"type": "mcp", "server_url": "https://x"}, {"type": "mcp_toolset", "mcp_server_name": "x"}, {"type": "file_search"},
    {"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "image_generation"}, {"type": "computer_use"},
    {"type": "tool_search"}, {"type": "tool_search", "execution": "server"}, {"type": "shell"}, {"type": "bash_20*"},
    {"type": ["function"]}, {"type": {"a": 1}}, {"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]},
    {"type": "namespace", "name": "n", "tools": [{"googleSearch": {}}]}, {"type": "computer_20 https://x", "name": "computer"},
]  # fmt: skip


@pytest.mark.parametrize("path", FUNCTIONS)
@pytest.mark.parametrize("tool", PROVIDER_TOOLS, ids=str)
def test_tool_executed_by_the_provider_is_refused(path: str, tool: Any) -> None:
    for tools in ([tool], [FUNCTIONS[path], tool]):
        assert refuse(path, tools=tools).code in ("tool_not_allowed", "invalid_request")


@pytest.mark.parametrize("path", FUNCTIONS)
@pytest.mark.parametrize("fields", [{"googleSearch": {}}, {"url_context": []}, {"server_url": "https://x"}, {"file_id": "x"}])
def test_unknown_field_of_a_tool_is_refused_and_named(path: str, fields: dict[str, Any]) -> None:
    refusal = refuse(path, tools=[FUNCTIONS[path] | fields])
    assert refusal.code in ("tool_not_allowed", "urls_not_fetched")
    assert f"tools[0].{next(iter(fields))}" in refusal.message


def test_unknown_field_within_a_function_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": {}, "googleSearch": {}}}
    assert "tools[0].function.googleSearch" in refuse(CHAT, tools=[tool]).message


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "web_search_options", {}), (CHAT, "plugins", [{"id": "web"}]), (MESSAGES, "mcp_servers", [{"type": "url"}]),
        (MESSAGES, "container", "container_1"), (MESSAGES, "container", {"id": "x", "skills": []}),
        (MESSAGES, "thread", {"id": "t"}),
        (RESPONSES, "previous_response_id", "resp_1"), (RESPONSES, "conversation", "conv_1"),
        (RESPONSES, "conversation", {"id": "conv_1"}), (RESPONSES, "prompt", {"id": "pmpt_1"}),
        (CHAT, "tool_choice", {"type": "web_search"}), (RESPONSES, "tool_choice", {"type": "file_search"}),
        (RESPONSES, "tool_choice", {"type": "mcp", "server_label": "x"}), (MESSAGES, "tool_choice", {"type": "web_search"}),
        (RESPONSES, "tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}),
    ],
)  # fmt: skip
def test_option_with_a_stored_object_or_a_tool_of_the_provider_is_refused(path: str, field: str, value: Any) -> None:
    assert refuse(path, **{field: value}).code in ("urls_not_fetched", "tool_not_allowed")


def test_option_with_a_stored_object_may_be_null_or_empty() -> None:
    assert "previous_response_id" not in sanitize(RESPONSES, previous_response_id=None).body
    assert "mcp_servers" not in sanitize(MESSAGES, mcp_servers=[]).body


REFERENCES: list[dict[str, Any]] = [
    {"type": "file", "file": {"file_id": METADATA_URL}}, {"type": "file", "file": {"file_id": FILE_ID}},
    {"type": "file", "file": {"file_data": METADATA_URL}}, {"type": "file", "file": {"filename": METADATA_URL}},
    {"type": "file", "file_id": FILE_ID}, {"type": "input_audio", "input_audio": {"data": METADATA_URL}},
    {"type": "image_url", "image_url": {"url": METADATA_URL}}, {"type": "image_url", "image_url": METADATA_URL},
    {"type": "image_url", "image_url": {"url": f"data:image/png,{METADATA_URL}"}},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,AA=={METADATA_URL}"}},
    {"type": "image_url", "image_url": {"url": "gs://bucket/x"}}, {"image_url": {"url": METADATA_URL}},
    {"type": "image", "source": {"url": METADATA_URL}}, {"type": "image", "source": {"type": "url", "url": METADATA_URL}},
    {"type": "image", "source": {"type": "file", "file_id": FILE_ID}},
    {"type": "image", "source": {"type": "base64", "media_type": METADATA_URL, "data": "AA=="}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": METADATA_URL}},
    {"type": "document", "source": {"type": "url", "url": METADATA_URL}}, {"type": "document", "title": METADATA_URL},
    {"type": "document", "source": {"type": "content", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}},
    {"type": "search_result", "source": METADATA_URL, "title": "x", "content": []},
    {"type": "container_upload", "file_id": FILE_ID},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {"type": "file", "file_id": FILE_ID}}]},
    {"type": "input_image", "image_url": METADATA_URL}, {"type": "input_image", "file_id": FILE_ID},
    {"type": "input_file", "file_url": METADATA_URL}, {"type": "input_file", "file_id": FILE_ID},
    {"type": "input_file", "file_data": METADATA_URL}, {"type": "text", "text": "x", "uri": METADATA_URL},
    {"type": "text", "text": "x", "annotations": [{"type": "file_citation", "file_id": FILE_ID}]},
    {"type": "text", "text": "x", "unknown": FILE_ID}, {"type": "text", "text": "x", "unknown_id": "7"},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("part", REFERENCES, ids=str)
def test_content_with_a_url_or_a_file_id_is_refused(path: str, part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        send_part(path, part)


def test_content_with_a_url_or_an_id_has_its_own_code_and_names_the_field() -> None:
    with pytest.raises(InvalidRequest) as refused:
        send_part(CHAT, {"type": "file", "file": {"file_id": FILE_ID}})
    assert refused.value.code == "urls_not_fetched"
    assert refused.value.message.startswith("messages[0].content[0].file.file_id: ")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"type": None, "id": "msg_1"},
        {"id": "msg_1", "role": "user"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "file_id": "x"}, {"type": "file_search_call", "id": "fs_1"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": METADATA_URL}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_id": FILE_ID}]},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_file", "file_url": METADATA_URL}]},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "file_id": FILE_ID}},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": METADATA_URL}},
        {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "web_search"}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "mcp", "server_url": METADATA_URL}]},
        {"type": "mcp_list_tools", "server_label": "x", "tools": []}, {"type": "image_generation_call", "id": "ig_1"},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "x", "annotations": [{"type": "file_citation", "file_id": FILE_ID}]}]},
        "text", 7, None,
    ],
    ids=str,
)  # fmt: skip
def test_item_that_refers_to_a_stored_object_is_refused(item: Any) -> None:
    refuse(RESPONSES, input=[VALID[CHAT]["messages"][0], item])


def test_ids_of_items_are_not_forwarded() -> None:
    """Another tenant of the same account could own the object with this id."""
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "eA=="},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get", "arguments": "{}"},
    ]
    forwarded = sanitize(RESPONSES, input=items).body["input"]
    assert forwarded == [{name: value for name, value in item.items() if name != "id"} for item in items]


@pytest.mark.parametrize(
    "part",
    [{"text": "Hello."}, {"type": None, "text": "x"}, {"type": 7}, {"type": "unknown", "text": "x"}, "Hello.", ["x"], None],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_content_part_without_a_known_type_is_refused(path: str, part: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        send_part(path, part)
    assert refused.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "stop", "https://x"), (CHAT, "logit_bias", {"https://x": 1}), (CHAT, "temperature", {"url": "https://x"}),
        (CHAT, "model", "https://x/model"), (CHAT, "response_format", {"type": "json_object", "file": {"id": 1}}),
        (CHAT, "stream_options", {"callback": "https://x"}), (MESSAGES, "thinking", {"type": "enabled", "x": {"y": 1}}),
        (MESSAGES, "system", [{"type": "image", "source": {"type": "url", "url": "https://x"}}]),
        (MESSAGES, "context_management", {"edits": [{"type": "x", "webhook": "https://x"}]}),
        (RESPONSES, "include", ["https://x"]), (RESPONSES, "instructions", [{"id": "msg_1"}]),
        (CHAT, "messages", [{"role": "assistant", "audio": {"id": "audio_1"}}]),
        (CHAT, "messages", [{"role": "user", "content": "x", "attachments": [{"file_id": "x"}]}]),
    ],
    ids=str,
)  # fmt: skip
def test_option_with_a_url_or_an_unknown_object_is_refused(path: str, field: str, value: Any) -> None:
    refuse(path, **{field: value})


@pytest.mark.parametrize(
    "value",
    ["files/abc123", "gs://bucket/x.png", "a picture: gs://bucket/x.png", "s3://bucket/x", METADATA_URL, {"type": "file"}],
    ids=str,
)  # fmt: skip
def test_input_of_embeddings_that_names_a_file_is_refused(value: Any) -> None:
    for sent in (value, ["Hello.", value], [[value]]):
        refuse(EMBEDDINGS, input=sent)


def test_texts_of_embeddings_and_completions_may_mention_urls() -> None:
    text = "// See https://x.test/a for data: and files/abc."
    assert sanitize(EMBEDDINGS, input=[text]).body["input"] == [text]
    assert sanitize(COMPLETIONS, prompt=["https://x.test"]).body["prompt"] == ["https://x.test"]


def test_unknown_scalars_are_dropped_and_counted() -> None:
    part = {"type": "text", "text": "x", "new": "fast", "flag": True, "level": 3, "nothing": None}
    tool = FUNCTIONS[MESSAGES] | {"shiny": 1}
    result = sanitize(MESSAGES, messages=[{"role": "user", "content": [part, part]}], tools=[tool], new_option={"a": 1})
    assert result.body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2}]
    assert result.body["tools"] == [FUNCTIONS[MESSAGES]]
    names = {"messages.content.new", "messages.content.flag", "messages.content.level", "tools.shiny", "new_option"}
    assert (result.dropped_count, result.dropped_names) == (8, names)


def test_names_of_many_dropped_fields_are_limited() -> None:
    result = sanitize(CHAT, **{f"x{number}" * 90: "x" for number in range(1000)})
    assert result.dropped_count == 1000
    assert len(result.dropped_names) == 20 and max(map(len, result.dropped_names)) <= 100


@pytest.mark.parametrize("path", FIELDS_BY_PATH)
def test_arguments_that_are_nested_too_deeply_are_refused(path: str) -> None:
    value: Any = {}
    for _ in range(300):
        value = {"x": [value]}
    body = {FIELDS_BY_PATH[path].required: value, "tools": [{"name": "x", "input_schema": value}]}
    with pytest.raises(InvalidRequest):
        sanitize_request(path, body, default_model="m")


def test_schema_that_is_nested_too_deeply_is_refused() -> None:
    value: Any = {}
    for _ in range(200):
        value = {"x": value}
    refusal = refuse(MESSAGES, tools=[{"name": "x", "input_schema": value}])
    assert (refusal.code, "levels deep" in refusal.message) == ("invalid_request", True)
