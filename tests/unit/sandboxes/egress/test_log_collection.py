"""Reconciliation sweep of the call log."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from controlplane import schedules
from sandboxes.egress.logs import collection
from sandboxes.models import LlmCall
from tests.conftest import MINUTE, NOW
from tests.support.model_rates import create_rates
from tests.unit.sandboxes.egress.test_access_log import line
from tests.unit.sandboxes.egress.test_upstream_records import call, record

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def log_directories(settings: Any, tmp_path: Path) -> None:
    settings.EGRESS_DIR = tmp_path / "egress"
    settings.LLM_RECORDS = str(tmp_path / "records.jsonl")
    (settings.EGRESS_DIR / "logs").mkdir(parents=True)


def test_one_pass_ingests_both_files_and_prices_the_rest_by_rate(settings: Any) -> None:
    call(1)
    call(2, model="house-model", input_tokens=10**6, output_tokens=0, ended_at=NOW - 2 * MINUTE)
    create_rates("*", input=1, output=1, since=NOW - 5 * MINUTE)
    Path(settings.LLM_RECORDS).write_bytes(record(1))
    collection.access_log_path().write_bytes(line(1) + line(2))
    result = schedules.run_sweep("collect", now=NOW)
    assert result.counts == {"requests logged": 2, "calls recorded": 1, "calls priced by rate": 1}
    assert not result.failures
    assert dict(LlmCall.objects.values_list("priced", "cost")) == {"record": Decimal("0.00074"), "rate": 1}
    assert schedules.run_sweep("collect", now=NOW).counts == {}


def test_missing_access_log_is_not_a_failure(settings: Any) -> None:
    settings.LLM_RECORDS = ""
    result = collection.collect_call_logs(now=NOW)
    assert (result.counts, result.failures) == ({}, [])


def test_missing_records_file_is_a_failure(settings: Any) -> None:
    assert collection.collect_call_logs(now=NOW).failures == [f"LEASEHOLD_LLM_RECORDS: there is no file {settings.LLM_RECORDS}"]


def test_unreadable_file_does_not_block_the_other(settings: Any) -> None:
    collection.access_log_path().mkdir()
    call()
    Path(settings.LLM_RECORDS).write_bytes(record())
    result = collection.collect_call_logs(now=NOW)
    assert result.counts == {"calls recorded": 1}
    assert "Is a directory" in result.failures[0]


def test_counts_that_need_attention_are_failures(settings: Any) -> None:
    Path(settings.LLM_RECORDS).write_bytes(b"garbage\n" + record(9))
    collection.access_log_path().write_bytes(line(1))
    result = collection.collect_call_logs(now=NOW)
    assert result.counts == {"requests unmetered": 1, "calls malformed": 1, "calls unknown": 1}
    assert sorted(failure.rpartition(": ")[2] for failure in result.failures) == ["1 malformed", "1 unknown", "1 unmetered"]
