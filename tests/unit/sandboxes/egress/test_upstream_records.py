"""Exactly-once ingestion of LiteLLM's records, across rotation, concurrent readers and crashes."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from sandboxes.egress import model_pricing
from sandboxes.egress.logs import tail, upstream_records
from sandboxes.models import LlmCall, LogPosition
from tests.conftest import MINUTE, NOW, run_in_threads
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db


def call(number: int = 1, **fields: Any) -> LlmCall:
    """Create a successful call. `fields` override its columns."""
    ended = {"started_at": NOW - MINUTE, "deadline_at": NOW, "ended_at": NOW - MINUTE / 2, "outcome": "ok"}
    return LlmCall.objects.create(call_id=f"{number:032x}", **{**ended, **fields})


def record(number: int = 1, **fields: Any) -> bytes:
    values = {
        "call": f"{number:032x}", "end_user": "did:plc:ada", "model": "openai/gpt", "stream": False, "status": "success",
        "error": "", "input": 1000, "cached": 400, "output": 50, "cost": 0.00074, "started": 1.0, "ended": 2.0,
    }  # fmt: skip
    return b"\n" + json.dumps({**values, **fields}).encode() + b"\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def append(file: Path, *lines: bytes) -> None:
    with file.open("ab") as there:
        there.write(b"".join(lines))


def settle(file: Path) -> None:
    """Set the last modification far enough in the past for the file to count as complete."""
    at = (NOW - timedelta(hours=1)).timestamp()
    os.utime(file, (at, at))


def collect(file: Path) -> dict[str, int]:
    return dict(upstream_records.collect_records(file, NOW))


def shown(number: int = 1) -> tuple[Any, ...]:
    row = LlmCall.objects.get(call_id=f"{number:032x}")
    return row.cost, row.priced, row.input_tokens, row.cached_tokens, row.output_tokens


@pytest.mark.parametrize("outcome", ["ok", "open", "lost", "cut"])
def test_record_sets_cost_and_tokens_of_its_call_and_keeps_the_outcome(file: Path, outcome: str) -> None:
    ended_at = None if outcome == "open" else NOW - MINUTE / 2
    row = call(outcome=outcome, ended_at=ended_at)
    append(file, record())
    assert collect(file) == {"recorded": 1}
    assert shown() == (Decimal("0.00074"), "record", 1000, 400, 50)
    row.refresh_from_db()
    assert (row.recorded_at, row.outcome, row.ended_at) == (NOW, outcome, ended_at)


def test_missing_file_is_ignored(file: Path) -> None:
    assert collect(file) == {}
    assert not LogPosition.objects.exists()


def test_line_counts_once_when_collected_or_written_repeatedly(file: Path) -> None:
    call()
    append(file, record(), record())
    assert collect(file) == {"recorded": 1}
    assert collect(file) == {}
    append(file, record())
    assert collect(file) == {}
    assert shown()[0] == Decimal("0.00074")


@pytest.mark.parametrize("priced", ["upstream", "rate"])
def test_record_replaces_any_other_price(file: Path, priced: str) -> None:
    call(cost=Decimal(5), priced=priced)
    append(file, record(cost=0.001))
    collect(file)
    assert shown()[:2] == (Decimal("0.001"), "record")


BILLED_FAILURE = {
    "status": "failure",
    "error": "APIError",
    "response": f"{1:032x}",
    "input": 500,
    "output": 10,
    "cost": 0.00052,
}
ATTEMPTS = [record(**BILLED_FAILURE), record(response="chatcmpl-1", cost=0.0011), record(response="chatcmpl-2", cost=0.003)]
SUM_OF_ATTEMPTS = Decimal("0.00462")


@pytest.mark.parametrize("outcome", ["ok", "cut", "open", "failed"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_costs_of_different_attempts_of_a_call_are_added_however_often_each_is_recorded(
    file: Path, order: tuple[int, ...], passes: int, outcome: str
) -> None:
    call(outcome=outcome, ended_at=None if outcome == "open" else NOW - MINUTE / 2, cost=Decimal("0.7"), priced="estimate")
    lines = [ATTEMPTS[number] for number in order]
    for start in range(passes):
        append(file, *lines[start::passes], *lines[: start + 1])
        collect(file)
    assert shown()[:2] == (SUM_OF_ATTEMPTS, "record")
    append(file, *lines)
    collect(file)
    assert shown()[:2] == (SUM_OF_ATTEMPTS, "record")


@pytest.mark.parametrize("priced", ["upstream", "rate", "estimate"])
def test_billed_failed_attempt_adds_to_the_price_of_an_answer_whose_record_is_missing(file: Path, priced: str) -> None:
    call(cost=Decimal("0.7"), priced=priced)
    append(file, ATTEMPTS[0], ATTEMPTS[0])
    collect(file)
    assert shown()[:2] == (Decimal("0.70052"), "record")
    append(file, ATTEMPTS[1])
    collect(file)
    assert shown()[:2] == (Decimal("0.00162"), "record")


def test_failed_record_with_less_output_keeps_the_price_of_the_reported_usage_of_a_failed_call(file: Path) -> None:
    call(outcome="failed", cost=Decimal("0.7"), priced="rate", input_tokens=500, output_tokens=11)
    append(file, ATTEMPTS[0])
    collect(file)
    assert shown()[:2] == (Decimal("0.7"), "rate")


def test_record_of_a_callback_that_names_no_response_is_one_attempt_by_status(file: Path) -> None:
    call()
    append(file, record(cost=0.002), record(cost=0.001), record(**{**BILLED_FAILURE, "response": ""}))
    collect(file)
    assert shown()[:2] == (Decimal("0.00252"), "record")


def test_call_recorded_by_a_version_that_named_no_attempts_keeps_its_dearest_record(file: Path) -> None:
    call(cost=Decimal("0.002"), priced="record", recorded_at=NOW)
    append(file, record(response="chatcmpl-1", cost=0.002), record(response="chatcmpl-1", cost=0.001))
    collect(file)
    assert shown()[:2] == (Decimal("0.002"), "record")


@pytest.mark.parametrize("order", [1, -1])
def test_highest_cost_of_several_records_of_an_attempt_counts_in_any_order(file: Path, order: int) -> None:
    call(outcome="open", ended_at=None)
    failed = record(status="failure", error="APIError", input=None, cached=None, output=None, cost=0.0)
    append(file, *[failed, record(cost=0.002), record(cost=0.001)][::order])
    collect(file)
    assert shown()[:2] == (Decimal("0.002"), "record")


@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({"outcome": "failed"}, 0),
        ({"outcome": "lost"}, 0),
        ({"outcome": "ok"}, None),  # another attempt succeeded, and its record may follow
        ({"outcome": "open", "ended_at": None}, None),
        ({"outcome": "cut"}, None),
        ({"outcome": "failed", "output_tokens": 7}, None),
    ],
)
def test_failed_attempt_without_cost_prices_only_failed_calls(file: Path, fields: Any, cost: Any) -> None:
    row = call(**fields)
    append(file, record(status="failure", error="APIError", input=None, cached=None, output=None, cost=0.0))
    collect(file)
    row.refresh_from_db()
    assert (row.cost, row.recorded_at) == (cost, None if cost is None else NOW)


def test_estimate_adds_missing_tokens_and_replaces_none(file: Path) -> None:
    call(1, output_tokens=70)
    call(2, output_tokens=70)
    append(file, record(1, error="ClientDisconnected", output=3), record(2, output=71))
    collect(file)
    assert shown(1)[2:] == (1000, 400, 70)
    assert shown(2)[2:] == (1000, 400, 71)


def test_cost_and_tokens_of_an_estimate_with_more_output_are_taken_together(file: Path) -> None:
    counts = {"input": 600, "cache_read": 400, "output": 0, "reasoning": 1}
    row = call(cost=Decimal("0.003"), priced="rate", rate_ids=[1], input_tokens=1000, cached_tokens=400, output_tokens=1,
               token_counts=counts, outcome="cut")  # fmt: skip
    append(file, record(error="ClientDisconnected", output=91, cost=0.0042))
    collect(file)
    assert shown() == (Decimal("0.0042"), "record", 1000, 400, 91)
    row.refresh_from_db()
    assert (row.token_counts, row.rate_ids) == ({**counts, "output": 90}, None)


@pytest.mark.parametrize(
    ("priced", "cost"), [("rate", "0.005"), ("upstream", "0.005"), ("estimate", "0.00074"), ("", "0.00074")]
)
def test_estimate_with_less_output_than_reported_replaces_no_price_of_the_reported_usage(
    file: Path, priced: str, cost: str
) -> None:
    call(cost=Decimal("0.005") if priced else None, priced=priced, output_tokens=70, token_counts={"output": 70})
    append(file, record(error="ClientDisconnected", output=3))
    collect(file)
    assert (shown()[0], shown()[4]) == (Decimal(cost), 70)
    assert LlmCall.objects.get().token_counts == {"output": 70}


def test_record_without_a_price_keeps_the_existing_price(file: Path) -> None:
    row = call(model="house-model")
    append(file, record(cost=None))
    collect(file)
    row.refresh_from_db()
    assert (row.cost, row.priced, row.recorded_at, row.input_tokens) == (None, "", NOW, 1000)
    create_rates("house-*", input=1, output=2, since=NOW - MINUTE)
    assert model_pricing.price_calls(NOW) == 1
    assert shown()[:2] == (Decimal("0.0011"), "rate")


MALFORMED_LINES = [
    b"no json", b"[]", b"null", b"7", b'"text"', b"{}", b"\xff\xfe\x00", b"[" * 100_000, b'{"call": 7, "status": "success"}',
    b'{"call": "\\ud800", "status": "success"}', b'{"call": "a\\u0000b", "status": "success"}', record(status="maybe"),
    record(cost=-1), record(cost="lots"), record(cost=1e9), record(cost=True), record(cost=[]), record(call="x" * 300),
    record().replace(b"0.00074", b"NaN"), record().replace(b"0.00074", b"Infinity"), record().replace(b"0.00074", b"1e99999"),
]  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED_LINES)
def test_malformed_line_is_counted_and_skipped(file: Path, line: bytes) -> None:
    call()
    append(file, line.strip(b"\n") + b"\n", record())
    assert collect(file) == {"malformed": 1, "recorded": 1}
    assert shown()[0] == Decimal("0.00074")


@pytest.mark.parametrize("value", [-1, True, "many", 1.5, 10**9 + 1, 10**18, []])
def test_invalid_count_is_ignored_and_marked(file: Path, value: Any) -> None:
    call()
    append(file, record(output=value))
    assert collect(file) == {"recorded": 1, "out of range": 1}
    assert shown()[2:] == (1000, 400, None)
    assert LlmCall.objects.get().code == "amount_refused"


def test_records_without_a_row_are_counted_apart_from_other_clients(file: Path) -> None:
    append(file, record(7), record(8), record(call="0b0f3a5e-8f0c-4d4b-9d53-0123456789ab"))
    assert collect(file) == {"unknown": 2, "from other clients": 1}


def test_partial_line_of_a_dead_writer_does_not_affect_the_next(file: Path) -> None:
    call()
    append(file, record(2)[:20])
    append(file, record())
    assert collect(file) == {"recorded": 1, "malformed": 1}


def test_lines_are_read_in_batches_and_an_overlong_line_is_skipped(file: Path, monkeypatch) -> None:
    monkeypatch.setattr(tail, "BATCH_BYTES", 1000)
    for number in range(1, 21):
        call(number)
    append(file, *[record(number) for number in range(1, 11)], b"x" * 5000, b"\n", *map(record, range(11, 21)))
    counts = collect(file)
    assert counts["recorded"] == 20
    assert 1 <= counts["malformed"] <= 6
    assert LlmCall.objects.filter(cost=Decimal("0.00074")).count() == 20


def test_batch_takes_a_bounded_number_of_queries(file: Path, django_assert_max_num_queries) -> None:
    for number in range(1, 61):
        call(number)
    append(file, *map(record, range(1, 61)))
    with django_assert_max_num_queries(15):
        assert collect(file) == {"recorded": 60}


# --- the file ---------------------------------------------------------------------------------------------------------


def renamed(file: Path) -> None:
    file.rename(file.with_name(f"{file.name}.1"))


def copied_and_emptied(file: Path) -> None:
    shutil.copy(file, file.with_name(f"{file.name}.1"))
    os.truncate(file, 0)


def test_other_entries_in_the_directory_are_ignored(file: Path) -> None:
    call(1)
    call(2)
    append(file, record(1))
    collect(file)
    file.with_name("records.jsonl.0.d").mkdir()
    file.with_name("records.jsonl.0.gz").write_bytes(b"x" * 10_000)
    file.with_name("records.jsonl.0.link").symlink_to("nowhere")
    renamed(file)
    settle(file.with_name("records.jsonl.1"))
    append(file, record(2))
    assert collect(file) == {"recorded": 1}


@pytest.mark.parametrize("rotate", [renamed, copied_and_emptied])
@pytest.mark.parametrize("read", [True, False])
def test_rotated_file_is_read_to_its_end_before_the_new_one(file: Path, rotate: Callable[[Path], None], read: bool) -> None:
    for number in range(1, 5):
        call(number)
    append(file, record(1)) if read else append(file)
    collect(file)
    append(file, *([] if read else [record(1)]), record(2))
    if not read and rotate is copied_and_emptied:
        collect(file)  # a copy of a file that was never read cannot be recognized
    rotate(file)
    append(file, record(3))
    old = file.with_name(f"{file.name}.1")
    collect(file)
    assert shown(2)[1] == "record"
    assert shown(3)[1] == ""  # the old file may still be written to
    append(old, record(4))
    settle(old)
    assert collect(file) == {"recorded": 2}
    assert {shown(number)[1] for number in range(1, 5)} == {"record"}
    assert collect(file) == {}


def test_rotated_file_with_an_incomplete_line_does_not_block_the_new_one(file: Path) -> None:
    call(1)
    call(2)
    append(file, record(1), b'{"call": "torn')
    collect(file)
    renamed(file)
    settle(file.with_name(f"{file.name}.1"))
    append(file, record(2))
    assert collect(file) == {"malformed": 1, "recorded": 1}


def test_missing_rotated_file_is_reported_and_the_new_one_is_read(file: Path) -> None:
    call(1)
    call(2)
    append(file, record(1))
    collect(file)
    file.unlink()
    assert collect(file) == {}
    append(file, record(2), record(2), record(2))
    assert collect(file) == {"unread lost": 1, "recorded": 1}
    assert collect(file) == {}


def test_truncated_file_that_has_grown_again_is_read_from_its_beginning(file: Path) -> None:
    for number in range(1, 4):
        call(number)
    append(file, record(1))
    collect(file)
    os.truncate(file, 0)
    append(file, record(2), record(3))
    assert collect(file) == {"unread lost": 1, "recorded": 2}


def test_hosts_sharing_a_database_read_their_own_files(file: Path, monkeypatch) -> None:
    call(1)
    append(file, record(1))
    collect(file)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert collect(file) == {}  # read a second time, without effect
    assert LogPosition.objects.count() == 2


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_concurrent_readers_apply_each_line_once(file: Path, monkeypatch) -> None:
    monkeypatch.setattr(tail, "BATCH_BYTES", 2000)
    for number in range(1, 101):
        call(number)
    append(file, *map(record, range(1, 101)))
    with run_in_threads(4) as together:
        answers = together(lambda index: upstream_records.collect_records(file, NOW))
    assert [type(answer).__name__ for answer in answers] == ["Counter"] * 4, answers
    assert sum(answer["recorded"] for answer in answers) == 100
    assert LogPosition.objects.get().offset == file.stat().st_size
    connection.close()


def test_answered_calls_without_a_record_are_unmetered(file: Path, settings) -> None:
    settings.LLM_RECORDS = str(file)
    late, _recorded = (call(number, ended_at=NOW - 2 * MINUTE) for number in (1, 4))
    call(2, ended_at=NOW - MINUTE / 2)
    call(3, ended_at=NOW - 2 * MINUTE, outcome="failed")
    call(5, ended_at=NOW - 2 * MINUTE, priced="free", cost=0, path="/v1/messages/count_tokens")
    call(6, ended_at=NOW - 2 * MINUTE, path="/v1/messages/count_tokens")  # of a version that did not price token counts
    append(file, record(4))
    collect(file)
    assert [*upstream_records.find_unmetered(NOW)] == [late]
    settings.LLM_RECORDS = ""
    assert not upstream_records.find_unmetered(NOW).exists()
