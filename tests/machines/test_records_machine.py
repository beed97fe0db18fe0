"""Hypothesis state machine over the file of LLM call records.

Several LiteLLM workers append lines, some of them crash within a line, the file is rotated in every way, and its readers crash
or run concurrently at every step. Each call has its recorded cost exactly once, and the costs add up."""

import json
import os
import shutil
import tempfile
import uuid
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import hypothesis.strategies as st
import pytest
from django.db import transaction
from django.db.models import Sum
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from sandboxes import lifecycle
from sandboxes.egress.logs import tail, upstream_records
from sandboxes.models import LlmCall
from tests.conftest import MINUTE, NOW, SimulatedCrash, die
from tests.support.search import budget

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("guarded UPDATEs of the state machine")]
STEPS = st.sampled_from(["lines read", "lines applied", "lines committed"])
NANOS = st.integers(0, 10**9)


class RecordsMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.rollback = transaction.atomic()
        self.rollback._from_testcase = True  # permits durable transactions inside, as in a TestCase
        self.rollback.__enter__()
        self.directory = Path(tempfile.mkdtemp(prefix="lh-records-"))
        self.file = self.directory / "records.jsonl"
        self.costs: dict[str, int] = {}  # recorded cost of each call, in 1e-9 USD
        self.torn = b""  # unwritten rest of the last line
        self.rotations = self.lines = 0

    def teardown(self) -> None:
        if hasattr(self, "costs"):
            try:
                self.settle()
            finally:
                lifecycle.CHECKPOINT_HOOKS.clear()
                transaction.set_rollback(True)
                self.rollback.__exit__(None, None, None)
                shutil.rmtree(self.directory)

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(nanos=st.lists(NANOS, min_size=1, max_size=5))
    def record_calls(self, nanos: list[int]) -> None:
        for cost in nanos:
            self.append(self.line(self.insert_call(), cost))

    @precondition(lambda self: self.costs)
    @rule(data=st.data(), nanos=NANOS)
    def record_call_again(self, data: st.DataObject, nanos: int) -> None:
        """LiteLLM has tried the call more than once. The highest cost counts."""
        call_id = data.draw(st.sampled_from(sorted(self.costs)))
        self.append(self.line(call_id, nanos))

    @rule(garbage=st.binary(max_size=40), whole=st.booleans())
    def append_garbage(self, garbage: bytes, whole: bool) -> None:
        self.append(garbage.replace(b"{", b"") + b"\n" * whole)

    @rule(nanos=NANOS, at=st.integers(1, 50))
    def write_part_of_a_line(self, nanos: int, at: int) -> None:
        """The rest of the line follows, unless another line is appended first."""
        line = self.line(self.insert_call(), nanos)
        self.append(line[:at])
        self.torn = line[at:]

    @precondition(lambda self: self.torn)
    @rule()
    def write_the_rest(self) -> None:
        rest, self.torn = self.torn, b""
        self.append(rest)

    @rule()
    def collect(self) -> None:
        upstream_records.collect_records(self.file, NOW)

    @rule(step=STEPS)
    def crash_reader(self, step: str) -> None:
        self.at(step, die)
        with suppress(SimulatedCrash):
            upstream_records.collect_records(self.file, NOW)
        lifecycle.CHECKPOINT_HOOKS.clear()

    @rule()
    def collect_concurrently(self) -> None:
        self.at("lines read", lambda: upstream_records.collect_records(self.file, NOW))
        upstream_records.collect_records(self.file, NOW)
        lifecycle.CHECKPOINT_HOOKS.clear()

    @precondition(lambda self: self.file.exists())
    @rule(nanos=NANOS, copied=st.booleans())
    def rotate(self, nanos: int, copied: bool) -> None:
        """Rotate at most once between two collections that find the old file unchanged. One writer is late."""
        # A copy of an empty file could not be distinguished from another file.
        self.append(self.line(self.insert_call(), nanos))
        self.settle()
        self.append(self.line(self.insert_call(), nanos))
        self.rotations += 1
        old = self.directory / f"records.jsonl.{self.rotations}"
        if copied:
            shutil.copy(self.file, old)
            os.truncate(self.file, 0)
        else:
            self.file.rename(old)
            upstream_records.collect_records(self.file, NOW)
            self.append(self.line(self.insert_call(), nanos), old)

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def cost_never_exceeds_the_records(self) -> None:
        if hasattr(self, "costs"):
            for call_id, cost in LlmCall.objects.filter(cost__isnull=False).values_list("call_id", "cost"):
                assert cost <= Decimal(self.costs[call_id]) / 10**9

    def settle(self) -> None:
        """Collect twice, and check that each record was collected once."""
        self.finish()
        for path in self.directory.iterdir():
            if path != self.file:
                os.utime(path, ((NOW - 60 * MINUTE).timestamp(),) * 2)
        for _ in range(2):
            upstream_records.collect_records(self.file, NOW)
            collected = dict(LlmCall.objects.values_list("call_id", "cost"))
            assert collected == {call_id: Decimal(cost) / 10**9 for call_id, cost in self.costs.items()}
            total = LlmCall.objects.aggregate(total=Sum("cost"))["total"] or 0
            assert total == Decimal(sum(self.costs.values())) / 10**9

    # --- helpers ------------------------------------------------------------------------------------------------------

    def insert_call(self) -> str:
        call_id = uuid.uuid4().hex
        LlmCall.objects.create(call_id=call_id, started_at=NOW - MINUTE, deadline_at=NOW, ended_at=NOW, outcome="ok")
        return call_id

    def line(self, call_id: str, nanos: int) -> bytes:
        self.costs[call_id] = max(nanos, self.costs.get(call_id, 0))
        self.lines += 1  # makes each line unique
        record = {"call": call_id, "status": "success", "error": "", "input": 1, "cost": nanos / 1e9, "ended": self.lines}
        return b"\n" + json.dumps(record).encode() + b"\n"

    def append(self, line: bytes, file: Path | None = None) -> None:
        self.finish()
        with (file or self.file).open("ab") as stream:
            stream.write(line)

    def finish(self) -> None:
        rest, self.torn = self.torn, b""
        if rest:
            self.append(rest)

    def at(self, name: str, act) -> None:
        def hook(reached: str, subject: object) -> None:
            if reached == name:
                lifecycle.CHECKPOINT_HOOKS.remove(hook)
                act()

        lifecycle.CHECKPOINT_HOOKS.append(hook)


@pytest.mark.parametrize("batch", [tail.BATCH_BYTES, 700])
def test_every_record_counts_once(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(tail, "BATCH_BYTES", batch)  # 700 bytes: three lines
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        RecordsMachine,
        settings=settings(
            max_examples=budget(fast=5, full=20), stateful_step_count=15, deadline=None, suppress_health_check=checks
        ),
    )
