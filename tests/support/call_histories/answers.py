"""Answers of model APIs as their vendors send them, built from known numbers of tokens.

`Event` states beside the bytes what a reader knows after them, so that the expected cost of an answer that breaks off follows
from the events that arrived."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Counts = Mapping[str, int]  # by kind of token; the kinds are disjoint
DONE = "[DONE]"


@dataclass(frozen=True)
class Script:
    """Answer of a model. `first_counts` are those at the start of a stream of messages, before the tools of the server ran."""

    model: str
    counts: Counts
    texts: tuple[str, ...]  # pieces of the generated text, none empty
    tier: str = ""
    first_counts: Counts = field(default_factory=dict)
    cost: float | None = None  # stated in the usage
    has_usage: bool = True
    is_tier_in_usage: bool = False


@dataclass(frozen=True)
class Event:
    """Server-sent event. `counts` and `tier` are None if the event does not change what is known."""

    data: bytes
    text_bytes: int = 0
    counts: Counts | None = None
    tier: str | None = None
    states_cost: bool = False
    is_end: bool = False  # of the generation; usage may follow
    is_last: bool = False  # ends the stream for an SDK


@dataclass(frozen=True)
class Vendor:
    """API of a vendor. `kinds` are those that its usage can state, `tiers` the service tiers that its answers name."""

    path: str
    kinds: tuple[str, ...]
    build_document: Callable[[Script], dict[str, Any]]
    build_events: Callable[[Script], Iterator[Event]] | None = None
    tiers: tuple[str, ...] = ("",)
    can_state_cost: bool = False

    def build_request(self, model: str, prompt: str, max_tokens: int | None, *, streamed: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.path in LIMIT_FIELDS_OF_CHATS else {"input": prompt}
        body |= {"stream": True} if streamed else {}
        limit = LIMIT_FIELDS_OF_CHATS.get(self.path) or ("max_output_tokens" if self.path == "/v1/responses" else None)
        return body | ({limit: max_tokens} if limit and max_tokens else {})


LIMIT_FIELDS_OF_CHATS = {"/v1/messages": "max_tokens", "/v1/chat/completions": "max_completion_tokens"}


def encode(document: Any, name: str = "") -> bytes:
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def take(counts: Counts, *kinds: str) -> int:
    return sum(counts.get(kind, 0) for kind in kinds)


# --- messages -----------------------------------------------------------------------------------------------------------


def build_messages_usage(script: Script, counts: Counts, **fields: Any) -> dict[str, Any]:
    written = {f"ephemeral_{term}_input_tokens": counts.get(f"cache_write_{term}", 0) for term in ("5m", "1h")}
    return {
        "input_tokens": counts.get("input", 0),
        "cache_read_input_tokens": counts.get("cache_read", 0),
        "cache_creation_input_tokens": sum(written.values()),
        "cache_creation": written,
        "output_tokens": take(counts, "output", "reasoning"),
        "service_tier": script.tier or "standard",
        **fields,
    }


def build_message(script: Script) -> dict[str, Any]:
    content = [{"type": "text", "text": text} for text in script.texts]
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": script.model, "content": content}
    return message | {"stop_reason": "end_turn"} | ({"usage": _complete_messages_usage(script)} if script.has_usage else {})


def _complete_messages_usage(script: Script) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if searches := script.counts.get("web_search"):
        extra["server_tool_use"] = {"web_search_requests": searches}
    if thinking := script.counts.get("reasoning"):
        extra["output_tokens_details"] = {"thinking_tokens": thinking}
    return build_messages_usage(script, script.counts, **extra)


def build_message_events(script: Script) -> Iterator[Event]:
    start = {"type": "message_start", "message": build_message(script) | {"content": [], "stop_reason": None}}
    start["message"].pop("usage", None)
    if script.has_usage:
        start["message"]["usage"] = build_messages_usage(script, script.first_counts)
        yield Event(encode(start, "message_start"), counts=script.first_counts, tier=script.tier)
    else:
        yield Event(encode(start, "message_start"))
    yield Event(encode({"type": "ping"}, "ping"))
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}
    yield Event(encode(block, "content_block_start"))
    for number, text in enumerate(script.texts):
        name, kind = ("thinking", "thinking_delta") if number % 2 else ("partial_json", "input_json_delta")
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": kind, name: text}}
        yield Event(encode(delta, "content_block_delta"), len(text.encode()))
    yield Event(encode({"type": "content_block_stop", "index": 0}, "content_block_stop"))
    end: dict[str, Any] = {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}}
    end |= {"usage": _complete_messages_usage(script)} if script.has_usage else {}
    yield Event(encode(end, "message_delta"), counts=script.counts if script.has_usage else None, is_end=True)
    yield Event(encode({"type": "message_stop"}, "message_stop"), is_end=True, is_last=True)


# --- chat completions ---------------------------------------------------------------------------------------------------


def _build_chat(counts: Counts, *, reasoning_beside: bool = False) -> dict[str, Any]:
    """Build the sums of a usage. `reasoning_beside`: the completion does not include the reasoning, but the total does."""
    prompt = take(counts, "input", "cache_read", "cache_write_5m", "cache_write_1h", "audio_input", "image_input")
    reasoning = counts.get("reasoning", 0)
    completion = take(counts, "output", "audio_output", "image_output") + (0 if reasoning_beside else reasoning)
    total = prompt + completion + (reasoning if reasoning_beside else 0)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def build_openai_usage(counts: Counts) -> dict[str, Any]:
    details = {"cached_tokens": counts.get("cache_read", 0), "audio_tokens": counts.get("audio_input", 0)}
    output = {"reasoning_tokens": counts.get("reasoning", 0), "audio_tokens": counts.get("audio_output", 0),
              "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}  # fmt: skip
    return _build_chat(counts) | {"prompt_tokens_details": details, "completion_tokens_details": output}


def build_xai_usage(counts: Counts) -> dict[str, Any]:
    details = {"text_tokens": take(counts, "input", "cache_read"), "audio_tokens": 0,
               "image_tokens": counts.get("image_input", 0), "cached_tokens": counts.get("cache_read", 0)}  # fmt: skip
    output = {"reasoning_tokens": counts.get("reasoning", 0), "audio_tokens": 0}
    sums = _build_chat(counts, reasoning_beside=True)
    return sums | {"prompt_tokens_details": details, "completion_tokens_details": output, "num_sources_used": 0}


def build_deepseek_usage(counts: Counts) -> dict[str, Any]:
    cache = {"prompt_cache_hit_tokens": counts.get("cache_read", 0), "prompt_cache_miss_tokens": counts.get("input", 0)}
    return _build_chat(counts) | cache | {"completion_tokens_details": {"reasoning_tokens": counts.get("reasoning", 0)}}


def build_moonshot_usage(counts: Counts) -> dict[str, Any]:
    return _build_chat(counts) | {"cached_tokens": counts.get("cache_read", 0)}


def build_mistral_usage(counts: Counts) -> dict[str, Any]:
    return {name: float(count) for name, count in _build_chat(counts).items()} | {"prompt_audio_seconds": None}


def build_gemini_usage(counts: Counts) -> dict[str, Any]:
    """LiteLLM's usage of Gemini: the completion includes the reasoning."""
    details = {"text_tokens": take(counts, "input", "cache_read"), "image_tokens": counts.get("image_input", 0),
               "audio_tokens": counts.get("audio_input", 0), "cached_tokens": counts.get("cache_read") or None}  # fmt: skip
    output = {"reasoning_tokens": counts.get("reasoning", 0), "text_tokens": counts.get("output", 0),
              "image_tokens": counts.get("image_output", 0)}  # fmt: skip
    return _build_chat(counts) | {"prompt_tokens_details": details, "completion_tokens_details": output}


