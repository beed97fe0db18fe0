"""Runs of parts: outcomes, costs, budgets, and the record by which a run of the matrix is resumed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lanes import accounting, command, matrix_record, processes, report
from tests.lanes.accounting import TestCost
from tests.lanes.processes import NO_TEST_SELECTED, Result, Run
from tests.lanes.table import PARTS, SQLITE, Part

SUITE = """
import pytest, time

def test_passes():
    pass

def test_burns():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass

def test_fails():
    assert False

@pytest.fixture
def broken():
    yield
    raise ValueError("at its end")

def test_fails_at_its_end(broken):
    pass

@pytest.mark.skip(reason="no service")
def test_is_skipped():
    pass
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Part:
    """A part whose tests are those of a module outside of the tree, without its settings."""
    module = tmp_path / "test_suite.py"
    module.write_text(SUITE)
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(processes, "COMPILED_PATHS", ())
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing the plugins takes most of the time
    options = ["-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    monkeypatch.setattr(Part, "build_arguments", lambda part: [*options, "-k", part.marks, str(module)])
    return Part("suite", ("tests/unit",), "passes or burns", SQLITE)


def run(directory: Path, *parts: Part) -> list[Result]:
    return Run(directory).execute(parts, lambda result: None)


def test_a_part_has_the_outcome_and_cost_of_each_test(suite: Part, tmp_path: Path) -> None:
    [result] = run(tmp_path, replace(suite, marks="test"))
    outcomes = {cost.test.rpartition("::")[2]: cost.outcome for cost in result.costs}
    assert outcomes == {
        "test_passes": "passed", "test_burns": "passed", "test_fails": "failed", "test_fails_at_its_end": "failed",
        "test_is_skipped": "skipped",
    }  # fmt: skip
    assert (result.passed, result.status) == (False, 1)
    assert result.cpu >= 0.3
    [burnt] = [cost for cost in result.costs if cost.test.endswith("burns")]
    assert 0.3 <= burnt.cpu <= result.cpu
    assert "test_suite.py::test_fails_at_its_end" in result.output


TIMES = """
import os

def test_times(pytestconfig):
    assert False, (os.environ.get("TEST_SEARCH"), pytestconfig.getini("faulthandler_timeout"))
"""


def test_a_test_with_a_full_search_has_more_time(suite: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_SEARCH", raising=False)
    (tmp_path / "test_suite.py").write_text(TIMES)
    for full, expected in ((False, "(None, 0.0)"), (True, "('full', 5400.0)")):
        [result] = Run(tmp_path, full_search=full).execute([replace(suite, marks="times")], lambda result: None)
        assert f"AssertionError: {expected}" in result.output


def test_parts_run_side_by_side_and_each_has_its_result(suite: Part, tmp_path: Path) -> None:
    parts = [replace(suite, name=name, marks="passes", waits=name == "waits") for name in ("first", "second", "waits")]
    results = run(tmp_path, *parts)
    assert {result.part.name: result.passed for result in results} == {"first": True, "second": True, "waits": True}


def test_a_further_busy_part_runs_only_when_no_part_waits(suite: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "BUSY_SLOTS", 1)
    busy, waits = suite, replace(suite, waits=True)

    def choose(running: list[Part], pending: list[Part]) -> Part | None:
        chooser = Run(tmp_path)
        chooser._running = [SimpleNamespace(part=part) for part in running]  # type: ignore[misc]
        return chooser._choose(pending)

    assert choose([], [busy, waits]) is busy
    assert choose([busy], [busy, waits]) is waits
    assert choose([busy, waits, waits, waits], [busy, waits]) is None
    assert choose([busy, waits], [busy]) is None
    assert choose([busy], [busy]) is busy
    assert choose([busy, busy], [busy]) is None


def test_a_part_without_a_test_has_not_passed(suite: Part, tmp_path: Path) -> None:
    [result] = run(tmp_path, replace(suite, marks="nothing"))
    assert (result.passed, result.status, result.costs) == (False, NO_TEST_SELECTED, [])


def test_a_part_past_its_budget_is_named_with_its_most_expensive_tests(
    suite: Part, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [result] = run(tmp_path, suite)
    over = replace(result, cpu=250.0, part=replace(suite, budget=100))
    assert report.find_overruns([over], slowdown=1.0) == [over]
    assert report.find_overruns([over], slowdown=3.0) == []
    assert report.find_overruns([replace(over, part=suite)], slowdown=1.0) == []  # no budget is kept
    report.print_overruns([over], slowdown=2.0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "suite: 250 CPU seconds, budget (tests/lanes/table.py) 200 here."
    assert [line.rpartition("::")[2] for line in printed[3:]] == ["test_burns", "test_passes"]


def test_tests_that_two_parts_have_run_are_named(suite: Part, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(tmp_path, *(replace(suite, name=name, marks=marks) for name, marks in (("first", "passes"), ("second", ""))))
    [(test, names)] = report.find_repeated(results).items()
    assert test.endswith("::test_passes") and sorted(names) == ["first", "second"]
    report.print_repeated({f"t{number}": names for number in range(12)})
    assert capsys.readouterr().out.splitlines()[-1] == "and 2 further tests in several parts"


def test_the_ten_most_expensive_tests_are_named() -> None:
    costs = [TestCost(f"t{number}", cpu=float(number)) for number in range(30)]
    assert [cost.test for cost in report.find_most_expensive(costs)] == [f"t{number}" for number in range(29, 19, -1)]


def test_a_test_that_kills_its_process_leaves_the_costs_of_those_before(tmp_path: Path) -> None:
    module = tmp_path / "test_dying.py"
    module.write_text("import os\ndef test_a(): pass\ndef test_b(): os._exit(3)\n")
    record = tmp_path / "costs.jsonl"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "/dev/null",
        f"--rootdir={tmp_path}",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*argv, "-p", "tests.lanes.accounting", str(module)],
        env={"TEST_ACCOUNTING": str(record), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.returncode == 3
    assert [cost.test for cost in accounting.read_costs(record)] == ["test_dying.py::test_a"]


def test_without_postgresql_all_parts_run_on_sqlite_unless_services_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [PARTS["database"], PARTS["domain"]]
    monkeypatch.setenv("TEST_POSTGRES_URL", "postgres://x")
    assert command.choose_databases(parts) == parts
    monkeypatch.delenv("TEST_POSTGRES_URL")
    monkeypatch.setenv("LEASEHOLD_REQUIRE_SERVICES", "0")
    assert {part.database for part in command.choose_databases(parts)} == {SQLITE}
    monkeypatch.setenv("LEASEHOLD_REQUIRE_SERVICES", "1")
    with pytest.raises(SystemExit, match="PostgreSQL is unavailable"):
        command.choose_databases(parts)


def make_result(name: str, *tests: str, status: int = 0) -> Result:
    return Result(PARTS[name], status, 1.0, 1.0, [TestCost(test) for test in tests])


def test_parts_that_have_passed_are_remembered_for_one_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_record, "DIRECTORY", tmp_path)
    digests = iter(("before", "before", "after"))
    monkeypatch.setattr(matrix_record, "compute_tree_digest", lambda: next(digests))
    record = matrix_record.Record.of_present_tree()
    record.add(make_result("layers", "a"))
    record.add(make_result("domain", "b", status=1))
    resumed = matrix_record.Record.of_present_tree()
    assert (resumed.has_passed("layers"), resumed.has_passed("domain")) == (True, False)
    resumed.add(make_result("layers", "a", status=1))
    assert json.loads(resumed.path.read_text()) == {}
    assert not matrix_record.Record.of_present_tree().passed


def test_tests_that_no_part_has_run_are_named_once_all_parts_have_passed(tmp_path: Path) -> None:
    record = matrix_record.Record(tmp_path / "record.json")
    *others, last = PARTS
    for name in others:
        record.add(make_result(name, f"test of {name}"))
    assert record.find_missing({"test of layers", "unreachable"}) == []  # a part may still run it
    record.add(make_result(last))
    assert record.find_missing({"test of layers", "unreachable"}) == ["unreachable"]
