"""Token usage in the formats of different providers. Input tokens always include cached tokens.

Field names are those of the published types of the SDKs `anthropic` 2.14 and `openai` 3.57, and of LiteLLM 1.106."""

import json
import math
from decimal import Decimal
from typing import Any

import pytest

from sandboxes.egress.token_usage import MAX_DOCUMENT_BYTES, TokenUsage, UsageReader
from tests.support.servers.models import TOKEN_COUNTS, ChatCompletionsApi, MessagesApi, ResponsesApi


@pytest.mark.parametrize(
    ("document", "counts"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, (3, None, 4)),
        ({"usage": {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 2}}, (5, 2, 4)),
        ({"usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 7}}, (12, 2, None)),
        ({"usage": {"input_tokens": 3, "cache_read_input_tokens": None, "cache_creation_input_tokens": -7}}, (3, None, None)),
        ({"usage": {"prompt_tokens": 3, "input_tokens": 1, "cache_read_input_tokens": 2}}, (3, 2, None)),
        ({"usage": {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 2}}}, (3, 2, None)),
        ({"response": {"usage": {"input_tokens": 3, "output_tokens": 0}}}, (3, None, 0)),
        ({"usage": {"prompt_tokens": -3, "completion_tokens": True}}, (None, None, None)),
        ({"usage": {"prompt_tokens": 1 << 60, "completion_tokens": "4"}}, (None, None, None)),
        ({"usage": {"input_tokens": 10**9, "cache_read_input_tokens": 1}}, (None, 1, None)),
        ({"usage": []}, (None, None, None)),
        ([], (None, None, None)),
    ],
)
def test_tokens_are_read_in_every_format_and_invalid_counts_are_none(document: Any, counts: tuple[int | None, ...]) -> None:
    usage = TokenUsage()
    usage.add(document)
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == counts


@pytest.mark.parametrize("shape", [ChatCompletionsApi, MessagesApi, ResponsesApi])
@pytest.mark.parametrize("streamed", [False, True])
def test_streamed_and_whole_responses_report_the_same_usage(shape: Any, streamed: bool) -> None:
    usage = TokenUsage()
    for document in shape.events("m") if streamed else [shape.whole("m")]:
        usage.add(document)
    assert [usage.input_tokens, usage.cached_tokens, usage.output_tokens] == [*TOKEN_COUNTS.values()]


def read(*documents: Any) -> TokenUsage:
    usage = TokenUsage()
    for document in documents:
        usage.add(document)
    return usage


