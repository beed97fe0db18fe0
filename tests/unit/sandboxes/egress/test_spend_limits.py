"""Spend limit of a lease at the egress server: it holds however an answer hides its usage or its model."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from decimal import Decimal
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from billing import budgets
from billing.budgets import call_admission
from sandboxes.models import LlmCall, Sandbox
from tests.conftest import MINUTE, NOW
from tests.support.billing import create_budget
from tests.support.model_calls import wait_until_closed
from tests.support.model_rates import create_rates
from tests.support.servers import egress
from tests.support.servers.egress import CHAT_PATH, FakeUpstream, connect

pytestmark = pytest.mark.django_db(transaction=True)
LIMIT = Decimal("0.03")  # three calls
REQUEST = {"model": "gpt-4o", "messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 900}
USAGE = {"prompt_tokens": 100, "completion_tokens": 900}
DOCUMENT = {"model": "gpt-4o", "choices": [{"message": {"content": "y" * 2700}, "finish_reason": "stop"}]}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def limited(sandbox: Sandbox, settings: Any) -> Sandbox:
    settings.LLM_MODELS = ["*"]
    create_rates("gpt-4o", since=NOW - MINUTE, input=10, output=10)
    create_rates("text-embedding-3-small", since=NOW - MINUTE, input=10)
    Sandbox.objects.filter(pk=sandbox.pk).update(llm_limit=LIMIT)
    return sandbox


def answer_with(document: Any, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(document, headers=headers)

    return answer


def stream(*events: Any, usage: Any = None, breaks_off: bool = False) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in [*events, *([{"choices": [], "usage": usage}] if usage else [])]:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if breaks_off:
            assert request.transport
            request.transport.close()
            await asyncio.sleep(60)  # ends with the connection
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


DELTAS = [{"model": "gpt-4o", "choices": [{"delta": {"content": "word "}}]}] * 900
EMBEDDINGS = {
    "object": "list",
    "data": [],
    "model": "text-embedding-3-small",
    "usage": {"prompt_tokens": 1000, "total_tokens": 1000},
}
WAYS: dict[str, tuple[Answer, dict[str, Any], str]] = {
    "usage": (answer_with(DOCUMENT | {"usage": USAGE}), {}, CHAT_PATH),
    "dated answer": (answer_with(DOCUMENT | {"model": "gpt-4o-2024-08-06", "usage": USAGE}), {}, CHAT_PATH),
    "dated request": (answer_with(DOCUMENT | {"usage": USAGE}), {"model": "gpt-4o-2024-08-06"}, CHAT_PATH),
    "provider's prefix": (answer_with(DOCUMENT | {"usage": USAGE}), {"model": "openai/gpt-4o"}, CHAT_PATH),
    "no usage": (answer_with(DOCUMENT), {}, CHAT_PATH),
    "not JSON": (answer_with("y" * 2700), {}, CHAT_PATH),
    "unknown model in the answer": (answer_with(DOCUMENT | {"model": "other", "usage": USAGE}), {}, CHAT_PATH),
    "stream": (stream(*DELTAS, usage=USAGE), {"stream": True}, CHAT_PATH),
    "stream without usage": (stream(*DELTAS), {"stream": True}, CHAT_PATH),
    "stream that breaks off": (stream(*DELTAS, breaks_off=True), {"stream": True}, CHAT_PATH),
    "embeddings": (answer_with(EMBEDDINGS), {"model": "text-embedding-3-small", "input": "x" * 3000}, "/v1/embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_limit_holds(limited: Sandbox, upstream: FakeUpstream, socket_path: Path, way: str) -> None:
    upstream.answer, fields, path = WAYS[way]
    statuses = []
    for _ in range(5):
        body = {**REQUEST, **fields}
        body = {name: value for name, value in body.items() if path == CHAT_PATH or name in ("model", "input")}
        statuses.append(send(socket_path, body, path).status)
        wait_until_closed()
    answered = len(upstream.requests)
    spent = budgets.sum_lease_calls(limited.holder or limited.pk)
    assert 2 <= answered <= 3 and statuses[answered:] == [402] * (5 - answered)
    assert (2 * LIMIT / 3) * Decimal("0.9") <= spent <= LIMIT * Decimal("1.02")  # the error of the estimates
    priced = {*LlmCall.objects.exclude(outcome="refused").values_list("priced", flat=True)}
    assert priced == (
        {"estimate"} if way in ("no usage", "not JSON", "stream without usage", "stream that breaks off") else {"rate"}
    )


@pytest.mark.parametrize("of_lease", [False, True])
@pytest.mark.parametrize("way", ["usage", "no usage", "stream", "stream without usage", "stream that breaks off"])
def test_limit_in_tokens_holds_for_a_model_without_a_price(
    sandbox: Sandbox, upstream: FakeUpstream, socket_path: Path, settings: Any, way: str, of_lease: bool
) -> None:
    settings.LLM_MODELS = ["*"]
    budget = create_budget(10**6 if of_lease else 3000, "tokens", scope="agent", subject=sandbox.agent_did)
    if of_lease:
        Sandbox.objects.filter(pk=sandbox.pk).update(llm_token_limit=3000)
    upstream.answer, fields, path = WAYS[way]
    replies = []
    for _ in range(5):
        replies.append(send(socket_path, {**REQUEST, **fields}, path))
        wait_until_closed()
    answered, statuses = len(upstream.requests), [reply.status for reply in replies]
    assert 2 <= answered <= 3 and statuses[answered:] == [402] * (5 - answered)
    assert 0.9 * 2000 <= call_admission.sum_spent_now(budget, now=NOW) <= 3000 * 1.02  # the error of the estimates
    first = LlmCall.objects.earliest("pk")
    assert replies[0].headers["X-Leasehold-Remaining-Tokens"] == str(3000 - (first.reserved_tokens or 0))
    refused = replies[-1]
    error = refused.document["error"]
    assert refused.headers["x-should-retry"] == "false"
    if of_lease:
        assert (error["code"], error["limit_tokens"]) == ("token_limit_reached", "3000")
    else:
        assert (error["code"], error["unit"], error["limit"]) == ("budget_exhausted", "tokens", "3000")


class Reply(NamedTuple):
    """Status, headers and JSON document of an answer. The document of an incomplete answer or a stream is None."""

    status: int
    headers: Message
    document: Any


def send(socket_path: Path, body: Any, path: str = CHAT_PATH) -> Reply:
    """Send a request and read its answer, also an incomplete one."""
    connection = connect(socket_path)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer, document = connection.getresponse(), None
        with suppress(HTTPException, OSError, ValueError):
            document = json.loads(answer.read())
        return Reply(answer.status, answer.headers, document)
    finally:
        connection.close()


def test_stream_closed_by_its_client_counts_what_was_generated(
    limited: Sandbox, upstream: FakeUpstream, socket_path: Path
) -> None:
    """The client leaves after the first event. The rest of the stream is read, so that its usage arrives."""
    upstream.answer = stream(*DELTAS, usage=USAGE)
    for _ in range(5):
        connection = connect(socket_path)
        connection.request("POST", CHAT_PATH, json.dumps(REQUEST | {"stream": True}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        connection.sock.close()
        connection.close()
        wait_until_closed()
    assert len(upstream.requests) <= 3
    assert budgets.sum_lease_calls(limited.holder or limited.pk) >= LIMIT * Decimal("0.6")


def test_refusal_names_the_rate_to_add(limited: Sandbox, upstream: FakeUpstream, socket_path: Path) -> None:
    status, reply = egress.post(socket_path, REQUEST | {"model": "unknown"})
    assert (status, reply["error"]["code"]) == (402, "model_not_priced")
    assert "manage.py rate add --model unknown" in reply["error"]["message"]
    assert not upstream.requests


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503, 529])
def test_refused_and_failed_requests_are_free(limited: Sandbox, upstream: FakeUpstream, socket_path: Path, status: int) -> None:
    upstream.status, upstream.headers, upstream.body = status, {}, b'{"error": {"message": "no"}}'
    for _ in range(5):
        egress.post(socket_path, REQUEST)
        wait_until_closed()
    assert len(upstream.requests) == 5
    assert {*LlmCall.objects.values_list("outcome", "cost", "priced")} == {("failed", 0, "free")}


def test_unreachable_upstream_is_free(limited: Sandbox, settings: Any, socket_path: Path) -> None:
    settings.LLM_URL = "http://127.0.0.1:9/v1"
    assert egress.post(socket_path, REQUEST)[0] == 502
    wait_until_closed()
    assert LlmCall.objects.values_list("outcome", "cost", "priced").get() == ("failed", 0, "free")


def test_answers_state_the_rest_of_the_limit(limited: Sandbox, upstream: FakeUpstream, socket_path: Path) -> None:
    """The header counts this call with its estimate. The refusal is an error that SDKs do not retry, with its figures."""
    create_budget("0.02", "usd", scope="agent", subject=limited.agent_did)
    upstream.answer = answer_with(DOCUMENT | {"usage": USAGE})
    estimate = Decimal(0)
    for rest in (Decimal("0.02"), Decimal("0.01")):
        headers = send(socket_path, REQUEST).headers
        estimate = LlmCall.objects.latest("pk").reserved or estimate
        assert Decimal(headers["X-Leasehold-Remaining-USD"]) == rest - estimate
        wait_until_closed()
    refused = send(socket_path, REQUEST)
    error = refused.document["error"]
    assert (refused.status, refused.headers["x-should-retry"], error["code"]) == (402, "false", "budget_exhausted")
    assert (error["spent"], error["limit"], error["unit"], error["resets_at"]) == (
        "0.02",
        "0.02",
        "usd",
        "2026-11-22T00:00:00Z",
    )
