"""SIGKILL of the egress server in the middle of many streams: its successor closes them at once, and no reservation leaks."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from decimal import Decimal
from http.client import HTTPConnection, HTTPException, HTTPResponse
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from sandboxes.egress.slots import SOCKET_NAME
from tests.commands.manage import MANAGE, build_environment, get_runtime_dir, run_manage
from tests.e2e.conftest import HEALTHY, FleetTemplate
from tests.e2e.test_kill import Fleet, copy_database
from tests.support.servers import egress
from tests.support.servers.egress import CHAT_PATH, EventLoopThread, FakeUpstream
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.matrix("half a minute; tests/unit/billing/test_call_histories.py has crashes of one process"),
]
STREAM_COUNT, CALLS_AT_ONCE = 50, 8  # the second is the limit of a sandbox
LEASE_COUNT = ceil(STREAM_COUNT / CALLS_AT_ONCE)
MESSAGES_PATH = "/v1/messages"
MAX_TOKENS, PIECES = 400, 5
MILLION = Decimal(10**6)
CLAUDE = {"input": 3, "cache_read": Decimal("0.3"), "cache_write_5m": Decimal("3.75"), "cache_write_1h": 6, "output": 15}
GPT = {"input": Decimal("2.5"), "output": 10}
CLAUDE_USAGE = {"input_tokens": 1000, "cache_read_input_tokens": 20_000, "cache_creation_input_tokens": 8000}
CLAUDE_INPUT_USD = (1000 * CLAUDE["input"] + 20_000 * CLAUDE["cache_read"] + 8000 * CLAUDE["cache_write_5m"]) / MILLION
SETUP = f"""
import json
from datetime import timedelta
from billing import budgets
from billing.models import Budget
from leases import execution, leasing
from sandboxes.db import database_time
from sandboxes.models import Sandbox, TokenRate
from sandboxes.runs.operations import Command

now = database_time.now()
for pattern, prices in json.loads('''{json.dumps({"claude-x": CLAUDE, "gpt-x": GPT}, default=str)}''').items():
    for kind, usd in prices.items():
        TokenRate.objects.create(pattern=pattern, kind=kind, usd_per_million=usd, valid_from=now - timedelta(days=1))
slots = []
for number in range({LEASE_COUNT}):
    request = leasing.LeaseRequest(agent_did=f"did:plc:a{{number}}", environment_id=f"e{{number}}", environment_type="coding")
    lease = leasing.acquire(request, now=now)[0]
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=timedelta(minutes=1)), now=now)
    slots.append(Sandbox.objects.get(holder=lease.pk).slot)
budgets.create_budget(Budget(scope="all", amount=1000, unit="usd", period="ever"), now=now)
print(json.dumps(slots))
"""


class Call(NamedTuple):
    """Row of a call."""

    slot: int
    path: str
    outcome: str
    priced: str
    input_tokens: int | None
    usd: Decimal


class Proxy:
    """Egress servers of one installation, one at a time, without nginx."""

    def __init__(self, fleet: Fleet, url: str) -> None:
        self.fleet, self._log = fleet, fleet.path / "egress.log"
        fleet.env |= {"LEASEHOLD_LLM_URL": url, "LEASEHOLD_LLM_MODELS": "*", "LEASEHOLD_EGRESS_SLOTS": "64"}
        self._env = fleet.env | {"PYTHONUNBUFFERED": "1"}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a server, and return when it serves."""
        begun = self._count_starts()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(MANAGE), "egress", "--proxy", "none"],
                env=build_environment(self.fleet.path, **self._env), stdout=log, stderr=log,
            )  # fmt: skip
        process = self.process
        wait_until(lambda: process.poll() is not None or self._count_starts() > begun, "the server serves", within=HEALTHY)
        assert process.poll() is None, self._log.read_text()

    def _count_starts(self) -> int:
        return self._log.read_text().count("egress: ") if self._log.exists() else 0

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait(HEALTHY)

    def get_socket(self, slot: int) -> Path:
        return get_runtime_dir(self.fleet.path) / "egress/s" / str(slot) / SOCKET_NAME

    def list_calls(self) -> list[Call]:
        rows = self.fleet.select(
            "SELECT s.slot, c.path, c.outcome, c.priced, c.input_tokens, CAST(coalesce(c.cost, c.reserved) AS text)"
            " FROM sandboxes_llmcall c JOIN sandboxes_sandbox s ON s.id = c.sandbox_id"
            " WHERE c.outcome <> 'refused' ORDER BY c.id"
        )
        return [Call(*row[:-1], round(Decimal(row[-1]), 9)) for row in rows]


@pytest.fixture
def upstream() -> Iterator[FakeUpstream]:
    loop, upstream = EventLoopThread(), FakeUpstream()
    upstream.answer = answer
    with loop.run_context(upstream.listening()):
        yield upstream
    loop.close()