def read_stream(*events: Any) -> UsageReader:
    reader = UsageReader("text/event-stream")
    for event in events:
        reader.feed(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")
    reader.end()
    return reader


# --- dialects -----------------------------------------------------------------------------------------------------------

ANTHROPIC_CACHE = {
    "input_tokens": 1000, "output_tokens": 500, "cache_read_input_tokens": 20_000, "cache_creation_input_tokens": 8000,
}  # fmt: skip
CACHE_COUNTS = {"input": 1000, "cache_read": 20_000, "output": 500}
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "messages": ({"input_tokens": 1000, "output_tokens": 500}, {"input": 1000, "output": 500}),
    "messages, cache written without its term": (ANTHROPIC_CACHE, CACHE_COUNTS | {"cache_write_5m": 8000}),
    "messages, cache written for 5 minutes and an hour": (
        {
            **ANTHROPIC_CACHE,
            "cache_creation": {"ephemeral_5m_input_tokens": 3000, "ephemeral_1h_input_tokens": 5000},
            "server_tool_use": {"web_search_requests": 2, "web_fetch_requests": 1},
            "output_tokens_details": {"thinking_tokens": 200},
        },
        CACHE_COUNTS | {"cache_write_5m": 3000, "cache_write_1h": 5000, "output": 300, "reasoning": 200, "web_search": 2},
    ),
    "messages, a sum of cache writes above its parts": (
        ANTHROPIC_CACHE | {"cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 5000}},
        CACHE_COUNTS | {"cache_write_5m": 3000, "cache_write_1h": 5000},
    ),
    "messages, with compaction beside its sums": (
        ANTHROPIC_CACHE
        | {
            "iterations": [
                {**ANTHROPIC_CACHE, "type": "message"},
                {"type": "compaction", "input_tokens": 7, "output_tokens": 11, "cache_read_input_tokens": 13,
                 "cache_creation_input_tokens": 0},
            ]
        },
        {"input": 1007, "cache_read": 20_013, "cache_write_5m": 8000, "output": 511},
    ),
    "chat": (
        {
            "prompt_tokens": 1000, "completion_tokens": 400, "total_tokens": 1400,
            "prompt_tokens_details": {"cached_tokens": 300, "audio_tokens": 200, "cache_write_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 100, "audio_tokens": 50, "rejected_prediction_tokens": 9},
        },
        {"input": 500, "cache_read": 300, "audio_input": 200, "output": 250, "reasoning": 100, "audio_output": 50},
    ),
    "chat, a part above its whole": (
        {
            "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 99}, "completion_tokens_details": {"reasoning_tokens": 99},
        },
        {"cache_read": 10, "reasoning": 5},
    ),
    "chat, details of null": (
        {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": None, "completion_tokens_details": None},
        {"input": 10, "output": 5},
    ),
    "xAI, reasoning beside the completion": (
        {
            "prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135,
            "prompt_tokens_details": {"text_tokens": 32, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 94, "audio_tokens": 0},
        },
        {"input": 24, "cache_read": 8, "output": 9, "reasoning": 94},
    ),
    "Gemini, reasoning in the total alone": (
        {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 130}, {"input": 10, "output": 20, "reasoning": 100},
    ),
    "reasoning above the completion, without a total": (
        {"prompt_tokens": 10, "completion_tokens": 20, "completion_tokens_details": {"reasoning_tokens": 100}},
        {"input": 10, "output": 20, "reasoning": 100},
    ),
    "DeepSeek": (
        {
            "prompt_tokens": 2000, "completion_tokens": 50, "total_tokens": 2050, "prompt_cache_hit_tokens": 1900,
            "prompt_cache_miss_tokens": 100, "prompt_tokens_details": {"cached_tokens": 0},
        },
        {"input": 100, "cache_read": 1900, "output": 50},
    ),
    "Moonshot": (
        {"prompt_tokens": 2000, "completion_tokens": 50, "total_tokens": 2050, "cached_tokens": 1900},
        {"input": 100, "cache_read": 1900, "output": 50},
    ),
    "Mistral, counts with a fraction of zero": (
        {"prompt_tokens": 10.0, "completion_tokens": 5.0, "total_tokens": 15.0, "prompt_audio_seconds": None},
        {"input": 10, "output": 5},
    ),
    "Gemini through LiteLLM": (
        {
            "prompt_tokens": 100, "completion_tokens": 60, "total_tokens": 160,
            "prompt_tokens_details": {"text_tokens": 70, "image_tokens": 30, "cached_tokens": None},
            "completion_tokens_details": {"reasoning_tokens": 40, "text_tokens": 10, "image_tokens": 10},
        },
        {"input": 70, "image_input": 30, "output": 10, "reasoning": 40, "image_output": 10},
    ),
    "Anthropic by Bedrock through LiteLLM": (
        {
            "prompt_tokens": 29_000, "completion_tokens": 500, "total_tokens": 29_500,
            "prompt_tokens_details": {
                "cached_tokens": 20_000, "cache_creation_tokens": 8000,
                "cache_creation_token_details": {"ephemeral_5m_input_tokens": 1000, "ephemeral_1h_input_tokens": 7000},
            },
            "cache_read_input_tokens": 20_000, "cache_creation_input_tokens": 8000,
        },
        CACHE_COUNTS | {"cache_write_5m": 1000, "cache_write_1h": 7000},
    ),
    "embeddings": ({"prompt_tokens": 1000, "total_tokens": 1000}, {"input": 1000}),
    "responses": (
        {
            "input_tokens": 1000, "output_tokens": 400, "total_tokens": 1400,
            "input_tokens_details": {"cached_tokens": 300, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 150},
        },
        {"input": 700, "cache_read": 300, "output": 250, "reasoning": 150},
    ),
    "responses, cache written for 30 minutes and 12 hours": (
        {
            "input_tokens": 1000, "output_tokens": 400, "total_tokens": 1400,
            "input_tokens_details": {
                "cached_tokens": 300, "cache_write_tokens": 600,
                "cache_write_tokens_details": {"ttl_30m_tokens": 500, "ttl_12h_tokens": 100},
            },
        },
        {"input": 100, "cache_read": 300, "cache_write_5m": 500, "cache_write_1h": 100, "output": 400},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
def test_tokens_of_each_kind_are_read_in_each_dialect(name: str) -> None:
    document, counts = DIALECTS[name]
    usage = read({"usage": document})
    assert usage.counts == counts and not usage.has_refused_counts
    tokens = sum(count for kind, count in counts.items() if kind != "web_search")
    assert tokens == (usage.input_tokens or 0) + (usage.output_tokens or 0)
    assert (usage.cached_tokens or 0) == counts.get("cache_read", 0)


def test_embeddings_have_no_output_and_are_complete() -> None:
    answer = {"object": "list", "data": [{"embedding": [0.5]}], "model": "e", "usage": {"total_tokens": 7}}
    for reply in (answer, {"usage": {"prompt_tokens": 7, "total_tokens": 7}}):
        usage = read(reply)
        assert (usage.input_tokens, usage.output_tokens, usage.counts) == (7, 0, {"input": 7})


def test_usage_of_zero_is_known_and_has_no_counts() -> None:
    usage = read({"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}})
    assert (usage.input_tokens, usage.output_tokens, usage.counts) == (0, 0, {})
    assert (read({}).input_tokens, read({}).counts) == (None, {})


@pytest.mark.parametrize(
    "document",
    [
        {"x_groq": {"id": "r", "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_time": 0.125}}},
        {"choices": [{"delta": {}, "finish_reason": "stop", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}]},
        {"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 4}}},
        {"type": "response.incomplete", "response": {"usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}}},
    ],
)
def test_usage_is_found_in_unusual_places(document: dict[str, Any]) -> None:
    assert read(document).counts == {"input": 3, "output": 4}


# --- merging ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "later",
    [
        {"output_tokens": 500},
        {"input_tokens": 1000, "output_tokens": 500},
        {"input_tokens": None, "cache_read_input_tokens": None, "cache_creation": None, "output_tokens": 500},
        {"input_tokens": 0, "cache_read_input_tokens": 0, "cache_creation": {}, "output_tokens": 500},
    ],
)
def test_later_usage_of_a_stream_keeps_fields_that_it_does_not_state(later: dict[str, Any]) -> None:
    written = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 8000}
    first = ANTHROPIC_CACHE | {"cache_creation": written, "output_tokens": 1}
    usage = read({"message": {"usage": first}}, {"type": "message_delta", "usage": later})
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (29_000, 20_000, 500)
    assert usage.counts == CACHE_COUNTS | {"cache_write_1h": 8000}
    assert usage.document is not None and usage.document["cache_creation"] == written


def test_later_sums_of_a_stream_replace_earlier_ones() -> None:
    later = {"input_tokens": 2000, "cache_read_input_tokens": 25_000, "output_tokens": 500}
    usage = read({"message": {"usage": ANTHROPIC_CACHE | {"output_tokens": 1}}}, {"type": "message_delta", "usage": later})
    assert usage.counts == {"input": 2000, "cache_read": 25_000, "cache_write_5m": 8000, "output": 500}


def test_later_count_out_of_range_is_refused_and_does_not_replace_a_valid_one() -> None:
    usage = read({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, {"usage": {"prompt_tokens": -1}})
    assert (usage.counts, usage.has_refused_counts) == ({"input": 3, "output": 4}, True)
    assert read({"usage": {"input_tokens": 10**9, "cache_read_input_tokens": 1}}).has_refused_counts


# --- document, tier, cost -------------------------------------------------------------------------------------------------


def test_usage_is_kept_as_reported_unless_it_is_too_large_or_not_storable() -> None:
    small = {"prompt_tokens": 3, "completion_tokens": 4, "queue_time": 0.25, "provider": {"name": "x"}}
    assert read({"usage": small}).document == small
    for extra in ("x" * MAX_DOCUMENT_BYTES, math.nan, "\x00", "\ud800", [["x"] * MAX_DOCUMENT_BYTES]):
        usage = read({"usage": small | {"extra": extra}})
        assert usage.document is None and usage.counts == {"input": 3, "output": 4}
    many = read(*({"usage": {f"field{number}": 1}} for number in range(10_000)), {"usage": small})
    assert len(many.document or {}) <= 256


def test_model_name_has_no_characters_that_the_database_refuses() -> None:
    assert read({"model": "gpt\x00-\ud8004o", "service_tier": "fl\x00ex"}) == TokenUsage(model="gpt-4o", tier="flex")


@pytest.mark.parametrize(
    ("documents", "tier"),
    [
        ([{"service_tier": "default"}], ""),
        ([{"service_tier": "on_demand"}], ""),
        ([{"service_tier": "Priority"}], "priority"),
        ([{"service_tier": "flex"}, {"service_tier": None}], "flex"),
        ([{"response": {"service_tier": "auto"}}, {"response": {"service_tier": "flex"}}], "flex"),
        ([{"message": {"usage": {"service_tier": "priority"}}}, {"usage": {"output_tokens": 1}}], "priority"),
        ([{"message": {"usage": {"service_tier": "standard"}}}], ""),
        ([{"message": {"usage": {"service_tier": "standard", "speed": "fast"}}}], "fast"),
    ],
)
def test_service_tier_is_read_and_standard_tiers_are_empty(documents: list[dict[str, Any]], tier: str) -> None:
    assert read(*documents).tier == tier


@pytest.mark.parametrize(
    ("usage", "cost", "is_refused"),
    [
        ({"cost": 0.0123}, "0.0123", False),  # LiteLLM, OpenRouter
        ({"cost": 1.5e-07}, "0.00000015", False),
        ({"cost": 0}, "0", False),
        ({"cost": None}, None, False),
        ({"cost": {"input_tokens_cost": 0.001, "total_cost": 0.003}}, "0.003", False),  # Perplexity
        ({"cost": {"currency": "USD"}}, None, False),
        ({"cost": -1}, None, True),
        ({"cost": "much"}, None, True),
        ({"cost_in_usd_ticks": 37_756_000}, "0.0037756", False),  # xAI: 10^10 ticks are a dollar
        ({"cost": 0.001, "is_byok": True}, None, False),  # OpenRouter: without the price of the vendor
    ],
)
def test_stated_cost_of_the_usage_is_read(usage: dict[str, Any], cost: str | None, is_refused: bool) -> None:
    found = read({"usage": {"prompt_tokens": 1, "completion_tokens": 1, **usage}})
    assert (found.cost, found.has_refused_counts) == (cost and Decimal(cost), is_refused)


# --- generated text and ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "size"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": "aé"}}, {"delta": {"content": "b"}}]}, 4),
        ({"choices": [{"delta": {"reasoning_content": "abc", "reasoning": "abc", "content": None}}]}, 3),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}}]}, 2),
        ({"choices": [{"text": "abc"}]}, 3),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, 0),
        ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, 0),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "abc"}}, 3),
        ({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "abc"}}, 3),
        ({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}, 1),
        ({"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "abc"}}, 0),
        ({"type": "response.output_text.delta", "delta": "abc"}, 3),
        ({"type": "response.reasoning_summary_text.delta", "delta": "abc"}, 3),
        ({"type": "response.function_call_arguments.delta", "delta": "{}"}, 2),
        ({"type": "response.output_text.done", "text": "abc"}, 0),
        ({"type": "response.completed", "response": ResponsesApi.whole("m")}, 0),
    ],
)
def test_generated_text_of_a_stream_is_measured(event: dict[str, Any], size: int) -> None:
    usage = read_stream(event).usage
    assert (usage.content_events, usage.content_bytes) == (1 if size else 0, size)