def build_bedrock_usage(counts: Counts) -> dict[str, Any]:
    """LiteLLM's usage of a model of Anthropic."""
    written = {f"ephemeral_{term}_input_tokens": counts.get(f"cache_write_{term}", 0) for term in ("5m", "1h")}
    details = {"cached_tokens": counts.get("cache_read", 0), "cache_creation_tokens": sum(written.values()),
               "cache_creation_token_details": written, "web_search_requests": counts.get("web_search", 0)}  # fmt: skip
    flat = {"cache_read_input_tokens": counts.get("cache_read", 0), "cache_creation_input_tokens": sum(written.values())}
    return _build_chat(counts) | {"prompt_tokens_details": details} | flat


def build_chat_vendor(
    build_usage: Callable[[Counts], dict[str, Any]],
    *kinds: str,
    place: str = "chunk",
    tiers: tuple[str, ...] = ("",),
    can_state_cost: bool = False,
) -> Vendor:
    """Build a vendor of chat completions.

    The usage of a stream is at this place: in a `chunk` of its own, in the chunk of the `end`, or in the `choice` of that."""

    def state(script: Script) -> dict[str, Any]:
        return build_usage(script.counts) | ({} if script.cost is None else {"cost": script.cost})

    def build_document(script: Script) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(script.texts)}
        answer = {"id": "c1", "object": "chat.completion", "created": 1, "model": script.model,
                  "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}  # fmt: skip
        answer |= {"service_tier": script.tier or "default"} if tiers != ("",) else {}
        return answer | ({"usage": state(script)} if script.has_usage else {})

    def build_events(script: Script) -> Iterator[Event]:
        chunk: dict[str, Any] = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": script.model}
        chunk |= {"service_tier": script.tier or "default"} if tiers != ("",) else {}
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield Event(encode(chunk | {"choices": [first], "usage": None}), tier=script.tier)
        for number, text in enumerate(script.texts):
            delta = {"reasoning_content": text} if number % 3 == 1 else {"content": text}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield Event(encode(chunk | {"choices": [choice]}), len(text.encode()))
        usage = {"usage": state(script)} if script.has_usage else {}
        known = script.counts if script.has_usage else None
        has_cost = script.has_usage and script.cost is not None
        end: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": "stop"}
        end |= usage if place == "choice" else {}
        extra = usage if place == "end" else {}
        is_known = place != "chunk"
        yield Event(
            encode(chunk | {"choices": [end]} | extra), 0, known if is_known else None, None, has_cost and is_known, True
        )
        if usage and place == "chunk":
            yield Event(encode(chunk | {"choices": []} | usage), 0, known, None, has_cost, True)
        yield Event(encode(DONE), is_end=True, is_last=True)

    return Vendor("/v1/chat/completions", kinds, build_document, build_events, tiers, can_state_cost)


# --- responses, embeddings ----------------------------------------------------------------------------------------------


def build_response(script: Script) -> dict[str, Any]:
    text = {"type": "output_text", "text": "".join(script.texts), "annotations": []}
    message = {"type": "message", "id": "m1", "status": "completed", "role": "assistant", "content": [text]}
    counts = script.counts
    prompt = take(counts, "input", "cache_read", "cache_write_5m", "cache_write_1h")
    output = take(counts, "output", "reasoning")
    writes = {"ttl_30m_tokens": counts.get("cache_write_5m", 0), "ttl_12h_tokens": counts.get("cache_write_1h", 0)}
    details = {"cached_tokens": counts.get("cache_read", 0), "cache_write_tokens": sum(writes.values()),
               "cache_write_tokens_details": writes}  # fmt: skip
    sums = {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
    thinking = {"reasoning_tokens": counts.get("reasoning", 0)}
    usage = sums | {"input_tokens_details": details, "output_tokens_details": thinking}
    answer = {"id": "r1", "object": "response", "created_at": 1, "status": "completed", "model": script.model,
              "service_tier": script.tier or "default", "output": [message]}  # fmt: skip
    return answer | ({"usage": usage} if script.has_usage else {})


def build_response_events(script: Script) -> Iterator[Event]:
    whole = build_response(script)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "service_tier": "auto"}
    for kind in ("response.created", "response.in_progress"):
        yield Event(encode({"type": kind, "response": begun}, kind))
    for number, text in enumerate(script.texts):
        kind = "response.reasoning_summary_text.delta" if number % 2 else "response.output_text.delta"
        yield Event(encode({"type": kind, "item_id": "m1", "delta": text}, kind), len(text.encode()))
    done = {"type": "response.output_text.done", "item_id": "m1", "text": "".join(script.texts)}
    yield Event(encode(done, "response.output_text.done"))
    end = encode({"type": "response.completed", "response": whole}, "response.completed")
    yield Event(end, 0, script.counts if script.has_usage else None, script.tier, is_end=True, is_last=True)


def build_embeddings(script: Script) -> dict[str, Any]:
    count = script.counts.get("input", 0)
    usage = {"usage": {"prompt_tokens": count, "total_tokens": count}} if script.has_usage else {}
    data = [{"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}]
    return {"object": "list", "data": data, "model": script.model, **usage}


WRITES = ("cache_write_5m", "cache_write_1h")
TEXT = ("input", "cache_read", "output", "reasoning")
TIERS = ("", "priority", "flex")
VENDORS: dict[str, Vendor] = {
    "anthropic": Vendor(
        "/v1/messages", (*TEXT, *WRITES, "web_search"), build_message, build_message_events, ("", "priority")
    ),
    "openai": build_chat_vendor(build_openai_usage, *TEXT, "audio_input", "audio_output", tiers=TIERS),
    "xai": build_chat_vendor(build_xai_usage, *TEXT, "image_input"),
    "deepseek": build_chat_vendor(build_deepseek_usage, *TEXT, place="end"),
    "moonshot": build_chat_vendor(build_moonshot_usage, "input", "cache_read", "output", place="choice"),
    "mistral": build_chat_vendor(build_mistral_usage, "input", "output", place="end"),
    "gemini": build_chat_vendor(
        build_gemini_usage, *TEXT, "image_input", "audio_input", "image_output", can_state_cost=True
    ),
    "bedrock": build_chat_vendor(
        build_bedrock_usage, "input", "cache_read", "output", *WRITES, "web_search", can_state_cost=True
    ),
    "responses": Vendor("/v1/responses", (*TEXT, *WRITES), build_response, build_response_events, TIERS),
    "embeddings": Vendor("/v1/embeddings", ("input",), build_embeddings),
}  # fmt: skip
