"""A hypothesis state machine over the file of records: several LiteLLM workers write to it, some die within a line, it is
rotated in every way, and its readers die or have rivals at every step. Whatever happens, each call has the cost that was
recorded for it, once, and the sum of all costs is that of all records."""

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
from sandboxes.egress import log_tail, upstream_records
from sandboxes.models import LlmCall
from tests.conftest import MINUTE, NOW, SimulatedCrash

pytestmark = pytest.mark.django_db
STEPS = st.sampled_from(["lines read", "lines applied", "lines committed"])
NANOS = st.integers(0, 10**9)


class RecordsMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.rollback = transaction.atomic()
        self.rollback._from_testcase = True  # as the one of a test: the verbs may ask for a durable one inside
        self.rollback.__enter__()
        self.directory = Path(tempfile.mkdtemp(prefix="lh-records-"))
        self.file = self.directory / "records.jsonl"
        self.costs: dict[str, int] = {}  # of what is recorded, in billionths
        self.torn = b""  # what is missing of a line that was begun last
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

    # --- what happens -------------------------------------------------------------------------------------------------

    @rule(nanos=st.lists(NANOS, min_size=1, max_size=5))
    def calls_are_recorded(self, nanos: list[int]) -> None:
        for cost in nanos:
            self.append(self.line(self.called(), cost))

    @precondition(lambda self: self.costs)
    @rule(data=st.data(), nanos=NANOS)
    def a_call_is_recorded_again(self, data: st.DataObject, nanos: int) -> None:
        """LiteLLM has tried it more than once. The dearest counts."""
        call_id = data.draw(st.sampled_from(sorted(self.costs)))
        self.append(self.line(call_id, nanos))

    @rule(garbage=st.binary(max_size=40), whole=st.booleans())
    def something_else_is_in_it(self, garbage: bytes, whole: bool) -> None:
        self.append(garbage.replace(b"{", b"") + b"\n" * whole)

    @rule(nanos=NANOS, at=st.integers(1, 50))
    def a_writer_is_slow(self, nanos: int, at: int) -> None:
        """The rest of its line follows, if nobody else writes before."""
        line = self.line(self.called(), nanos)
        self.append(line[:at])
        self.torn = line[at:]

    @precondition(lambda self: self.torn)
    @rule()
    def it_finishes(self) -> None:
        rest, self.torn = self.torn, b""
        self.append(rest)

    @rule()
    def they_are_collected(self) -> None:
        upstream_records.collect_records(self.file, NOW)

    @rule(step=STEPS)
    def a_reader_dies(self, step: str) -> None:
        self.at(step, self.die)
        with suppress(SimulatedCrash):
            upstream_records.collect_records(self.file, NOW)
        lifecycle.CHECKPOINT_HOOKS.clear()

    @rule()
    def a_rival_reads_meanwhile(self) -> None:
        self.at("lines read", lambda: upstream_records.collect_records(self.file, NOW))
        upstream_records.collect_records(self.file, NOW)
        lifecycle.CHECKPOINT_HOOKS.clear()

    @precondition(lambda self: self.file.exists())
    @rule(nanos=NANOS, copied=st.booleans())
    def it_is_rotated(self, nanos: int, copied: bool) -> None:
        """At most once between two collections that find the old one quiet. One writer is late."""
        self.append(self.line(self.called(), nanos))  # nothing tells a copy of what was not begun from another file
        self.settle()
        self.append(self.line(self.called(), nanos))
        self.rotations += 1
        old = self.directory / f"records.jsonl.{self.rotations}"
        if copied:
            shutil.copy(self.file, old)
            os.truncate(self.file, 0)
        else:
            self.file.rename(old)
            upstream_records.collect_records(self.file, NOW)
            self.append(self.line(self.called(), nanos), old)

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def no_call_costs_more_than_was_recorded(self) -> None:
        if hasattr(self, "costs"):
            for call_id, cost in LlmCall.objects.filter(cost__isnull=False).values_list("call_id", "cost"):
                assert cost <= Decimal(self.costs[call_id]) / 10**9

    def settle(self) -> None:
        """Once all is quiet, everything is collected, and nothing twice."""
        self.finish()
        for one in self.directory.iterdir():
            if one != self.file:
                os.utime(one, ((NOW - 60 * MINUTE).timestamp(),) * 2)
        for _ in range(2):
            upstream_records.collect_records(self.file, NOW)
            found = dict(LlmCall.objects.values_list("call_id", "cost"))
            assert found == {call_id: Decimal(cost) / 10**9 for call_id, cost in self.costs.items()}
            total = LlmCall.objects.aggregate(total=Sum("cost"))["total"] or 0
            assert total == Decimal(sum(self.costs.values())) / 10**9

    # --- how ----------------------------------------------------------------------------------------------------------

    def called(self) -> str:
        call_id = uuid.uuid4().hex
        LlmCall.objects.create(call_id=call_id, started_at=NOW - MINUTE, deadline_at=NOW, ended_at=NOW, outcome="ok")
        return call_id

    def line(self, call_id: str, nanos: int) -> bytes:
        self.costs[call_id] = max(nanos, self.costs.get(call_id, 0))
        self.lines += 1  # no two are the same
        said = {"call": call_id, "status": "success", "error": "", "input": 1, "cost": nanos / 1e9, "ended": self.lines}
        return b"\n" + json.dumps(said).encode() + b"\n"

    def append(self, line: bytes, file: Path | None = None) -> None:
        self.finish()
        with (file or self.file).open("ab") as there:
            there.write(line)

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

    def die(self) -> None:
        raise SimulatedCrash


@pytest.mark.parametrize("batch", [log_tail.BATCH_BYTES, 700])
def test_every_record_counts_once(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(log_tail, "BATCH_BYTES", batch)  # 700: three lines at a time
    examples = int(os.environ.get("RECORDS_MACHINE_EXAMPLES", "20"))
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        RecordsMachine,
        settings=settings(max_examples=examples, stateful_step_count=15, deadline=None, suppress_health_check=checks),
    )
