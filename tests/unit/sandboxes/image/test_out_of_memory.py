"""image/agent/runs.py: attribution of the kernel's OOM kills, which it counts for the whole container, to a run."""

import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sandbox_agent import AGENT


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(AGENT.parent)
    path, known = [*sys.path], {*sys.modules}
    yield importlib.import_module("runs")
    sys.path[:] = path
    for name in {*sys.modules} - known:
        del sys.modules[name]


class Loop:
    """The fields and methods of the agent that a run without output uses."""

    def __init__(self) -> None:
        self.kills, self.retained_bytes = 0, 0

    def count_oom_kills(self) -> int:
        return self.kills

    def watch(self, *args: Any) -> None:
        pass

    unwatch = answer_waits = forget = watch


@pytest.mark.parametrize(
    ("code", "kills", "is_oom"), [(0, 1, False), (1, 1, False), (137, 1, True), (137, 0, False), (143, 1, False)]
)
def test_only_a_run_that_was_killed_ends_out_of_memory(runs: Any, code: int, kills: int, is_oom: bool) -> None:
    loop, (report, writer) = Loop(), os.pipe()
    process = SimpleNamespace(outputs={}, report=report, stdin=None, terminal=None, pid=1)
    try:
        run = runs.Run(loop, "r1", process, {"cap": 1024, "timeout": 60})
        loop.kills += kills
        run.end(code, b"")
        assert (run.exit_code, run.describe().get("oom", False)) == (code, is_oom)
    finally:
        os.close(report)
        os.close(writer)
