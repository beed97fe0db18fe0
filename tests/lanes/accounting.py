"""Plugin of pytest: one JSON line per test with its outcome, CPU and wall-clock, in the file of TEST_ACCOUNTING."""

import json
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

VARIABLE = "TEST_ACCOUNTING"  # path of the file; without it nothing is recorded


@dataclass
class TestCost:
    """One test as a part has run it. CPU is that of its process and of the processes for which that has waited, in seconds."""

    __test__ = False  # no test class
    test: str
    outcome: str = "passed"  # or failed, skipped
    cpu: float = 0.0
    wall: float = 0.0


def read_costs(path: Path) -> list[TestCost]:
    """Return the tests that a part has run. A test that ends its process leaves no line."""
    return [TestCost(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def measure_cpu() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Accounting:
    """Writes the cost of each test once it and the fixtures that end with it are done."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)  # a line at a time: the process may be killed
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        cpu, wall = measure_cpu(), time.monotonic()
        result = yield
        outcome = self._outcomes.pop(item.nodeid, "passed")
        cost = TestCost(item.nodeid, outcome, round(measure_cpu() - cpu, 3), round(time.monotonic() - wall, 3))
        self._file.write(json.dumps(asdict(cost)) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":  # of any phase; a failure in tear-down comes after a passed call
            self._outcomes[report.nodeid] = report.outcome


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(VARIABLE):
        config.pluginmanager.register(Accounting(Path(path)))
