"""image/agent/main.py: results that no client has acknowledged, at the maximum number of retained runs."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from tests.support.sandbox_agent import AGENT


class EndedRun:
    """The fields and methods of an ended run that the agent uses."""

    exit_code, killing = 0, None

    def __init__(self, run_id: str, ended_at: float) -> None:
        self.id, self.ended_at, self.shim_gone = run_id, ended_at, True

    def drop_output(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def main(monkeypatch):
    monkeypatch.syspath_prepend(AGENT.parent)
    path, known = [*sys.path], {*sys.modules}
    yield importlib.import_module("main")
    sys.path[:] = path
    for name in {*sys.modules} - known:
        del sys.modules[name]


@pytest.fixture
def agent(main):
    """An agent without a connection, whose retained runs have ended at the times 0, 1, 2 and so on."""
    agent = main.Agent.__new__(main.Agent)  # the constructor changes the signal handlers of this process
    agent.runs = {f"r{number}": EndedRun(f"r{number}", float(number)) for number in range(main.MAX_RUNS)}
    agent.tombstones = {}
    return agent


@pytest.mark.parametrize(("seconds", "dropped"), [(600.0, []), (600.5, ["r0"]), (800.0, ["r0"])])
def test_result_makes_room_for_a_run_only_once_it_is_older_than_ten_minutes(main, agent, monkeypatch, seconds, dropped) -> None:
    monkeypatch.setattr(main, "time", SimpleNamespace(monotonic=lambda: seconds))
    assert agent.make_room() == bool(dropped)
    assert [*agent.tombstones] == dropped
    assert len(agent.runs) == main.MAX_RUNS - len(dropped)


def test_run_whose_processes_have_not_ended_makes_no_room(main, agent, monkeypatch) -> None:
    monkeypatch.setattr(main, "time", SimpleNamespace(monotonic=lambda: 600.5))
    agent.runs["r0"].shim_gone = False
    assert not agent.make_room()
    assert len(agent.runs) == main.MAX_RUNS
