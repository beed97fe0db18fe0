"""Complete egress proxy with LiteLLM as upstream.

Each call is one row, one line of nginx's log and one record under one id, and is charged LiteLLM's cost once, whichever
component crashes."""

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from leases import leasing
from sandboxes.egress import slots
from sandboxes.egress.amounts import parse_usd
from sandboxes.egress.logs import collection
from sandboxes.egress.logs import upstream_records as records
from sandboxes.egress.nginx import NginxProxy
from sandboxes.errors import ProviderCallFailed
from sandboxes.models import LlmCall, Run, Sandbox
from tests.conftest import MINUTE, NOW
from tests.egress.stack import CLIENT_SCRIPT, EgressStack, LeasedSandbox, run_egress_command, run_in_thread
from tests.egress.test_egress_docker import docker, pid_of
from tests.support.model_rates import create_rates
from tests.support.servers import ports
from tests.support.servers.egress import EventLoopThread, FakeUpstream
from tests.support.servers.models import ANSWER_CHUNKS, TOKEN_COUNTS
from tests.support.waiting import wait_until
from tests.unit.sandboxes.egress.test_litellm_callback import CHAT, MESSAGES, WHOLE, LiteLLM, litellm

__all__ = ["litellm"]
pytestmark = [
    pytest.mark.docker,
    pytest.mark.django_db(transaction=True),
    pytest.mark.matrix("LiteLLM as the upstream: optional"),
]
ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "sandboxes" / "image" / "agent" / "main.py"  # serves the bridge
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
MESSAGE = {"messages": [{"role": "user", "content": "Hello."}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "gpt", **MESSAGE}, MESSAGES: {"model": "claude", "max_tokens": 100, **MESSAGE},
    RESPONSES: {"model": "gpt", "input": "Hello."}, EMBEDDINGS: {"model": "gpt", "input": "Hello."},
}  # fmt: skip
LATER = NOW + 5 * MINUTE
Enter = Callable[..., LeasedSandbox]


@pytest.fixture
def egress(nginx: NginxProxy, litellm: LiteLLM, settings: Any, transactional_db: None) -> Iterator[EgressStack]:
    """Egress proxy with LiteLLM as upstream. Earlier log lines and records of other tests are already consumed."""
    settings.LLM_URL, settings.LLM_API_KEY = f"{litellm.url}/v1", litellm.key
    settings.LLM_MODEL, settings.LLM_MODELS, settings.LLM_RECORDS = "gpt", ["gpt-*", "claude"], str(litellm.file)
    loop, beside = EventLoopThread(), FakeUpstream()
    beside.url = settings.LLM_URL
    with ExitStack() as stack:
        stack.callback(loop.close)
        egress = EgressStack(nginx, loop, beside)
        stack.enter_context(egress.serving)
        egress.serve()
        if egress.log.exists():
            os.truncate(egress.log, 0)
        if litellm.file.exists():
            records.collect_records(litellm.file, NOW)
        yield egress


@pytest.fixture
def did() -> str:
    """Unique agent: its records belong to this test."""
    return f"did:plc:{uuid.uuid4().hex[:24]}"


@pytest.fixture
def leased(enter: Enter, did: str) -> LeasedSandbox:
    return enter(did)


def recorded(did: str) -> list[dict[str, Any]]:
    """Read the records of an agent's calls written so far."""
    lines = Path(os.environ["TEST_LITELLM_RECORDS"]).read_bytes().splitlines()
    output = (json.loads(line) for line in lines if line.endswith(b"}"))
    return [record for record in output if record["end_user"] == did]


def each_recorded(did: str, calls: int) -> dict[str, dict[str, Any]]:
    """Wait for exactly one record of each of `calls` calls. Return them by call id."""
    wait_until(lambda: len(recorded(did)) >= calls, f"{calls} calls are recorded")
    found = recorded(did)
    assert len({record["call"] for record in found}) == len(found) == calls
    return {record["call"]: record for record in found}


