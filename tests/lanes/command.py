"""Commands of the suite: the fast lanes with the parts that a change adds, the whole matrix, or a selection of tests."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.lanes import changes, matrix_record, report
from tests.lanes.processes import NO_TEST_SELECTED, Result, Run
from tests.lanes.table import FAST, MATRIX, PARTS, POSTGRES, REPO, SQLITE, Part

FAST_NAMES = frozenset(part.name for part in FAST)
# Tests that the developer selects, each on its database.
SELECTION = (
    Part("postgres", (), "postgres or docker or e2e", POSTGRES),
    Part("sqlite", (), "not postgres and not docker and not e2e", SQLITE),
)


def main(argv: Sequence[str]) -> int:
    """Run `fast` or `all`. Return 1 if a part has failed, is past its budget, or if a test belongs to no part or to two."""
    if argv[:1] == ["fast"]:
        return run_selection(argv[1:]) if argv[1:] else run_fast()
    if argv[:1] == ["all"]:
        return run_matrix(parse_matrix_arguments(argv[1:]))
    print("usage: python -m tests.lanes fast [PYTEST ARGUMENTS] | all [--resume] [PART ...]", file=sys.stderr)
    return 2


def run_fast() -> int:
    added = changes.select_parts(changes.list_changes())
    if added:
        print(f"Added by changed paths (tests/lanes/changes.py): {', '.join(added)}")
    with tempfile.TemporaryDirectory(prefix="lh-lanes-") as directory:
        run = Run(Path(directory))
        results = run.execute(choose_databases([*FAST, *(PARTS[name] for name in added)]), report.print_result)
    slowdown = run.speedometer.slowdown
    report.print_table(results, slowdown=slowdown)
    overruns = report.find_overruns(results, slowdown=slowdown)
    report.print_overruns(overruns, slowdown=slowdown)
    repeated = report.find_repeated(result for result in results if result.part.name in FAST_NAMES)
    report.print_repeated(repeated)
    return int(bool(overruns or repeated) or not all(result.passed for result in results))


def choose_databases(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts, on SQLite if there is no PostgreSQL. Exit if all services are required."""
    if os.environ.get("TEST_POSTGRES_URL"):
        return parts
    if os.environ.get("LEASEHOLD_REQUIRE_SERVICES") == "1":
        raise SystemExit("PostgreSQL is unavailable, and LEASEHOLD_REQUIRE_SERVICES=1 requires all services.")
    print("PostgreSQL is unavailable: all tests run on SQLite.")
    return [replace(part, database=SQLITE) for part in parts]


def run_selection(arguments: Sequence[str]) -> int:
    """Run the tests that the arguments of pytest select, on their databases, one process after the other."""
    with tempfile.TemporaryDirectory(prefix="lh-lanes-") as directory:
        results: list[Result] = []
        for part in choose_databases(SELECTION):
            results += Run(Path(directory), arguments).execute([part], lambda result: print(result.output, flush=True))
    statuses = {result.status for result in results}
    if statuses == {NO_TEST_SELECTED}:
        print("No test is selected.")
        return NO_TEST_SELECTED
    return int(bool(statuses - {0, NO_TEST_SELECTED}))


def parse_matrix_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-all", description="Run the whole matrix, or some of its parts.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--resume", action="store_true", help="skip the parts that have passed on the present tree")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):  # argparse would compare the empty list with its choices
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Parts: {', '.join(PARTS)}")
    return options


def run_matrix(options: argparse.Namespace) -> int:
    """Run the parts with full search budgets. After a run of all parts, require that each test was in one of them."""
    record = matrix_record.Record.of_present_tree()
    chosen = [PARTS[name] for name in options.parts] or [*FAST, *MATRIX]
    skipped = [part for part in chosen if options.resume and record.has_passed(part.name)]
    for part in skipped:
        print(f"{part.name:<16} passed earlier on this tree")
    with tempfile.TemporaryDirectory(prefix="lh-lanes-") as directory:
        run = Run(Path(directory), full_search=True)

        def end(result: Result) -> None:
            report.print_result(result)
            record.add(result)

        pending = [replace(part, budget=None) for part in chosen if part not in skipped]
        results = run.execute(choose_databases(pending), end)
    if results:
        report.print_table(results, slowdown=run.speedometer.slowdown)
    missing = record.find_missing(list_all_tests()) if not options.parts else []
    for test in missing:
        print(f"in no part: {test}")
    return int(bool(missing) or not all(result.passed for result in results))


def list_all_tests() -> set[str]:
    """Collect the whole suite and return the ids of its tests."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True)
    tests = {line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line}
    if done.returncode or not tests:
        raise SystemExit(f"the suite cannot be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return tests
