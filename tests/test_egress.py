"""What leaves a sandbox for its model is recorded: before it goes, and with what came back."""

import json
import socket
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from leases import acting, sweeps
from leases.models import Lease
from sandboxes.egress.door import Caller, door
from sandboxes.egress.usage import Usage
from sandboxes.models import LlmCall, Run, Sandbox
from sandboxes.moments import ticking
from sandboxes.runs import Command
from tests.conftest import MINUTE, NOW

SAID = {"model": "gpt-4o-mini-2024-07-18", "choices": [{"message": {"content": "{}"}}],
        "usage": {"prompt_tokens": 120, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 100}}}  # fmt: skip


class Upstream(ThreadingHTTPServer):
    """An OpenAI-compatible server on loopback that notes what it is asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.status, self.headers, self.answer = 200, {"x-litellm-response-cost": "0.0000123"}, json.dumps(SAID).encode()
        self.seen: list[str] = []  # outcomes of the rows there are while it is asked

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Answers(BaseHTTPRequestHandler):
    server: Upstream

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((dict(self.headers), body))
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def upstream(settings) -> Iterator[Upstream]:
    server = Upstream()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings.LLM_URL, settings.LLM_API_KEY = server.url, "sk-secret"
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def caller(transactional_db: None, grant) -> Caller:
    lease: Lease = grant()
    run, _ = acting.exec_in(lease.pk, Command(argv=["true"], timeout=MINUTE), now=NOW)
    return Caller(Sandbox.objects.get(holder=lease.pk), run.pk, ticking(NOW))


def post(path: Path, body: dict[str, Any], url: str = "/v1/chat/completions", **headers: str) -> HTTPResponse:
    """What a program in the sandbox does."""
    connection = HTTPConnection("sandbox")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("POST", url, json.dumps(body), headers)
    answer = connection.getresponse()
    answer.content = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


ASK = {"model": "the-most-expensive", "messages": [{"role": "user", "content": "{}"}], "user": "somebody else"}


def ask(caller: Caller, tmp_path: Path, **headers: str) -> HTTPResponse:
    path = tmp_path / "llm.sock"
    with door(path, caller, patience=MINUTE):
        return post(path, ASK, **headers)


@pytest.mark.django_db(transaction=True)
def test_a_call_is_recorded_with_its_tokens_and_its_price(caller: Caller, upstream: Upstream, tmp_path: Path) -> None:
    answer = ask(caller, tmp_path)
    assert (answer.status, json.loads(answer.content)) == (200, SAID)  # type: ignore[attr-defined]
    row = LlmCall.objects.get()
    assert (row.outcome, row.status, row.model) == ("ok", 200, "gpt-4o-mini-2024-07-18")
    assert (row.input_tokens, row.cached_tokens, row.output_tokens) == (120, 100, 7)
    assert (row.cost, row.priced) == (Decimal("0.0000123"), "upstream")
    assert (row.holder, row.agent_did, row.run_id) == (caller.sandbox.holder, caller.sandbox.agent_did, caller.run)
    assert row.started_at <= row.ended_at <= row.started_at + MINUTE


@pytest.mark.django_db(transaction=True)
def test_who_is_billed_is_what_we_say_and_not_what_the_sandbox_says(caller, upstream: Upstream, tmp_path: Path) -> None:
    forged = {
        "Authorization": "Bearer stolen", "x-litellm-end-user-id": "did:plc:victim", "x-litellm-call-id": "1",
        "x-litellm-spend-logs-metadata": "{}",
    }  # fmt: skip
    ask(caller, tmp_path, **forged)
    headers, body = upstream.asked[0]
    lower = {name.lower(): value for name, value in headers.items()}
    row = LlmCall.objects.get()
    assert lower["authorization"] == "Bearer sk-secret"
    assert (lower["x-litellm-end-user-id"], lower["x-litellm-call-id"]) == (caller.sandbox.agent_did, row.call_id)
    assert json.loads(lower["x-litellm-spend-logs-metadata"])["lease"] == str(caller.sandbox.holder)
    assert body.keys() == {"messages", "model"} and body["model"] != "the-most-expensive"


@pytest.mark.django_db(transaction=True)
def test_an_upstream_that_prices_nothing_leaves_the_call_unpriced(caller, upstream: Upstream, tmp_path: Path) -> None:
    for said in (
        {},
        {"x-litellm-response-cost": "NaN"},
        {"x-litellm-response-cost": "-1"},
        {"x-litellm-response-cost": "1e99"},
    ):
        upstream.headers = said
        ask(caller, tmp_path)
    assert set(LlmCall.objects.values_list("cost", "priced", "outcome")) == {(None, "", "ok")}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("status", "answer", "shown"), [(500, b'{"error": {}}', 500), (200, b"<html>", 502)])
def test_a_call_that_fails_is_recorded_as_failed(
    caller, upstream, tmp_path: Path, status: int, answer: bytes, shown: int
) -> None:
    upstream.status, upstream.answer, upstream.headers = status, answer, {}
    assert ask(caller, tmp_path).status == shown
    row = LlmCall.objects.get()
    assert (row.outcome, row.status, row.cost, row.input_tokens) == ("failed", shown, None, None)


@pytest.mark.django_db(transaction=True)
def test_nothing_is_sent_that_could_not_be_recorded(caller, upstream: Upstream, tmp_path: Path) -> None:
    Run.objects.filter(pk=caller.run).delete()  # its row cannot be written: it names a run that is not there
    assert ask(caller, tmp_path).status == 503
    assert not upstream.asked and not LlmCall.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_the_offline_policy_costs_nothing_and_says_so(caller: Caller, settings, tmp_path: Path) -> None:
    settings.LLM_URL = ""
    assert ask(caller, tmp_path).status == 200
    row = LlmCall.objects.get()
    assert (row.model, row.cost, row.outcome) == ("leasehold-offline-policy", 0, "ok")


@pytest.mark.django_db
def test_a_call_whose_forwarder_died_is_closed_as_lost_and_stays_unpriced(grant) -> None:
    row = LlmCall.objects.create(call_id="c1", started_at=NOW, deadline_at=NOW + MINUTE)
    assert sweeps.stalled(now=NOW + MINUTE / 2).counts == {}
    assert sweeps.stalled(now=NOW + 2 * MINUTE).counts == {"model calls closed": 1}
    row.refresh_from_db()
    assert (row.outcome, row.ended_at, row.cost) == ("lost", NOW + 2 * MINUTE, None)


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, (3, None, 4)),
        ({"usage": {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 2}}, (3, 2, 4)),
        ({"response": {"usage": {"input_tokens": 3, "output_tokens": 0}}}, (3, None, 0)),
        ({"usage": {"prompt_tokens": -3, "completion_tokens": True}}, (None, None, None)),
        ({"usage": {"prompt_tokens": 1 << 60, "completion_tokens": "4"}}, (None, None, None)),
        ({"usage": []}, (None, None, None)),
        ([], (None, None, None)),
    ],
)
def test_tokens_are_read_in_every_shape_and_nonsense_is_none(said: Any, counted: tuple[int | None, ...]) -> None:
    usage = Usage()
    usage.take(said)
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == counted