def collected(*, at: Any = LATER) -> dict[str, int]:
    """Run the reconciliation sweep twice. Return the counts of the first run, and assert that the second changes no row."""
    result = collection.collect_call_logs(now=at)
    before = [*LlmCall.objects.order_by("pk").values()]
    collection.collect_call_logs(now=at)
    assert [*LlmCall.objects.order_by("pk").values()] == before
    return dict(result.counts)


# --- SDK traffic -----------------------------------------------------------------------------------------------------


def test_rows_log_lines_and_records_match_and_costs_are_litellms(leased: LeasedSandbox, did: str, egress: EgressStack) -> None:
    cases = [(path, stream) for path in (CHAT, MESSAGES, RESPONSES) for stream in (False, True)] + [(EMBEDDINGS, False)]
    asked = [(BODIES[path] | ({"stream": True} if stream else {}), path) for path, stream in cases]
    replies = leased.python(f"print(json.dumps([[*map(str, ask(*each))] for each in {asked!r}]))")
    assert [status for status, _ in replies] == ["200"] * 7, replies
    rows, sent = egress.settled(7), each_recorded(did, 7)
    lines = {line["id"]: line for line in egress.logged(7)}
    assert sent.keys() == lines.keys() == {row.call_id for row in rows}
    whole = [(row.cost, row.priced) for row in rows if not row.streamed]  # the cost of a stream is known from its record only
    assert whole == [(WHOLE, "upstream")] * 3 + [(Decimal("0.001"), "upstream")]
    done = collected()
    assert (done["calls recorded"], done["requests logged"]) == (7, 7)
    lease, run = leased.lease, Run.objects.get()
    for (path, stream), (_, output), row in zip(cases, replies, rows, strict=True):
        embedded, line, record = path == EMBEDDINGS, lines[row.call_id], sent[row.call_id]
        assert embedded or all(piece.strip() in output for piece in ANSWER_CHUNKS), path
        assert (row.outcome, row.streamed, line["status"], line["upstream"], line["uri"]) == ("ok", stream, 200, "200", path)
        assert record["for"] == {
            "call": row.call_id, "lease": str(lease.pk), "run": str(run.pk), "attempt": 1, "agent": did,
            "environment": lease.environment_id, "billing_account": "house",
        }  # fmt: skip
        row.refresh_from_db()
        cost = Decimal("0.001") if embedded else WHOLE
        assert (row.cost, row.priced, parse_usd(record["cost"])) == (cost, "record", cost)
        assert (row.input_tokens, row.output_tokens) == (TOKEN_COUNTS["in"], 0 if embedded else TOKEN_COUNTS["out"])
        assert row.logged_at == row.recorded_at == LATER


# --- spend limit ------------------------------------------------------------------------------------------------------------


def test_stream_above_the_spend_limit_is_refused_and_not_forwarded(
    leased: LeasedSandbox, did: str, egress: EgressStack
) -> None:
    create_rates("gpt", input=0.1, output=0.1)  # of the reservation, which fits before the first call
    Sandbox.objects.filter(pk=leased.box.pk).update(llm_limit=WHOLE)
    asking = f"status, reply = ask({BODIES[CHAT] | {'stream': True}!r}); print(json.dumps([status, reply.decode()]))"
    assert leased.python(asking)[0] == 200
    egress.settled(1), each_recorded(did, 1), collected()
    status, reply = leased.python(asking)
    error = json.loads(reply)["error"]
    assert (status, error["code"], error["type"]) == (402, "spend_limit_reached", "spend_limit_reached")
    assert {"message", "param"} < {*error} and "0.00074 USD" in error["message"]
    Sandbox.objects.filter(pk=leased.box.pk).update(llm_limit=None)
    assert leased.python(asking)[0] == 200
    sent = each_recorded(did, 2)  # an earlier forwarded call would have been recorded, too
    collected()
    rows = {row.call_id: (row.outcome, row.cost) for row in egress.settled(3)}
    [refused] = rows.keys() - sent.keys()
    assert rows[refused] == ("refused", None)
    assert {rows[call_id] for call_id in sent} == {("ok", WHOLE)}


