"""Egress server: authorization, credentials, call log, streaming and limits of model calls."""

import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from email.message import Message
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any

import brotli
import pytest
from aiohttp import web
from backports import zstd
from django.db import OperationalError, connection, transaction

from billing import budgets
from billing.models import HOUSE_ACCOUNT_NAME, Account, Membership
from leases import execution, leasing, one_shot, sweeps
from leases.models import EnvironmentType, Lease
from leases.one_shot import OneShotRequest
from sandboxes.call_limits import CallLimits
from sandboxes.db import sql as rows
from sandboxes.egress import authorization, model_calls, settlement
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.egress.estimates import TokenEstimate
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.server import EgressServer
from sandboxes.models import LlmCall, Policy, Pool, Run, Sandbox
from sandboxes.pool import allocation
from sandboxes.providers.memory import ProgramResult
from sandboxes.runs.operations import Command
from sandboxes.sweeps import passes
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.model_calls import wait_until_closed
from tests.support.model_rates import create_rates
from tests.support.servers import egress
from tests.support.servers.egress import (
    CHAT_PATH,
    COMPLETION_REQUEST,
    COMPLETION_RESPONSE,
    EventLoopThread,
    FakeUpstream,
    connect,
    run_server,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
SMALL = TokenEstimate(3, 9)


def post(path: Path, body: Any, url: str = CHAT_PATH, **headers: str) -> tuple[int, Any]:
    answer = egress.post(path, body, url, **headers)
    wait_until_closed()
    return answer


def post_for_headers(path: Path, body: Any) -> tuple[int, Message, bytes]:
    """Send a request. Return (status, headers, content)."""
    connection = connect(path)
    try:
        connection.request("POST", CHAT_PATH, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    wait_until_closed()
    return answer.status, answer.headers, content


@contextmanager
def begin_call(path: Path, url: str = CHAT_PATH, **fields: Any) -> Iterator[HTTPConnection]:
    """Send a request. Disconnect and wait until its call is closed at the end of the block."""
    connection = connect(path)
    connection.request("POST", url, json.dumps(COMPLETION_REQUEST | fields), {"Content-Type": "application/json"})
    yield connection
    connection.sock.close()
    connection.close()
    wait_until_closed()


async def notices_disconnect() -> bool:
    """Return whether the server has cancelled a handler."""
    return any(task.cancelling() for task in asyncio.all_tasks())


def set_policy(sandbox: Sandbox, **rules: Any) -> None:
    sandbox.policy = Policy.objects.create(name="other", **rules)
    sandbox.save(update_fields=["policy"])


def test_a_call_is_recorded_with_its_tokens_and_its_price(upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    assert post(socket_path, COMPLETION_REQUEST) == (200, COMPLETION_RESPONSE)
    row = LlmCall.objects.get()
    assert (row.outcome, row.status, row.model) == ("ok", 200, "gpt-4o-mini-2024-07-18")
    assert (row.input_tokens, row.cached_tokens, row.output_tokens) == (120, 100, 7)
    assert (row.cost, row.priced) == (Decimal("0.0000123"), "upstream")
    assert (row.sandbox, row.holder, row.agent_did, row.run_id) == (sandbox, sandbox.holder, sandbox.agent_did, None)


def test_billing_identity_of_the_sandbox_is_overwritten(upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    forged = {
        "Authorization": "Bearer stolen", "x-litellm-end-user-id": "did:plc:victim", "x-litellm-call-id": "1",
        "x-litellm-spend-logs-metadata": "{}", "x-api-key": "stolen", "X-Leasehold-Slot": "7", "X-Request-Id": "mine",
    }  # fmt: skip
    post(socket_path, {**COMPLETION_REQUEST, "metadata": {"user_id": "victim"}, "mock_response": "free"}, **forged)
    path, headers, body = upstream.requests[0]
    row = LlmCall.objects.get()
    assert (path, headers["authorization"]) == (CHAT_PATH, "Bearer sk-secret")
    assert "x-api-key" not in headers and "x-leasehold-slot" not in headers and "x-request-id" not in headers
    assert (headers["x-litellm-end-user-id"], headers["x-litellm-call-id"]) == (sandbox.agent_did, row.call_id) != ("", "mine")
    reply = json.loads(headers["x-litellm-spend-logs-metadata"])
    assert reply == {"call": row.call_id, "run": "", "attempt": 1, "lease": str(sandbox.holder), "agent": sandbox.agent_did,
                    "environment": sandbox.environment_id, "billing_account": "house"}  # fmt: skip
    assert body == {"messages": COMPLETION_REQUEST["messages"], "model": "gpt-4o-mini"}


def test_call_states_the_account_of_its_agent_at_its_time(upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    """An agent that joins, changes or leaves an account during its lease: each call states the account of its own day."""
    acme, beta, house = (Account.objects.get_or_create(name=name)[0] for name in ("acme", "beta", HOUSE_ACCOUNT_NAME))
    today = NOW.date()
    stated = []

    def call() -> None:
        assert post(socket_path, COMPLETION_REQUEST)[0] == 200
        stated.append(json.loads(upstream.requests[-1][1]["x-litellm-spend-logs-metadata"])["billing_account"])

    Membership.objects.create(agent_did="did:plc:other", account=beta, since=today)
    call()
    joined = Membership.objects.create(agent_did=sandbox.agent_did, account=acme, since=today)
    call()
    joined.account = beta
    joined.save()
    call()
    Membership.objects.create(agent_did=sandbox.agent_did, account=acme, since=today + timedelta(days=1))
    call()  # the change begins tomorrow
    Membership.objects.create(agent_did=sandbox.agent_did, account=acme, since=today - timedelta(days=1))
    call()  # the latest membership counts
    joined.account = house
    joined.save()
    call()
    assert stated == ["house", "acme", "beta", "beta", "beta", "house"]
    assert sandbox.slot is not None
    tomorrow = datetime.combine(today + timedelta(days=1), time(), UTC)
    just_before = tomorrow - timedelta(microseconds=1)
    accounts = [authorization.identify_caller(sandbox.slot, now=now).billing_account for now in (just_before, tomorrow)]
    assert accounts == ["house", "acme"]


def test_call_within_a_run_references_the_run(
    upstream: FakeUpstream, lease: Lease, sandbox: Sandbox, socket_path: Path
) -> None:
    command = Command(argv=["x"], timeout=MINUTE)
    run, answer = execution.call_in_sandbox(lease.pk, command, lambda *args: post(socket_path, COMPLETION_REQUEST), now=NOW)
    assert answer[0] == 200 and LlmCall.objects.get().run_id == run.pk


def test_row_is_written_before_the_call_is_forwarded(upstream: FakeUpstream, socket_path: Path) -> None:
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        rows = await asyncio.to_thread(lambda: [*LlmCall.objects.values_list("call_id", "outcome")])
        seen.append((rows, request.headers["x-litellm-call-id"]))
        return web.json_response(COMPLETION_RESPONSE)

    upstream.answer = answer
    post(socket_path, COMPLETION_REQUEST)
    [([(call_id, outcome)], sent)] = seen
    assert (call_id, outcome) == (sent, "open")


def test_call_that_cannot_be_recorded_is_not_forwarded(
    upstream: FakeUpstream, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **named: Any) -> None:
        raise OperationalError("disk full")

    monkeypatch.setattr(rows, "insert", fail)
    status, reply = post(socket_path, COMPLETION_REQUEST)
    assert (status, reply["error"]["code"]) == (503, "not_recorded")
    assert not upstream.requests


def test_dropped_database_connection_is_replaced(upstream: FakeUpstream, socket_path: Path) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has no connections to drop.")

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        [ours] = cursor.fetchone()

    async def answer(request: web.Request) -> web.Response:
        await asyncio.to_thread(drop_others, ours)
        return web.json_response(COMPLETION_RESPONSE)

    assert post(socket_path, COMPLETION_REQUEST)[0] == 200
    upstream.answer = answer  # drops the connections before the call is settled and the next one recorded
    assert [post(socket_path, COMPLETION_REQUEST)[0] for _ in range(10)] == [200] * 10
    assert [*LlmCall.objects.values_list("outcome", flat=True)] == ["ok"] * 11


def test_connection_that_is_lost_in_a_transaction_is_replaced(transactional_db: None, loop: EventLoopThread) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has no connections to drop.")
    attempts = []

    def query(lost: bool) -> int:
        attempts.append(lost)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            if lost and len(attempts) == 2:
                connection.connection.close()  # the rollback fails, too, and Django connects again
            cursor.execute("SELECT 1")
            return int(cursor.fetchone()[0])

    async def query_twice() -> list[int]:
        database = DatabaseThreads()
        database._executor = ThreadPoolExecutor(1)  # both in one thread, with one connection
        results = [await database.run(query, False), await database.run(query, True)]
        await database.run(lambda: connection.close())
        await database.close()
        return results

    assert loop.run(query_twice()) == [1, 1] and attempts == [False, True, True]


def drop_others(ours: int) -> None:
    with connection.cursor() as cursor:
        others = "datname = current_database() AND state = 'idle' AND pid NOT IN (pg_backend_pid(), %s)"
        cursor.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}", [ours])
    connection.close()


def test_call_without_a_valid_upstream_cost_is_unpriced(upstream: FakeUpstream, socket_path: Path) -> None:
    for reply in ({}, *({"x-litellm-response-cost": wrong} for wrong in ("NaN", "-1", "1e4", "1e30"))):
        upstream.headers = reply
        post(socket_path, COMPLETION_REQUEST)
    assert [*LlmCall.objects.values_list("cost", "priced", "outcome")] == [(None, "", "ok")] * 5
    assert sorted(LlmCall.objects.values_list("code", flat=True)) == ["", *["amount_refused"] * 4]


def test_call_with_tokens_out_of_range_is_answered_and_marked(upstream: FakeUpstream, socket_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({**COMPLETION_RESPONSE, "usage": {"prompt_tokens": 10**18, "completion_tokens": 4}})

    upstream.answer = answer
    assert post(socket_path, COMPLETION_REQUEST)[0] == 200
    row = LlmCall.objects.get()
    assert (row.outcome, row.code, row.input_tokens, row.output_tokens) == ("ok", "amount_refused", None, 4)


def test_upstream_error_is_recorded_and_reveals_nothing(upstream: FakeUpstream, socket_path: Path) -> None:
    for status, shown in {500: 502, 401: 502, 403: 502, 302: 502, 504: 504, 429: 429, 400: 400}.items():
        upstream.status, upstream.body = status, b'{"error": {"message": "xyzzy"}}'
        answer, reply = post(socket_path, COMPLETION_REQUEST)
        row = LlmCall.objects.latest("pk")
        assert (answer, row.outcome, row.code, row.status) == (shown, "failed", f"upstream_{status}", shown)
        assert ("xyzzy" in json.dumps(reply)) == (status in (400, 429)), status


@pytest.mark.parametrize("status", [429, 503, 529])
def test_overload_of_the_upstream_reaches_the_sandbox_as_the_vendor_sent_it(
    status: int, upstream: FakeUpstream, socket_path: Path
) -> None:
    told = {
        "Retry-After": "17", "retry-after-ms": "17250", "x-should-retry": "true", "x-ratelimit-remaining-requests": "0",
        "anthropic-ratelimit-tokens-reset": "2026-11-28T10:00:00Z",
    }  # fmt: skip
    secret = {"x-ratelimit-key": "sk-secret", "x-ratelimit-long": "9" * 500, "x-ratelimit-name": "é"}
    upstream.status, upstream.headers = status, told | secret | {"Set-Cookie": "a=b", "request-id": "r", "Server": "vendor"}
    upstream.body = b'{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}'
    answer, headers, content = post_for_headers(socket_path, COMPLETION_REQUEST)
    assert (answer, json.loads(content)["error"]["type"]) == (status, "overloaded_error")
    assert {name: headers[name] for name in told} == told
    assert not {"set-cookie", "request-id", *secret} & {name.lower() for name in headers} and headers["Server"] != "vendor"
    assert LlmCall.objects.values_list("status", "outcome", "code").get() == (status, "failed", f"upstream_{status}")


def test_retry_and_rate_limit_headers_of_other_answers_are_passed_on(upstream: FakeUpstream, socket_path: Path) -> None:
    upstream.headers = {"x-ratelimit-remaining-tokens": "5", "x-should-retry": "false", "x-litellm-model-id": "m"}
    for status, shown in {200: 200, 401: 502, 500: 502}.items():
        upstream.status = status
        answer, headers, _ = post_for_headers(socket_path, COMPLETION_REQUEST)
        assert (answer, headers["x-ratelimit-remaining-tokens"], headers["x-should-retry"]) == (shown, "5", "false")
        assert "x-litellm-model-id" not in headers


def test_cost_header_without_a_cost_is_no_refused_amount(upstream: FakeUpstream, socket_path: Path) -> None:
    upstream.headers = {"x-litellm-response-cost": "None"}
    assert post(socket_path, COMPLETION_REQUEST)[0] == 200
    assert LlmCall.objects.values_list("cost", "code", "outcome").get() == (None, "", "ok")


# --- encodings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("br", brotli.compress), ("zstd", zstd.compress)],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_compressed_answer_is_decoded_and_metered(
    streamed: bool, encoding: str, compress: Callable[[bytes], bytes], upstream: FakeUpstream, socket_path: Path
) -> None:
    whole = events(PIECE, TOKENS, b"[DONE]") if streamed else json.dumps(COMPLETION_RESPONSE).encode()
    upstream.body = compress(whole)
    upstream.headers = {"Content-Encoding": encoding}
    upstream.content_type = "text/event-stream" if streamed else "application/json"
    wants = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    answer, headers, content = post_for_headers(socket_path, COMPLETION_REQUEST | wants)
    assert (answer, content, headers.get("Content-Encoding")) == (200, whole, None)
    assert LlmCall.objects.values_list("outcome", "output_tokens").get() == ("ok", 4 if streamed else 7)


def test_answer_that_cannot_be_decoded_is_charged_and_not_repeated(upstream: FakeUpstream, socket_path: Path) -> None:
    for encoding, body in (("compress", b"x"), ("gzip, br", b"x"), ("gzip", b"not gzip at all"), ("br", b"\xff" * 99)):
        upstream.headers, upstream.body = {"Content-Encoding": encoding}, body
        answer, headers, content = post_for_headers(socket_path, COMPLETION_REQUEST)
        error = json.loads(content)["error"]
        assert (answer, headers["x-should-retry"], error["code"]) == (502, "false", "answer_not_decoded"), encoding
        assert encoding in error["message"]
        row = LlmCall.objects.latest("pk")
        assert (row.outcome, row.status, row.code, row.cost) == ("cut", 502, "answer_not_decoded", None)
        assert row.first_byte_at is not None and row.input_tokens is None


def test_upstream_error_containing_the_credential_is_not_passed_on(upstream: FakeUpstream, socket_path: Path) -> None:
    upstream.status, upstream.body = 400, b'{"error": "Received key sk-secret"}'
    status, reply = post(socket_path, COMPLETION_REQUEST)
    assert status == 502 and "sk-secret" not in json.dumps(reply)


def test_upstream_error_containing_a_placeholder_key_is_passed_on(settings, upstream: FakeUpstream, socket_path: Path) -> None:
    settings.LLM_API_KEY = "ollama"
    upstream.status, upstream.body = 404, b'{"error": "model not found, try ollama pull"}'
    assert post(socket_path, COMPLETION_REQUEST) == (404, {"error": "model not found, try ollama pull"})


def test_unreachable_upstream_is_a_failed_call(settings, upstream: FakeUpstream, socket_path: Path) -> None:
    settings.LLM_URL = "http://127.0.0.1:1/v1"
    assert post(socket_path, COMPLETION_REQUEST)[0] == 502
    assert LlmCall.objects.values_list("outcome", "code").get() == ("failed", "upstream_failed")


def test_offline_policy_call_has_zero_cost(settings, socket_path: Path) -> None:
    settings.LLM_URL = ""
    assert post(socket_path, COMPLETION_REQUEST)[0] == 200
    assert LlmCall.objects.values_list("model", "cost", "outcome").get() == ("leasehold-offline-policy", 0, "ok")
    assert post(socket_path, {**COMPLETION_REQUEST, "max_tokens": 1, "model": "default"}, "/v1/messages")[0] == 501


# --- streams ----------------------------------------------------------------------------------------------------------


def events(*reply: Any) -> bytes:
    return b"".join(b"data: " + (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n\n" for each in reply)


PIECE = {"model": "m", "choices": [{"delta": {"content": "a"}}]}
TOKENS = {"model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


def streaming(*chunks: bytes, hang: bool = False) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0)
        if hang:
            await asyncio.sleep(60)
        await response.write_eof()
        return response

    return answer


@pytest.mark.parametrize("asked_for", [False, True])
def test_stream_is_passed_on_and_metered(asked_for: bool, upstream: FakeUpstream, socket_path: Path) -> None:
    whole = events(PIECE, PIECE, TOKENS, b"[DONE]")
    upstream.answer = streaming(*(whole[at : at + 7] for at in range(0, len(whole), 7)))
    wants = {"stream_options": {"include_usage": True}} if asked_for else {}
    status, reply = post(socket_path, {**COMPLETION_REQUEST, "stream": True, **wants})
    assert (status, reply) == (200, whole if asked_for else events(PIECE, PIECE, b"[DONE]"))
    assert upstream.requests[0][2]["stream_options"] == {"include_usage": True}
    row = LlmCall.objects.get()
    assert (row.outcome, row.streamed, row.input_tokens, row.output_tokens, row.cost) == ("ok", True, 3, 4, None)
    assert row.received_bytes == len(reply)


def test_stream_options_of_the_caller_are_merged(upstream: FakeUpstream, socket_path: Path) -> None:
    upstream.answer = streaming(events(PIECE, TOKENS, b"[DONE]"))
    options = {"include_obfuscation": False, "include_usage": False}
    post(socket_path, {**COMPLETION_REQUEST, "stream": True, "stream_options": options})
    assert upstream.requests[0][2]["stream_options"] == {"include_obfuscation": False, "include_usage": True}


MESSAGE_START = {"type": "message_start", "message": {"model": "c", "usage": {"input_tokens": 5, "output_tokens": 1}}}
MESSAGE_PIECE = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}


@pytest.mark.parametrize(
    ("url", "last", "code"),
    [
        (CHAT_PATH, {"error": {"message": "overloaded"}}, "stream_error"),
        (CHAT_PATH, None, "stream_incomplete"),
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, "stream_error"),
        ("/v1/messages", None, "stream_incomplete"),
        ("/v1/responses", {"type": "error", "code": "server_error", "message": "x"}, "stream_error"),
        ("/v1/responses", {"type": "response.failed", "response": {"status": "failed"}}, "stream_error"),
        ("/v1/responses", None, "stream_incomplete"),
    ],
)
def test_stream_that_ends_with_an_error_or_without_its_end_has_failed(
    url: str, last: Any, code: str, upstream: FakeUpstream, socket_path: Path
) -> None:
    pieces: dict[str, list[Any]] = {
        CHAT_PATH: [PIECE, PIECE],
        "/v1/messages": [MESSAGE_START, MESSAGE_PIECE],
        "/v1/responses": [{"type": "response.output_text.delta", "delta": "a"}],
    }
    whole = events(*pieces[url], *([last] if last else []))
    upstream.answer = streaming(whole)
    body = {**COMPLETION_REQUEST, "input": "hi", "max_tokens": 9, "stream": True}
    assert post(socket_path, body, url) == (200, whole)
    row = LlmCall.objects.get()
    assert (row.outcome, row.status, row.code) == ("failed", 200, code)
    assert row.input_tokens == (5 if url == "/v1/messages" else None)


def test_disconnect_after_an_error_event_is_a_failed_stream(upstream: FakeUpstream, socket_path: Path) -> None:
    whole = events(PIECE, {"error": {"message": "overloaded"}})
    upstream.answer = streaming(whole, hang=True)
    with begin_call(socket_path, stream=True) as connection:
        assert connection.getresponse().read(len(whole)) == whole
    assert LlmCall.objects.values_list("outcome", "code").get() == ("failed", "stream_error")


def test_stream_with_a_reason_to_stop_needs_no_final_event(upstream: FakeUpstream, socket_path: Path) -> None:
    stopped = {"model": "m", "choices": [{"delta": {}, "finish_reason": "stop"}]}
    upstream.answer = streaming(events(PIECE, stopped, TOKENS))
    assert post(socket_path, {**COMPLETION_REQUEST, "stream": True})[0] == 200
    assert LlmCall.objects.values_list("outcome", "code", "output_tokens").get() == ("ok", "", 4)


def test_error_with_status_200_has_failed(upstream: FakeUpstream, socket_path: Path) -> None:
    upstream.body = b'{"error": {"message": "no provider", "code": 503}}'
    assert post(socket_path, COMPLETION_REQUEST) == (200, json.loads(upstream.body))
    assert LlmCall.objects.values_list("outcome", "code").get() == ("failed", "answer_error")


def test_anthropic_stream_is_metered(upstream: FakeUpstream, socket_path: Path) -> None:
    start = {"type": "message_start", "message": {"model": "c", "usage": {"input_tokens": 5, "output_tokens": 1}}}
    whole = events(start, {"type": "message_delta", "usage": {"output_tokens": 9}}, {"type": "message_stop"})
    upstream.answer = streaming(whole)
    body = {**COMPLETION_REQUEST, "max_tokens": 9, "stream": True}
    betas = "claude-code-20250219, mcp-client-2025-04-04,interleaved-thinking-2025-05-14,files-api-2025-04-14"
    sent = {"anthropic-version": "2024-01-01", "anthropic-beta": betas}
    assert post(socket_path, body, "/v1/messages?beta=true&other=1", **sent) == (200, whole)
    assert LlmCall.objects.values_list("model", "input_tokens", "output_tokens", "path").get() == ("c", 5, 9, "/v1/messages")
    path, headers, _ = upstream.requests[0]
    assert (path, headers["x-api-key"], headers["anthropic-version"]) == ("/v1/messages?beta=true", "sk-secret", "2024-01-01")
    assert headers["anthropic-beta"] == "claude-code-20250219,interleaved-thinking-2025-05-14"


def test_response_is_not_stored_upstream(upstream: FakeUpstream, socket_path: Path) -> None:
    for store in ({}, {"store": True}):
        assert post(socket_path, {"input": "hi", **store}, "/v1/responses")[0] == 200
    assert [(path, body["store"]) for path, _, body in upstream.requests] == [("/v1/responses", False)] * 2


def test_client_disconnect_cuts_the_stream_and_the_upstream_call(
    upstream: FakeUpstream, socket_path: Path, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upstream sends nothing more, so the time for which the stream is read on passes."""
    monkeypatch.setattr(model_calls, "READ_ON_SECONDS", 0.01)
    gone = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await streaming(events(PIECE), hang=True)(request)
        finally:
            gone.set()

    upstream.answer = answer
    with begin_call(socket_path, stream=True) as connection:
        assert connection.getresponse().read(10)
    loop.run(asyncio.wait_for(gone.wait(), 30))
    row = LlmCall.objects.get()
    assert (row.outcome, row.code) == ("cut", "not_read_to_its_end")


@pytest.mark.parametrize("url", [CHAT_PATH, "/v1/messages"])
def test_usage_that_comes_after_a_disconnect_is_counted(
    url: str, upstream: FakeUpstream, socket_path: Path, loop: EventLoopThread
) -> None:
    left = asyncio.Event()
    first, rest = {
        CHAT_PATH: ([PIECE], [PIECE, {"model": "m", "choices": [{"delta": {}, "finish_reason": "stop"}]}, TOKENS]),
        "/v1/messages": (
            [MESSAGE_START, MESSAGE_PIECE],
            [MESSAGE_PIECE, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}}],
        ),
    }[url]

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(events(*first))
        await left.wait()
        for event in rest:
            await response.write(events(event))
        await asyncio.sleep(60)
        return response

    upstream.answer = answer
    with begin_call(socket_path, url, max_tokens=9, stream=True) as connection:
        assert connection.getresponse().read(10)
        connection.sock.shutdown(SHUT_RDWR)
        wait_until(lambda: loop.run(notices_disconnect()), "the server notices the disconnect")
        loop.loop.call_soon_threadsafe(left.set)
    row = LlmCall.objects.get()
    assert (row.outcome, row.code, row.output_tokens) == ("cut", "not_read_to_its_end", 4)
    assert row.received_bytes == len(events(*first))


def test_stream_without_a_reader_ends_with_its_lease(
    upstream: FakeUpstream, lease: Lease, socket_path: Path, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_calls, "READ_ON_SECONDS", 600.0)
    upstream.answer = streaming(events(PIECE), hang=True)
    with begin_call(socket_path, stream=True) as connection:
        assert connection.getresponse().read(10)
        connection.sock.shutdown(SHUT_RDWR)
        wait_until(lambda: loop.run(notices_disconnect()), "the server notices the disconnect")
        leasing.release(lease.pk, now=NOW)
    assert LlmCall.objects.values_list("outcome", "code").get() == ("cut", "lease_ended")


def test_stream_without_a_reader_ends_with_the_server(
    upstream: FakeUpstream, sandbox: Sandbox, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_calls, "READ_ON_SECONDS", 600.0)
    upstream.answer = streaming(events(PIECE), hang=True)
    assert sandbox.slot is not None
    with run_server(loop, slot=sandbox.slot, server=EgressServer(now=lambda: NOW)) as path:
        connection = connect(path)
        body = json.dumps(COMPLETION_REQUEST | {"stream": True})
        connection.request("POST", CHAT_PATH, body, {"Content-Type": "application/json"})
        assert connection.getresponse().read(10)
        connection.sock.shutdown(SHUT_RDWR)
        wait_until(lambda: loop.run(notices_disconnect()), "the server notices the disconnect")
    assert LlmCall.objects.values_list("outcome", "code").get() == ("cut", "not_read_to_its_end")


def test_disconnect_while_the_row_is_written_leaves_no_open_call(
    upstream: FakeUpstream, socket_path: Path, loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, written, noticed = authorization.open_model_call, threading.Event(), threading.Event()

    def slow(*args: Any, **named: Any) -> Any:
        found = record(*args, **named)
        written.set()
        assert noticed.wait(60)
        return found

    monkeypatch.setattr(authorization, "open_model_call", slow)
    with begin_call(socket_path) as connection:
        assert written.wait(60)
        connection.sock.close()
        wait_until(lambda: loop.run(notices_disconnect()), "the server notices the disconnect")
        noticed.set()
    row = LlmCall.objects.get()
    assert (row.outcome, row.code, upstream.requests) == ("cut", "not_read_to_its_end", [])


def test_disconnect_after_the_final_event_is_a_complete_stream(upstream: FakeUpstream, socket_path: Path) -> None:
    """SDKs disconnect there: they do not wait for the end of the connection."""
    for last in (b"[DONE]", {"type": "message_stop"}, {"type": "response.completed"}):
        whole = events(PIECE, TOKENS, last)
        upstream.answer = streaming(whole, hang=True)
        with begin_call(socket_path, stream=True, stream_options={"include_usage": True}) as connection:
            assert connection.getresponse().read(len(whole)) == whole
        row = LlmCall.objects.latest("pk")
        assert (row.outcome, row.code, row.output_tokens, row.received_bytes) == ("ok", "", 4, len(whole)), last


def test_call_in_flight_is_cut_when_its_lease_ends(upstream: FakeUpstream, lease: Lease, socket_path: Path) -> None:
    upstream.answer = streaming(events(PIECE), hang=True)
    with begin_call(socket_path, stream=True) as connection:
        answer = connection.getresponse()
        assert answer.read(10)
        leasing.release(lease.pk, now=NOW)
        with pytest.raises((OSError, HTTPException)):  # the connection breaks: a partial response is not taken as complete
            answer.read()
    row = LlmCall.objects.get()
    assert (row.outcome, row.code) == ("cut", "lease_ended")


# --- authorization ----------------------------------------------------------------------------------------------------------


def test_call_from_a_sandbox_without_a_lease_is_refused(upstream: FakeUpstream, lease: Lease, socket_path: Path) -> None:
    leasing.release(lease.pk, now=NOW)
    status, reply = post(socket_path, COMPLETION_REQUEST)
    assert (status, reply["error"]["code"]) == (403, "no_lease")
    assert not upstream.requests and not LlmCall.objects.exists()


def test_calls_of_a_pre_warmed_sandbox_are_refused_until_it_is_claimed(
    upstream: FakeUpstream, pool: Pool, grant, loop: EventLoopThread
) -> None:
    Pool.objects.filter(pk=pool.pk).update(warm_target=1)
    box = allocation.start_warm(Pool.objects.get(pk=pool.pk), now=NOW)
    assert box is not None and box.slot is not None
    with run_server(loop, slot=box.slot, server=EgressServer(now=lambda: NOW)) as path:
        status, reply = post(path, COMPLETION_REQUEST)
        assert (status, reply["error"]["code"], upstream.requests) == (403, "no_lease", [])
        lease = grant()
        assert execution.ensure_sandbox_ready(lease.pk, now=NOW).pk == box.pk
        assert post(path, COMPLETION_REQUEST)[0] == 200
    assert LlmCall.objects.values_list("holder", "agent_did").get() == (lease.pk, "did:plc:ada")


def test_calls_through_a_reused_slot_are_billed_to_its_current_holder(
    settings, upstream: FakeUpstream, grant, loop: EventLoopThread
) -> None:
    settings.EGRESS_SLOTS = 1
    agents = ["did:plc:ada", "did:plc:bob"]
    with run_server(loop, slot=0, server=EgressServer(now=lambda: NOW)) as path:
        for agent in agents:
            lease = grant(agent)
            execution.ensure_sandbox_ready(lease.pk, now=NOW)
            assert post(path, COMPLETION_REQUEST)[0] == 200
            leasing.release(lease.pk, now=NOW)
            sweeps.reclaim(now=NOW)
            assert Sandbox.objects.values_list("state", "slot").get(holder=lease.pk) == ("destroyed", 0)
    assert [*LlmCall.objects.order_by("pk").values_list("agent_did", flat=True)] == agents
    assert [headers["x-litellm-end-user-id"] for _, headers, _ in upstream.requests] == agents


@pytest.mark.parametrize("is_prewarmed", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_run_without_the_model_proxy_makes_no_model_call(
    settings, upstream: FakeUpstream, loop: EventLoopThread, pool: Pool, memory, enabled: bool, is_prewarmed: bool
) -> None:
    settings.EGRESS_SLOTS = 1
    answers = []
    with run_server(loop, slot=0, server=EgressServer(now=lambda: NOW)) as path:

        def call_models(call: object) -> ProgramResult:
            answers.extend([egress.post(path, COMPLETION_REQUEST)[0], egress.get_status(path, "/v1/models")])
            return ProgramResult(exit_code=0, stdout=b"", stderr=b"")

        memory.programs["call-models"] = call_models
        if is_prewarmed:
            Pool.objects.filter(pk=pool.pk).update(warm_target=1)
            passes.warm_pools(now=NOW)
        request = OneShotRequest("did:plc:ada", ["call-models"], MINUTE, pool=pool.name, llm_proxy=enabled)
        assert one_shot.run_once(request, now=NOW).outcome == "ok"
        wait_until_closed()
    assert answers == ([200, 200] if enabled else [403, 403])
    assert len(upstream.requests) == enabled
    call = LlmCall.objects.get()
    assert (call.outcome, call.code) == (("ok", "") if enabled else ("refused", "llm_proxy_disabled"))


def test_model_outside_the_allow_list_is_refused(settings, upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    settings.LLM_MODELS = ["claude-*"]
    status, reply = post(socket_path, {**COMPLETION_REQUEST, "model": "the-most-expensive"})
    assert (status, reply["error"]["code"]) == (403, "model_not_allowed") and "claude-*" in reply["error"]["message"]
    assert post(socket_path, {**COMPLETION_REQUEST, "model": "claude-haiku"})[0] == 200
    assert [*LlmCall.objects.order_by("pk").values_list("outcome", "model")] == [
        ("refused", "the-most-expensive"), ("ok", "gpt-4o-mini-2024-07-18"),
    ]  # fmt: skip
    set_policy(sandbox, models=["tiny-*"])  # replaces the default
    assert [post(socket_path, {**COMPLETION_REQUEST, "model": model})[0] for model in ("tiny-1", "claude-haiku")] == [200, 403]


def test_call_above_the_spend_limit_is_refused_with_402(upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    create_rates("*", input=0.001, output=0.001)  # the estimate is small, and the upstream states more
    Sandbox.objects.filter(pk=sandbox.pk).update(llm_limit=Decimal("0.00002"))
    assert [post(socket_path, COMPLETION_REQUEST)[0] for _ in range(3)] == [200, 200, 402]
    _, reply = post(socket_path, COMPLETION_REQUEST)
    assert reply["error"]["code"] == "spend_limit_reached" and "0.00002 USD" in reply["error"]["message"]
    assert len(upstream.requests) == 2 and budgets.sum_lease_calls(sandbox.holder) == Decimal("0.0000246")


def test_call_of_an_exhausted_budget_is_refused_with_402(upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(llm_blocked_at=NOW + MINUTE)
    assert post(socket_path, COMPLETION_REQUEST)[0] == 200
    Sandbox.objects.filter(pk=sandbox.pk).update(llm_blocked_at=NOW)
    status, reply = post(socket_path, COMPLETION_REQUEST)
    assert (status, reply["error"]["code"], reply["error"]["type"]) == (402, "budget_exhausted", "budget_exhausted")
    assert "grace period" in reply["error"]["message"] and len(upstream.requests) == 1


def test_limits_of_a_lease_come_from_the_environment_type(grant) -> None:
    limits = CallLimits(Decimal("1.5"), 30_000)
    EnvironmentType.objects.filter(name="catan").update(**limits.columns)
    lease = grant(environment="game-9")
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
    assert CallLimits.of(lease) == CallLimits.of(Sandbox.objects.get(holder=lease.pk)) == limits


def test_calls_are_limited_per_minute_and_in_flight(upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    def rows(count: int, outcome: str, ended: Any) -> None:
        for number in range(count):
            LlmCall.objects.create(
                call_id=f"{outcome}-{number}", sandbox=sandbox, holder=sandbox.holder, outcome=outcome, ended_at=ended,
                started_at=NOW, deadline_at=NOW + MINUTE,
            )  # fmt: skip

    set_policy(sandbox, calls_per_minute=7, most_calls_at_once=3)
    rows(3, "open", None)
    assert post(socket_path, COMPLETION_REQUEST)[1]["error"]["code"] == "too_many_at_once"
    rows(4, "ok", NOW)
    assert post(socket_path, COMPLETION_REQUEST)[1]["error"]["code"] == "too_many_calls"
    LlmCall.objects.update(started_at=NOW - timedelta(minutes=2), deadline_at=NOW - MINUTE)
    assert post(socket_path, COMPLETION_REQUEST)[0] == 200


def test_refused_calls_do_not_count_against_the_rate_limit(upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    set_policy(sandbox, calls_per_minute=2)
    models = ["other", "other", "default", "default", "default"]
    statuses = [post(socket_path, {**COMPLETION_REQUEST, "model": model})[0] for model in models]
    assert statuses == [403, 403, 200, 200, 429]


def test_concurrent_requests_do_not_exceed_the_limit_on_calls_in_flight(sandbox: Sandbox) -> None:
    set_policy(sandbox, most_calls_at_once=2)

    def call(number: int) -> Any:
        name, slot = f"call-{number}", sandbox.slot or 0
        return authorization.open_model_call(
            slot, name, CHAT_PATH, "gpt-4o-mini", streamed=False, size=9, estimate=SMALL, now=NOW
        )

    with run_in_threads(16) as run:
        answers = run(call)
    codes = [answer.code for answer in answers if isinstance(answer, CallRefused)]
    assert codes == ["too_many_at_once"] * 14
    assert LlmCall.objects.filter(outcome="open").count() == 2
    assert LlmCall.objects.filter(outcome="refused").count() == 14


def test_calls_of_different_sandboxes_run_concurrently(upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path) -> None:
    """All calls arrive before the first is answered. Their number exceeds aiohttp's default limit of 100 connections."""
    calls, come = 120, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if len(upstream.requests) == calls:
            come.set()
        await asyncio.wait_for(come.wait(), 60)
        return web.json_response(COMPLETION_RESPONSE)

    upstream.answer = answer
    set_policy(sandbox, calls_per_minute=calls, most_calls_at_once=calls)
    content = json.dumps(COMPLETION_REQUEST)
    callers = [connect(socket_path) for _ in range(calls)]
    for each in callers:
        each.request("POST", CHAT_PATH, content, {"Content-Type": "application/json"})
    assert [each.getresponse().status for each in callers] == [200] * calls
    for each in callers:
        each.close()
    wait_until_closed()


def test_stored_refusals_are_limited(upstream: FakeUpstream, socket_path: Path) -> None:
    for _ in range(authorization.MAX_LOGGED_REFUSALS_PER_MINUTE + 5):
        assert post(socket_path, {**COMPLETION_REQUEST, "model": "other"})[0] == 403
    assert LlmCall.objects.count() == authorization.MAX_LOGGED_REFUSALS_PER_MINUTE


def test_invalid_request_is_refused_with_its_reason_and_not_forwarded(upstream: FakeUpstream, socket_path: Path) -> None:
    user = {"messages": [{"role": "user"}]}
    tools: list[dict[str, Any]] = [{"type": "web_search_20250305"}, {"type": "mcp", "server_url": "https://x"}]
    tools.append({"type": "namespace", "tools": [{"type": "function"}, {"type": "web_search"}]})
    link, source = {"image_url": {"url": "https://x/?secret"}}, {"source": {"type": "url", "url": "https://x"}}
    parts = [{"type": "image_url", **link}, {"type": "image", **source}, {"type": "file", "file_id": "file-1"}]
    for code, bodies in {
        "invalid_request": [b"{", [], {}, b"[" * 100_000, user | {"model": 7}, user | {"stream": "yes"}],
        "tool_not_allowed": [user | {"tools": [tool]} for tool in tools],
        "urls_not_fetched": [{"messages": [{"content": [part]}]} for part in parts],
    }.items():
        for body in bodies:
            status, reply = post(socket_path, body)
            assert (status, reply["error"]["code"]) == (400, code), body
    assert not upstream.requests and not LlmCall.objects.exists()


def test_tool_schemas_and_tool_arguments_may_contain_urls(upstream: FakeUpstream, socket_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "url", "url": "https://x"}}}
    called = {"role": "assistant", "content": [{"type": "tool_use", "input": {"type": "link", "url": "https://x"}}]}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
    assert post(socket_path, {"messages": [called, picture], "tools": [tool]})[0] == 200


def test_other_paths_are_refused(upstream: FakeUpstream, socket_path: Path) -> None:
    for url in ("/", "/healthz/x", "/v1/files", "/v1/chat/completions/", "/spend/logs", "/v1/../admin", "/relay"):
        assert post(socket_path, COMPLETION_REQUEST, url)[0] in (403, 405), url
    assert not upstream.requests


@pytest.mark.parametrize("kib", [None, 1, 8192])
def test_request_above_the_policys_size_limit_is_refused(
    kib: int | None, upstream: FakeUpstream, sandbox: Sandbox, socket_path: Path
) -> None:
    if kib:
        set_policy(sandbox, largest_body_kib=kib)
    most = (kib or 4096) << 10
    spaces = b" " * (most - len(json.dumps(COMPLETION_REQUEST)))
    assert post(socket_path, json.dumps(COMPLETION_REQUEST).encode() + spaces)[0] == 200
    status, reply = post(socket_path, json.dumps(COMPLETION_REQUEST).encode() + spaces + b" ")
    assert (status, reply["error"]["code"]) == (413, "too_large") and len(upstream.requests) == 1


# --- settlement ----------------------------------------------------------------------------------------------


def test_call_of_a_dead_server_is_closed_as_lost_and_unpriced(grant) -> None:
    row = LlmCall.objects.create(call_id="c1", started_at=NOW, deadline_at=NOW + MINUTE)
    assert sweeps.recover_stalled(now=NOW + MINUTE / 2).counts == {}
    assert sweeps.recover_stalled(now=NOW + 2 * MINUTE).counts == {"model calls closed": 1}
    row.refresh_from_db()
    assert (row.outcome, row.ended_at, row.cost) == ("lost", NOW + 2 * MINUTE, None)


def test_call_is_settled_once_and_an_earlier_record_keeps_its_price(sandbox: Sandbox) -> None:
    row, _ = authorization.open_model_call(
        sandbox.slot, "c1", CHAT_PATH, "gpt-4o-mini", streamed=False, size=1, estimate=SMALL, now=NOW
    )
    LlmCall.objects.filter(pk=row.pk).update(recorded_at=NOW, cost=Decimal("0.5"), priced="record")
    end = settlement.CallResult(LlmCall.Outcome.OK, 200, cost=Decimal("0.1"))
    assert settlement.settle_call(row, end, now=NOW) and not settlement.settle_call(row, end, now=NOW + MINUTE)
    row.refresh_from_db()
    assert (row.outcome, row.cost, row.priced, row.ended_at) == ("ok", Decimal("0.5"), "record", NOW)


def test_call_during_two_concurrent_runs_references_neither(lease: Lease, sandbox: Sandbox) -> None:
    for _ in range(2):
        Run.objects.create(sandbox=sandbox, argv=["x"], started_at=NOW, deadline_at=NOW + MINUTE)
    Sandbox.objects.filter(pk=sandbox.pk).update(open_runs=2, state="running")
    assert authorization.identify_caller(sandbox.slot, now=NOW).run is None
