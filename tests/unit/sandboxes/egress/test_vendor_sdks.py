"""The vendors' SDKs at the egress server: amounts of their calls, and errors that they retry or raise at once."""

import json
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sandboxes.models import LlmCall, Sandbox
from tests.conftest import MINUTE, NOW
from tests.support.call_histories.answers import VENDORS, Script
from tests.support.model_calls import wait_until_closed
from tests.support.model_rates import create_rates
from tests.support.servers.egress import FakeUpstream
from tests.support.servers.services import require_environment

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.matrix("SDKs in an environment of their own; the wire formats have tests on every change"),
]
SDK_CALLS = Path(__file__).resolve().parents[3] / "support" / "vendor_sdk_calls.py"
CLAUDE = {"input": 3, "cache_read": "0.30", "cache_write_5m": "3.75", "cache_write_1h": 6, "output": 15, "web_search": 10_000}
GPT = {"input": "2.5", "cache_read": "1.25", "output": 10, "audio_input": 40}
CACHE = {"input": 1000, "cache_read": 20_000, "output": 500}
PROMPT = [{"role": "user", "content": "Hello."}]
CREATE = {"anthropic": "messages.create", "openai": "chat.completions.create"}
ARGUMENTS = {
    "anthropic": {"model": "claude-x", "max_tokens": 900, "messages": PROMPT},
    "openai": {"model": "gpt-x", "messages": PROMPT},
}
CALLS: dict[str, tuple[str, str, dict[str, Any], dict[str, int], str]] = {  # vendor, method, arguments, counts, USD
    "messages": ("anthropic", "messages.create", ARGUMENTS["anthropic"], CACHE, "0.0165"),
    "messages, written for 5 minutes": (
        "anthropic", "messages.create", ARGUMENTS["anthropic"], CACHE | {"cache_write_5m": 8000}, "0.0465",
    ),
    "messages, written for an hour": (
        "anthropic", "messages.create", ARGUMENTS["anthropic"], CACHE | {"cache_write_1h": 8000}, "0.0645",
    ),
    "messages, searches": (
        "anthropic", "messages.create", ARGUMENTS["anthropic"], CACHE | {"reasoning": 100, "web_search": 2}, "0.038",
    ),
    "chat": ("openai", "chat.completions.create", ARGUMENTS["openai"], CACHE | {"audio_input": 100}, "0.0365"),
    "responses": ("responses", "responses.create", {"model": "gpt-x", "input": "Hello."}, CACHE | {"reasoning": 40}, "0.0329"),
    "embeddings": ("embeddings", "embeddings.create", {"model": "gpt-x", "input": "Hello."}, {"input": 1000}, "0.0025"),
}  # fmt: skip


@pytest.fixture
def python() -> str:
    return require_environment("deepagents-code", "TEST_DEEPAGENTS_CODE_PYTHON")[0]


@pytest.fixture(autouse=True)
def rates(transactional_db: None, settings: Any) -> None:
    settings.LLM_MODELS = ["*"]
    create_rates("claude-x", since=NOW - MINUTE, **CLAUDE)
    create_rates("gpt-x", since=NOW - MINUTE, **GPT)


def call(python: str, socket_path: Path, *calls: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python, str(SDK_CALLS), str(socket_path)],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    wait_until_closed()
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def script(upstream: FakeUpstream, vendor: str, counts: dict[str, int]) -> None:
    """Let the upstream answer each request with this usage."""
    model = "claude-x" if vendor == "anthropic" else "gpt-x"
    answer_script = Script(model, counts, ("Hello", " there."), first_counts={**counts, "output": 1})

    async def answer(request: web.Request) -> web.StreamResponse:
        build_events = VENDORS[vendor].build_events
        if not (await request.json()).get("stream") or build_events is None:
            return web.json_response(VENDORS[vendor].build_document(answer_script))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in build_events(answer_script):
            await response.write(event.data)
        return response

    upstream.answer = answer


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_an_sdk_cost_what_their_usage_says(python: str, upstream: FakeUpstream, socket_path: Path, name: str) -> None:
    vendor, method, arguments, counts, usd = CALLS[name]
    script(upstream, vendor, counts)
    sdk = "anthropic" if vendor == "anthropic" else "openai"
    ways: list[dict[str, Any]] = [{}] if vendor == "embeddings" else [{}, {"stream": True}]
    ways += [{"stream": True, "stream_options": {"include_usage": True}}] if vendor == "openai" else []
    results = call(python, socket_path, *((sdk, method, arguments | way) for way in ways))
    assert [*LlmCall.objects.order_by("pk").values_list("outcome", "cost", "priced")] == [("ok", Decimal(usd), "rate")] * len(
        ways
    )
    # The user of the SDK sees the usage, unless the stream was not asked for it.
    seen = ["usage" in result and bool(result["usage"]) for result in results]
    assert seen == [not (vendor == "openai" and way == {"stream": True}) for way in ways]
    if vendor == "anthropic":
        assert results[0]["usage"][-1]["cache_creation_input_tokens"] == results[1]["usage"][-1]["cache_creation_input_tokens"]


@pytest.mark.parametrize("sdk", CREATE)
def test_refusal_for_want_of_money_is_raised_at_once(
    python: str, upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path, sdk: str
) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(llm_limit=Decimal("0.000001"))
    results = call(python, socket_path, *((sdk, CREATE[sdk], ARGUMENTS[sdk] | way) for way in ({}, {"stream": True})))
    assert [(result["status"], result["retry_after"]) for result in results] == [(402, None)] * 2
    assert [*LlmCall.objects.values_list("outcome", "code")] == [("refused", "spend_limit_reached")] * 2  # one request each
    assert not upstream.requests


@pytest.mark.parametrize("sdk", CREATE)
@pytest.mark.parametrize("status", [429, 503, 529])
def test_retry_after_of_an_overloaded_upstream_reaches_the_sdk(
    python: str, upstream: FakeUpstream, socket_path: Path, sdk: str, status: int
) -> None:
    """The SDK waits as long as the header says, and tries three times."""
    upstream.status, upstream.headers = status, {"Retry-After": "1"}
    upstream.body = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "Busy."}}).encode()
    [result] = call(python, socket_path, (sdk, CREATE[sdk], ARGUMENTS[sdk]))
    assert (result["status"], result["retry_after"]) == (status, "1")
    assert len(upstream.requests) == 3
    assert {*LlmCall.objects.values_list("outcome", "cost", "priced")} == {("failed", 0, "free")}
