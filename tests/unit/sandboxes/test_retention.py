"""Acknowledgement of the results of streamed commands."""

from types import SimpleNamespace
from typing import Any

import pytest

from sandboxes.providers.errors import Unavailable
from sandboxes.runs import retention
from sandboxes.runs.retention import MAX_RETAINED_BYTES, MAX_RETAINED_RESULTS, Acknowledger, RetainedResult
from tests.support.waiting import wait_until


class Recorder:
    """Provider that records acknowledgements."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    def acknowledge_exec(self, ref: str, mark: str) -> None:
        self.marks.append(mark)
        if mark == "fails":
            raise Unavailable("no")


@pytest.fixture
def recorder() -> Any:
    return Recorder()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(retention, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def make_result(provider: Any, mark: str, *, due: float = 30.0, ref: str = "box", size: int = 10) -> RetainedResult:
    return RetainedResult(due, provider, ref, mark, size)


def test_result_is_acknowledged_when_it_is_due(recorder, clock) -> None:
    acknowledger = Acknowledger()
    acknowledger.put(make_result(recorder, "later"))
    clock.now = 29.0
    acknowledger.put(make_result(recorder, "fails", due=59.0))
    assert recorder.marks == []
    clock.now = 60.0
    acknowledger.put(make_result(recorder, "last", due=60.0))
    wait_until(lambda: recorder.marks == ["later", "fails", "last"], "all are acknowledged")
    acknowledger.put(make_result(recorder, "again", due=60.0))  # by a new thread, once the first has ended
    wait_until(lambda: recorder.marks[3:] == ["again"], "the next one is acknowledged")


def test_oldest_results_of_a_sandbox_above_its_limits_are_acknowledged_early(recorder, clock) -> None:
    acknowledger = Acknowledger()
    acknowledger.put(make_result(recorder, "other", ref="other"))
    for number in range(MAX_RETAINED_RESULTS + 2):
        acknowledger.put(make_result(recorder, str(number)))
    assert recorder.marks == ["0", "1"]
    acknowledger.put(make_result(recorder, "large", size=MAX_RETAINED_BYTES))
    assert recorder.marks == [str(number) for number in range(MAX_RETAINED_RESULTS + 2)]
    acknowledger.put(make_result(recorder, "too large", size=MAX_RETAINED_BYTES + 1))
    assert recorder.marks[-2:] == ["large", "too large"]


def test_flush_acknowledges_all_at_once(recorder, clock) -> None:
    acknowledger = Acknowledger()
    acknowledger.put(make_result(recorder, "first"))
    acknowledger.flush()
    assert recorder.marks == ["first"]
    acknowledger.put(make_result(recorder, "second"))
    wait_until(lambda: recorder.marks == ["first", "second"], "further ones are not delayed")