# --- crashes ----------------------------------------------------------------------------------------------

# Reads the beginning of a long response, makes another call to signal that, then runs the appended code.
STREAM = """
body = {**BODY, "model": "gpt-slowest", "stream": True}
request = urllib.request.Request("http://127.0.0.1:4010/v1/chat/completions", json.dumps(body).encode())
answer = urllib.request.urlopen(request, timeout=60)
assert b"An" in answer.readline()
assert ask({**BODY, "model": "gpt"})[0] == 200
"""
READ = "answer.read()"


def half_way() -> None:
    wait_until(lambda: LlmCall.objects.filter(outcome="ok").exists(), "the second call is over while the first goes on")
    assert LlmCall.objects.filter(outcome="open").count() == 1


@pytest.mark.parametrize(
    ("program", "seconds", "result"),
    [
        ("answer.close()", 60, (0, False, False)),
        (READ, 6, (137, True, False)),  # half of the response time
        ("held = []\nwhile True: held.append(bytearray(b'x') * (1 << 20))", 60, (137, False, True)),
    ],
    ids=["disconnect", "exec timeout", "OOM kill"],
)
def test_call_of_a_program_that_ends_is_cut_and_charged(
    program: str, seconds: int, result: Any, leased: LeasedSandbox, did: str, egress: EgressStack
) -> None:
    done = run(leased, STREAM + program, seconds=seconds)
    assert (done.exit_code, done.timed_out, done.oom) == result
    assert_one_row_per_call(egress, did, code="not_read_to_its_end")
    assert leased.call_model() == [200]


def test_sandbox_killed_during_a_call(leased: LeasedSandbox, did: str, egress: EgressStack) -> None:
    with run_in_thread(lambda: run(leased, STREAM + READ)) as running:
        half_way()
        docker("kill", leased.box.ref)
        with pytest.raises(ProviderCallFailed):
            running.result(60)
    leasing.require_active(leased.lease.pk, now=NOW)
    assert_one_row_per_call(egress, did, code="not_read_to_its_end")


def test_nginx_killed_during_a_call(leased: LeasedSandbox, did: str, egress: EgressStack) -> None:
    with run_in_thread(lambda: run(leased, STREAM + READ)) as running:
        half_way()
        os.kill(pid_of(egress.proxy), signal.SIGKILL)
        assert running.result(60).exit_code == 1
    assert_one_row_per_call(egress, did, code="not_read_to_its_end", logged=1)
    wait_until(lambda: leased.call_model() == [200], "nginx has restarted")


def test_egress_server_killed_during_a_call(leased: LeasedSandbox, did: str, egress: EgressStack) -> None:
    egress.serving.close()
    names = {"LEASEHOLD_LLM_API_KEY": settings.LLM_API_KEY, "LEASEHOLD_LLM_MODEL": settings.LLM_MODEL}
    with run_egress_command(egress, **names, LEASEHOLD_LLM_MODELS=",".join(settings.LLM_MODELS)) as process:
        with run_in_thread(lambda: run(leased, STREAM + READ)) as running:
            half_way()
            process.kill()
            assert running.result(60).exit_code in (0, 1)  # nginx ends a stream of unknown length normally
        process.wait(20)
    each_recorded(did, 2), egress.logged(2)
    collection.collect_call_logs(now=NOW)  # nginx logged its end, and the row is open: it is closed as lost a minute later
    [row] = LlmCall.objects.filter(outcome="open")
    assert row.logged_at is not None
    assert collected(at=row.logged_at + 2 * MINUTE)["requests closed as lost"] == 1
    assert_one_row_per_call(egress, did, outcome="lost")
    egress.serve()
    assert leased.call_model() == [200]


