"""LiteLLM with the callback installed: every call is recorded under the egress proxy's call id, successful or not."""

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import requests

from sandboxes.egress import amounts, model_pricing
from sandboxes.egress.amounts import parse_usd
from sandboxes.egress.logs import upstream_records as records
from sandboxes.models import LlmCall
from tests.conftest import MINUTE, NOW
from tests.support.model_rates import create_rates
from tests.support.servers.models import ANSWER_CHUNKS, TOKEN_COUNTS
from tests.support.servers.services import require_environment
from tests.support.waiting import wait_until

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
pytestmark = pytest.mark.matrix("LiteLLM as the upstream: optional")
# 600 input tokens at 1 USD per million, 400 cached at 0.1, 50 output tokens at 2: the prices of .ci/litellm.yaml
WHOLE = Decimal("0.00074")


class LiteLLM:
    def __init__(self, url: str, key: str, file: Path) -> None:
        self.url, self.key, self.file = url, key, file

    def ask(self, model: str, path: str = CHAT, *, stream: bool = False, timeout: float = 30) -> tuple[str, requests.Response]:
        """Send a request as the egress proxy does. Return (call id, response with unread body)."""
        call_id = uuid.uuid4().hex
        headers = {
            "Authorization": f"Bearer {self.key}", "x-litellm-call-id": call_id, "x-litellm-end-user-id": "did:plc:ada",
            "x-litellm-spend-logs-metadata": json.dumps({"call": call_id, "attempt": 2, "unasked": []}),
        }  # fmt: skip
        body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "stream": stream, "max_tokens": 100}
        self.last = call_id
        return call_id, requests.post(self.url + path, json=body, headers=headers, timeout=timeout, stream=True)

    def record(self, call_id: str) -> dict[str, Any]:
        """Wait for the only record of a call."""
        return wait_until(lambda: next(self.records(call_id), None), f"a record of {call_id}")

    def records(self, call_id: str) -> Iterator[dict[str, Any]]:
        lines = (json.loads(line) for line in self.file.read_bytes().splitlines() if line.strip() and line.endswith(b"}"))
        return (record for record in lines if record["call"] == call_id)


@pytest.fixture(scope="session")
def litellm() -> LiteLLM:
    url, key, file = require_environment("litellm", "TEST_LITELLM_URL", "TEST_LITELLM_KEY", "TEST_LITELLM_RECORDS")
    return LiteLLM(url, key, Path(file))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("model", "path"), [("gpt", CHAT), ("claude", CHAT), ("claude", MESSAGES)])