@pytest.mark.parametrize("shape", [ChatCompletionsApi, MessagesApi, ResponsesApi])
def test_generated_text_of_a_document_is_measured(shape: Any) -> None:
    reader = UsageReader("application/json")
    reader.feed(json.dumps(shape.whole("m")).encode())
    reader.end()
    assert (reader.usage.content_events, reader.usage.content_bytes) == (0, len("An answer in pieces."))
    assert reader.usage.is_final and not reader.is_incomplete and not reader.has_failed


@pytest.mark.parametrize("shape", [ChatCompletionsApi, MessagesApi, ResponsesApi])
def test_stream_without_its_end_is_incomplete(shape: Any) -> None:
    events = [*shape.events("m")]
    assert not read_stream(*events).is_incomplete
    assert read_stream(*events).usage.is_final
    cut = read_stream(*events[:3])
    assert cut.is_incomplete and not cut.has_failed and not cut.usage.is_final
    assert cut.usage.content_events > 0


@pytest.mark.parametrize(
    "error",
    [
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        {"type": "error", "code": "server_error", "message": "x", "param": None, "sequence_number": 3},
        {"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error"}}},
        {"error": {"message": "x", "code": 502}},
        {"error": {"message": "x"}, "choices": [{"delta": {"content": ""}, "finish_reason": "error"}]},
    ],
)
def test_error_event_makes_a_stream_fail(error: dict[str, Any]) -> None:
    reader = read_stream({"choices": [{"delta": {"content": "a"}}]}, error)
    assert reader.has_failed and not reader.complete
    assert not read_stream({"choices": []}, b"[DONE]", error).has_failed
    assert not read_stream({"error": None, "choices": []}).has_failed


def test_error_in_place_of_a_document_is_a_failure() -> None:
    for body, has_failed in (
        ({"error": {"message": "x"}}, True),
        ({"object": "response", "status": "failed", "error": {"code": "x"}, "output": [{}]}, True),
        ({"object": "response", "status": "completed", "error": None, "output": [{}]}, False),
        ({"error": {"code": 0}, "choices": [{"message": {}}]}, False),
    ):
        reader = UsageReader("application/json")
        reader.feed(json.dumps(body).encode())
        reader.end()
        assert reader.has_failed == has_failed, body