def run(leased: LeasedSandbox, script: str, *, seconds: float = 60) -> Any:
    return leased.run("python3", "-I", "-c", CLIENT_SCRIPT + script, seconds=seconds)


def assert_one_row_per_call(egress: EgressStack, did: str, *, outcome: str = "cut", code: str = "", logged: int = 2) -> None:
    """Assert that the interrupted and the complete call have one row each, with the cost of their records."""
    rows, sent = {row.call_id: row for row in egress.settled(2)}, each_recorded(did, 2)
    assert rows.keys() == sent.keys()
    lines = egress.logged(logged)
    collected()
    for call_id, row in rows.items():
        row.refresh_from_db()
        assert (row.cost, row.priced) == (parse_usd(sent[call_id]["cost"]), "record") and row.cost > 0
    [broken] = [row for row in rows.values() if row.outcome != "ok"]
    assert (broken.outcome, broken.code, sent[broken.call_id]["error"]) == (outcome, code, "ClientDisconnected")
    assert broken.cost < WHOLE  # LiteLLM counts the tokens passed on so far
    assert LlmCall.objects.filter(logged_at__isnull=False).count() == logged
    assert len({line["id"] for line in lines}) == len(lines) == logged


# --- OpenAI's SDK -------------------------------------------------------------------------------------------

OPENAI = """
import json, sys
import openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="anything", max_retries=0)
hello = [{"role": "user", "content": "Hello."}]
output = [client.chat.completions.create(model="gpt", messages=hello).choices[0].message.content]
chunks = [*client.chat.completions.create(model="gpt", messages=hello, stream=True)]
output.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
chunks = [*client.chat.completions.create(model="gpt", messages=hello, stream=True, stream_options={"include_usage": True})]
output.append([each.usage.completion_tokens for each in chunks if each.usage])
output.append(client.responses.create(model="gpt", input="Hello.").output_text)
events = [*client.responses.create(model="gpt", input="Hello.", stream=True)]
output.append("".join(event.delta for event in events if event.type == "response.output_text.delta"))
output.append(client.embeddings.create(model="gpt", input="Hello.", encoding_format="float").data[0].embedding)
output.append([model.id for model in client.models.list()])
try:
    client.chat.completions.create(model="other", messages=hello)
except openai.PermissionDeniedError as refused:
    output.append(refused.code)
print(json.dumps(output))
"""


def test_openai_sdk_works_unmodified(leased: LeasedSandbox, did: str, egress: EgressStack) -> None:
    """Uses the SDK from LiteLLM's environment, on the host behind the same bridge: sandboxes do not contain it."""
    with bridge(leased) as port:
        argv = [os.environ["TEST_LITELLM_PYTHON"], "-c", OPENAI, f"http://127.0.0.1:{port}/v1"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr[-2000:]
    whole = "".join(ANSWER_CHUNKS)
    assert json.loads(done.stdout) == [
        whole, whole, [TOKEN_COUNTS["out"]], whole, whole, [0.25, 0.5], ["gpt", "claude"], "model_not_allowed",
    ]  # fmt: skip
    sent = each_recorded(did, 6)
    collected()
    rows = egress.settled(7)
    assert [row.outcome for row in rows] == ["ok"] * 6 + ["refused"]
    assert {row.call_id: row.cost for row in rows[:6]} == {call_id: parse_usd(each["cost"]) for call_id, each in sent.items()}


@contextmanager
def bridge(leased: LeasedSandbox) -> Iterator[int]:
    """Run the bridge on the host for a sandbox's socket. Yield its port."""
    [port] = ports.find_free_ports()
    assert leased.box.slot is not None
    path = slots.ensure_slot_directory(leased.box.slot) / slots.SOCKET_NAME
    process = subprocess.Popen([sys.executable, "-I", "-S", AGENT, "/no/gateway", "/no/shim", str(port), path])
    try:
        wait_until(lambda: answers(port), "the bridge listens")
        yield port
    finally:
        process.kill()
        process.wait(20)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))