def test_call_is_recorded_under_its_call_id_with_tokens_and_cost(litellm: LiteLLM, model, path, stream: bool) -> None:
    call_id, answer = litellm.ask(model, path, stream=stream)
    assert answer.status_code == 200, answer.text
    assert all(piece.strip() in answer.text for piece in ANSWER_CHUNKS)
    assert ("text/event-stream" in answer.headers["Content-Type"]) == stream
    record = litellm.record(call_id)
    assert (record["status"], record["end_user"], record["stream"], record["error"]) == ("success", "did:plc:ada", stream, "")
    assert [record[count] for count in ("input", "cached", "output")] == [*TOKEN_COUNTS.values()]
    assert parse_usd(record["cost"]) == WHOLE
    assert record["model"].endswith(model)
    assert record["for"] == {"call": call_id, "attempt": 2}
    assert 0 <= record["ended"] - record["started"] < 30 and abs(record["ended"] - time.time()) < 60
    assert len([*litellm.records(call_id)]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_mocked_model_is_recorded_and_priced(litellm: LiteLLM, stream: bool) -> None:
    call_id, answer = litellm.ask("mock", stream=stream)
    assert answer.status_code == 200 and answer.content
    record = litellm.record(call_id)
    assert (record["status"], record["stream"]) == ("success", stream)
    assert record["cost"] > 0 and record["output"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("model", "path"), [("gpt-failing", CHAT), ("claude-failing", CHAT), ("claude-failing", MESSAGES)])
def test_failed_call_is_recorded_as_failed(litellm: LiteLLM, model: str, path: str, stream: bool) -> None:
    call_id, answer = litellm.ask(model, path, stream=stream)
    assert answer.status_code == 500
    record = litellm.record(call_id)
    assert (record["status"], record["cost"], record["input"], record["output"]) == ("failure", 0, None, None)
    assert record["error"]


@pytest.mark.django_db
def test_stream_that_fails_before_its_answer_is_billed_with_that_of_the_fallback(litellm: LiteLLM) -> None:
    call_id, answer = litellm.ask("gpt-breaking", stream=True)
    assert all(piece.strip() in answer.text for piece in ANSWER_CHUNKS), answer.text
    wait_until(lambda: len([*litellm.records(call_id)]) == 2, "both attempts are recorded")
    costs = {record["status"]: parse_usd(record["cost"]) for record in litellm.records(call_id)}
    assert costs == {"failure": WHOLE, "success": WHOLE}
    assert len({record["response"] for record in litellm.records(call_id)}) == 2
    row = LlmCall.objects.create(
        call_id=call_id, started_at=NOW - MINUTE, deadline_at=NOW, ended_at=NOW, model="gpt-breaking", outcome="ok"
    )
    lines = [json.dumps(record).encode() for record in litellm.records(call_id)]
    records.apply_lines([*lines, *lines], now=NOW)
    row.refresh_from_db()
    assert (row.cost, row.priced) == (2 * WHOLE, "record")


def test_unknown_model_is_recorded_as_failed(litellm: LiteLLM) -> None:
    call_id, answer = litellm.ask("no-such-model")
    assert answer.status_code == 400
    assert litellm.record(call_id)["status"] == "failure"


@pytest.mark.parametrize(("model", "path"), [("gpt-slow", CHAT), ("claude-slow", CHAT), ("claude-slow", MESSAGES)])
def test_stream_cut_by_the_client_is_recorded_as_an_estimate(litellm: LiteLLM, model: str, path: str) -> None:
    call_id, answer = litellm.ask(model, path, stream=True)
    assert next(answer.iter_content(10))
    answer.close()
    record = litellm.record(call_id)
    assert (record["status"], record["error"]) == ("success", "ClientDisconnected")
    assert 0 < parse_usd(record["cost"]) < WHOLE  # a lower bound: LiteLLM counts the tokens passed on so far


def test_call_abandoned_before_the_response_is_recorded_in_full(litellm: LiteLLM) -> None:
    asked = []
    for model, path in (("gpt-slow", CHAT), ("claude-slow", MESSAGES)):
        with pytest.raises(requests.Timeout):
            litellm.ask(model, path, timeout=2)  # half of the response time
        asked.append(litellm.last)
    for call_id in asked:
        record = litellm.record(call_id)
        assert (record["status"], parse_usd(record["cost"])) == ("success", WHOLE)


@pytest.mark.parametrize(("model", "path"), [("gpt-unpriced", CHAT), ("claude-unpriced", MESSAGES)])
@pytest.mark.parametrize("stream", [False, True])
def test_model_without_a_price_is_not_recorded_as_free(litellm: LiteLLM, model: str, path: str, stream: bool) -> None:
    call_id, answer = litellm.ask(model, path, stream=stream)
    assert answer.content
    record = litellm.record(call_id)
    assert (record["cost"], record["output"]) == (None, TOKEN_COUNTS["out"])


def test_model_configured_as_free_is_recorded_as_free(litellm: LiteLLM) -> None:
    call_id, answer = litellm.ask("gpt-free")
    assert answer.content
    assert litellm.record(call_id)["cost"] == 0


@pytest.mark.django_db
def test_collected_records_price_the_call_rows(litellm: LiteLLM) -> None:
    asked = {model: litellm.ask(model, stream=True) for model in ("gpt", "claude", "gpt-unpriced", "gpt-failing")}
    for model, (call_id, answer) in asked.items():
        LlmCall.objects.create(
            call_id=call_id, started_at=NOW - MINUTE, deadline_at=NOW, ended_at=NOW, model=model,
            outcome="ok" if answer.ok else "failed",
        )  # fmt: skip
        assert answer.content
        litellm.record(call_id)
    assert records.collect_records(litellm.file, NOW)["recorded"] == 4
    create_rates("gpt-*", input=1, output=1, since=NOW - MINUTE)
    assert model_pricing.price_calls(NOW) == 1
    found = {row.model: (row.cost, row.priced, row.input_tokens, row.output_tokens) for row in LlmCall.objects.all()}
    assert found == {
        "gpt": (WHOLE, "record", 1000, 50),
        "claude": (WHOLE, "record", 1000, 50),
        "gpt-unpriced": (Decimal("0.00105"), "rate", 1000, 50),
        "gpt-failing": (0, "record", None, None),
    }


# --- the callback alone, in LiteLLM's Python --------------------------------------------------------------------------

# Runs scripts in forks of one process, because the import of LiteLLM takes seconds. Prints their exit codes and stderr.
DRIVER = """
import json, os, sys, tempfile
import litellm
ended = {}
for name, file, script in json.loads(sys.stdin.read()):
    with tempfile.TemporaryFile() as output:
        if not (pid := os.fork()):
            os.environ["LEASEHOLD_RECORDS"] = file
            os.dup2(output.fileno(), 2)
            exec(script, {})
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        ended[name] = (code, output.read().decode())
print(json.dumps(ended))
"""
IMPORT = """
import os, sys
from datetime import datetime
import litellm_callback as callback
known = {"litellm_call_id": "c1", "total_tokens": 0, "prompt_tokens": 0, "completion_tokens": 0}
kwargs = {"litellm_call_id": "c1", "response_cost": 0.0, "standard_logging_object": known}
now = datetime.now()
"""
WORKERS = """
known["model"] = "m" * 20_000
def work():
    for _ in range(100):
        callback.records.write(kwargs, "success", now, now)
    os._exit(0)
workers = [os.fork() or work() for _ in range(4)]
sys.exit(any(os.waitpid(pid, 0)[1] for pid in workers))
"""


def test_callback_reports_an_unwritable_file_and_workers_write_complete_lines(litellm: LiteLLM, tmp_path: Path) -> None:
    """Runs in LiteLLM's Python next to a copy of the callback, away from modules whose names would shadow others."""
    shutil.copy(Path(amounts.__file__).with_name("litellm_callback.py"), tmp_path)
    file = tmp_path / "records.jsonl"
    scripts = [
        ("full", "/dev/full", IMPORT + "callback.records.write(kwargs, 'success', now, now)"), ("not set", "", IMPORT),
        ("missing", "/no/such/directory/records", IMPORT), ("workers", str(file), IMPORT + WORKERS),
    ]  # fmt: skip
    argv, env = [os.environ["TEST_LITELLM_PYTHON"], "-c", DRIVER], {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        argv, input=json.dumps(scripts), env=env | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    messages = {"full": "the record of call c1 is LOST", "not set": "LEASEHOLD_RECORDS is not set", "missing": "No such file"}
    for name, message in messages.items():
        code, output = ended[name]
        assert code == 1 and message in output, name
    assert "No space left on device" in ended["full"][1]
    assert ended["workers"][0] == 0, ended["workers"]
    lines = [json.loads(line) for line in file.read_bytes().splitlines() if line]
    assert {line["call"] for line in lines} == {"c1"} and len(lines) == 400