@pytest.fixture
def proxy(tmp_path: Path, fleet_template: FleetTemplate, upstream: FakeUpstream) -> Iterator[Proxy]:
    with copy_database(tmp_path, fleet_template) as url:
        proxy = Proxy(Fleet(tmp_path, DATABASE_URL=url), upstream.url)
        yield proxy
        proxy.kill()


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer a document with the usage of its estimate, and a stream with some pieces after which it hangs."""
    body = await request.json()
    if not body.get("stream"):
        usage = {"prompt_tokens": int(body["messages"][0]["content"].split()[0]), "completion_tokens": MAX_TOKENS}
        return web.json_response({"model": "gpt-x", "choices": [{"message": {"content": "x"}}], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    events: list[dict[str, Any]] = [{"model": "gpt-x", "choices": [{"delta": {"content": "word "}}]}] * PIECES
    if request.path == MESSAGES_PATH:
        start = {"type": "message_start", "message": {"model": "claude-x", "usage": {**CLAUDE_USAGE, "output_tokens": 1}}}
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word "}}
        events = [start, *[delta] * PIECES]
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await asyncio.sleep(600)  # ends with the connection
    return response


def build_body(path: str, *, streamed: bool) -> bytes:
    """Build a request whose text begins with the number of its estimated input tokens."""
    name, limit = ("claude-x", "max_tokens") if path == MESSAGES_PATH else ("gpt-x", "max_completion_tokens")
    body = {"model": name, "stream": streamed, limit: MAX_TOKENS, "messages": [{"role": "user", "content": "0000 hello"}]}
    tokens = ceil(len(json.dumps(body)) / 3)
    return json.dumps(body).replace("0000", f"{tokens:04}").encode()


def open_stream(proxy: Proxy, slot: int, path: str) -> tuple[HTTPConnection, HTTPResponse]:
    """Begin a stream, and read its pieces."""
    connection = egress.connect(proxy.get_socket(slot))
    connection.request("POST", path, build_body(path, streamed=True), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    pieces = 0
    while pieces < PIECES:
        pieces += b"word" in response.readline()
    return connection, response


def post(proxy: Proxy, slot: int) -> tuple[int, Any]:
    return egress.post(proxy.get_socket(slot), build_body(CHAT_PATH, streamed=False))


def test_successor_of_a_killed_egress_server_closes_its_streams_and_admits_the_next_calls_at_once(
    proxy: Proxy, upstream: FakeUpstream
) -> None:
    """Six of seven leases have as many streams as a sandbox may have. A spend limit and a hard budget have room for one call
    of each lease beside the streams: neither a leaked reservation nor a call counted twice would fit."""
    fleet = proxy.fleet
    setup = run_manage(fleet.path, "shell", "-v", "0", "-c", SETUP, **fleet.env)
    assert setup.returncode == 0, setup.stderr
    slots: list[int] = json.loads(setup.stdout.splitlines()[-1])
    proxy.start()
    with ExitStack() as stack:
        streams = []
        for number in range(STREAM_COUNT):
            path = (MESSAGES_PATH, CHAT_PATH)[number % 2]
            connection, response = open_stream(proxy, slots[number // CALLS_AT_ONCE], path)
            stack.callback(connection.close)
            streams.append(response)
        opened = proxy.list_calls()
        assert [(call.outcome, call.priced) for call in opened] == [("open", "")] * STREAM_COUNT
        assert post(proxy, slots[0])[1]["error"]["code"] == "too_many_at_once"
        tokens = ceil(len(build_body(CHAT_PATH, streamed=False)) / 3)
        next_usd = (tokens * GPT["input"] + MAX_TOKENS * GPT["output"]) / MILLION
        of_first = sum(call.usd for call in opened if call.slot == slots[0])
        fleet.update(f"UPDATE sandboxes_sandbox SET llm_limit = {of_first + next_usd} WHERE slot = {slots[0]}")
        amount = sum(call.usd for call in opened) + LEASE_COUNT * next_usd
        fleet.update(f"UPDATE billing_budget SET amount = {amount}, hard = true")

        proxy.kill()
        for response in streams:
            with pytest.raises((HTTPException, OSError)):
                response.read()
        assert {call.outcome for call in proxy.list_calls()} == {"open"}
        proxy.start()
        closed = proxy.list_calls()

    assert {(call.outcome, call.priced) for call in closed} == {("lost", "estimate")}
    assert [call.usd for call in closed] == [call.usd for call in opened]
    tokens = ceil(len(build_body(CHAT_PATH, streamed=True)) / 3)
    expected = {  # the known input, and the output that may have been generated
        MESSAGES_PATH: (29_000, CLAUDE_INPUT_USD + MAX_TOKENS * CLAUDE["output"] / MILLION),
        CHAT_PATH: (None, (tokens * GPT["input"] + MAX_TOKENS * GPT["output"]) / MILLION),
    }
    assert [(call.input_tokens, call.usd) for call in closed] == [expected[call.path] for call in closed]

    requests = len(upstream.requests)
    for slot in slots:
        assert post(proxy, slot)[0] == 200
    assert len(upstream.requests) == requests + LEASE_COUNT
    wait_until(lambda: all(call.outcome != "open" for call in proxy.list_calls()), "the calls are closed")
    assert sum(call.usd for call in proxy.list_calls()) == amount
    refused = [post(proxy, slot)[1]["error"]["code"] for slot in (slots[0], slots[-1])]
    assert refused == ["spend_limit_reached", "budget_exhausted"]
    assert len(upstream.requests) == requests + LEASE_COUNT
