"""The vendors' SDKs at the egress server: amounts of their calls, and errors that they retry or raise at once."""

import json
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

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
STATUSES = (429, 503, 529)


class Case(NamedTuple):
    """Call of an SDK, the vendor in VENDORS that answers, its usage, and the expected cost in USD."""

    sdk: str
    method: str
    vendor: str
    counts: dict[str, int]
    usd: str

    def build_arguments(self, prompt: str) -> dict[str, Any]:
        if self.vendor in ("responses", "embeddings"):
            return {"model": "gpt-x", "input": prompt}
        messages = [{"role": "user", "content": prompt}]
        return {"model": "gpt-x", "messages": messages} if self.sdk == "openai" else {
            "model": "claude-x", "max_tokens": 900, "messages": messages,
        }  # fmt: skip


CREATE_MESSAGE, CREATE_CHAT = ("anthropic", "messages.create", "anthropic"), ("openai", "chat.completions.create", "openai")
CASES = {
    "messages": Case(*CREATE_MESSAGE, CACHE, "0.0165"),
    "written for 5 minutes": Case(*CREATE_MESSAGE, CACHE | {"cache_write_5m": 8000}, "0.0465"),
    "written for an hour": Case(*CREATE_MESSAGE, CACHE | {"cache_write_1h": 8000}, "0.0645"),
    "searches": Case(*CREATE_MESSAGE, CACHE | {"reasoning": 100, "web_search": 2}, "0.038"),
    "chat": Case(*CREATE_CHAT, CACHE | {"audio_input": 100}, "0.0365"),
    "responses": Case("openai", "responses.create", "responses", CACHE | {"reasoning": 40}, "0.0329"),
    "embeddings": Case("openai", "embeddings.create", "embeddings", {"input": 1000}, "0.0025"),
}


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


def build_script(case: Case) -> Script:
    model = "claude-x" if case.sdk == "anthropic" else "gpt-x"
    return Script(model, case.counts, ("Hello", " there."), first_counts={**case.counts, "output": 1})


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer by the case whose name is in the prompt."""
    text = await request.text()
    case = next(case for name, case in CASES.items() if f"<{name}>" in text)
    build_events = VENDORS[case.vendor].build_events
    if not json.loads(text).get("stream") or build_events is None:
        return web.json_response(VENDORS[case.vendor].build_document(build_script(case)))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in build_events(build_script(case)):
        await response.write(event.data)
    return response


def list_ways(case: Case) -> list[dict[str, Any]]:
    """Return the options of a call: whole, streamed, and streamed with its usage."""
    ways: list[dict[str, Any]] = [{}] if case.vendor == "embeddings" else [{}, {"stream": True}]
    return ways + ([{"stream": True, "stream_options": {"include_usage": True}}] if case.vendor == "openai" else [])


def test_calls_of_the_sdks_cost_what_their_usage_says(python: str, upstream: FakeUpstream, socket_path: Path) -> None:
    upstream.answer = answer
    ways = [(name, case, way) for name, case in CASES.items() for way in list_ways(case)]
    calls = ((case.sdk, case.method, case.build_arguments(f"<{name}>") | way) for name, case, way in ways)
    results = call(python, socket_path, *calls)
    rows = LlmCall.objects.order_by("pk").values_list("outcome", "cost", "priced")
    assert [*rows] == [("ok", Decimal(case.usd), "rate") for _, case, _ in ways]
    # The user of the SDK sees the usage, unless a stream of chat completions was not asked for it.
    seen = [bool(result.get("usage")) for result in results]
    assert seen == [not (case.vendor == "openai" and way == {"stream": True}) for _, case, way in ways], results


def test_refusals_for_want_of_money_are_raised_at_once(
    python: str, upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path
) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(llm_limit=Decimal("0.000001"))
    cases = [(CASES[name], way) for name in ("messages", "chat") for way in ({}, {"stream": True})]
    results = call(python, socket_path, *((case.sdk, case.method, case.build_arguments("x") | way) for case, way in cases))
    assert [(result["status"], result["retry_after"]) for result in results] == [(402, None)] * 4
    assert [*LlmCall.objects.values_list("outcome", "code")] == [("refused", "spend_limit_reached")] * 4  # one request each
    assert not upstream.requests


def test_retry_after_of_an_overloaded_upstream_reaches_the_sdks(python: str, upstream: FakeUpstream, socket_path: Path) -> None:
    """An SDK waits as long as the header says, and tries three times."""
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Busy."}}

    async def refuse(request: web.Request) -> web.StreamResponse:
        status = next(status for status in STATUSES if f"<{status}>" in str(upstream.requests[-1][2]))
        return web.json_response(error, status=status, headers={"Retry-After": "1"})

    upstream.answer = refuse
    cases = [(CASES[name], status) for name in ("messages", "chat") for status in STATUSES]
    results = call(
        python, socket_path, *((case.sdk, case.method, case.build_arguments(f"<{status}>")) for case, status in cases)
    )
    assert [(result["status"], result["retry_after"]) for result in results] == [(status, "1") for _, status in cases]
    assert len(upstream.requests) == 3 * len(cases)
    assert {*LlmCall.objects.values_list("outcome", "cost", "priced")} == {("failed", 0, "free")}
