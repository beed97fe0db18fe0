"""Report of a run: output of failed parts, the table of parts, budgets, and tests that several parts have run."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from tests.lanes.accounting import TestCost
from tests.lanes.processes import Result

TESTS_NAMED_PER_PART = 10
SUMMARY_LINE = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)


def print_result(result: Result) -> None:
    """Print one line, and before it the output of the part if it has failed."""
    if not result.passed:
        print("\n".join(f"{result.part.name:<16} | {line}" for line in result.output.splitlines()), flush=True)
    print(format_row(result), flush=True)


def format_row(result: Result) -> str:
    verdict = "passed" if result.passed else f"FAILED ({result.status})"
    outcomes = result.outcomes
    counts = f"{outcomes['passed']:>5} passed {outcomes['failed']:>3} failed {outcomes['skipped']:>3} skipped"
    cost = f"{result.cpu:>5.0f} s CPU ({result.cpu / 60:>4.1f} min) {result.wall:>5.0f} s"
    return f"{result.part.name:<16} {verdict:<11} {counts} {cost}"


def print_table(results: Sequence[Result], *, slowdown: float) -> None:
    """Print all results, the sums in a form that continuous integration reads, and the failures again at the end."""
    print()
    for result in results:
        budget = f"   budget {result.part.budget} s" if result.part.budget else ""
        print(format_row(result) + budget)
    print("CPU is of the tests' processes, without the Docker daemon, PostgreSQL and sandboxes.")
    print(f"Slowdown of this machine, by which budgets are multiplied: {slowdown:.2f}")
    for result in results:
        for line in SUMMARY_LINE.findall(result.output):
            print(line)
    total = sum((result.outcomes for result in results), Counter[str]())
    print(f"\n{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)


def find_overruns(results: Iterable[Result], *, slowdown: float) -> list[Result]:
    """Return the parts that have used more CPU seconds than their budget, as scaled by the speed of the machine."""
    return [result for result in results if result.part.budget and result.cpu > result.part.budget * slowdown]


def print_overruns(overruns: Sequence[Result], *, slowdown: float) -> None:
    """Name the parts past their budgets, each with its most expensive tests."""
    for result in overruns:
        allowed = (result.part.budget or 0) * slowdown
        print(f"\n{result.part.name}: {result.cpu:.0f} CPU seconds, budget (tests/lanes/table.py) {allowed:.0f} here.")
        print("Most expensive tests, CPU and wall-clock in seconds:")
        for cost in find_most_expensive(result.costs):
            print(f"  {cost.cpu:>7.1f} {cost.wall:>7.1f}  {cost.test}")


def find_repeated(results: Iterable[Result]) -> dict[str, list[str]]:
    """Return the tests that several of these parts have run, each with the names of those parts."""
    parts: dict[str, list[str]] = {}
    for result in results:
        for cost in result.costs:
            parts.setdefault(cost.test, []).append(result.part.name)
    return {test: names for test, names in sorted(parts.items()) if len(names) > 1}


def print_repeated(repeated: Mapping[str, Sequence[str]]) -> None:
    """Name tests that run more than once at each change, at most TESTS_NAMED_PER_PART of them."""
    for test, names in islice(repeated.items(), TESTS_NAMED_PER_PART):
        print(f"in the parts {', '.join(names)} (tests/lanes/table.py): {test}")
    if len(repeated) > TESTS_NAMED_PER_PART:
        print(f"and {len(repeated) - TESTS_NAMED_PER_PART} further tests in several parts")


def find_most_expensive(costs: Iterable[TestCost]) -> list[TestCost]:
    return sorted(costs, key=lambda cost: cost.cpu, reverse=True)[:TESTS_NAMED_PER_PART]
