"""Processes of pytest that run parts of the suite: databases, slots, progress and cost."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.lanes.accounting import VARIABLE, TestCost, read_costs
from tests.lanes.speed import Speedometer
from tests.lanes.table import POSTGRES, REPO, Part

BUSY_SLOTS = os.cpu_count() or 2
WAITING_SLOTS = 3  # parts that wait for containers and processes most of their time
LOOK_SECONDS, PROGRESS_SECONDS = 0.5, 20.0
NICENESS_OF_BUSY_PARTS = 5
COMPILED_PATHS = ("controlplane", "leases", "billing", "sandboxes", "tests/support", "tests/emulators")
FULL_SEARCH_OPTIONS = ("-o", "faulthandler_timeout=5400")  # seconds of one test, which has up to 30 times the examples
NO_TEST_SELECTED = 5  # exit status of pytest


@dataclass
class Result:
    """Outcome of a part. `cpu` is of its processes, not of the Docker daemon, the database or sandboxes, in seconds."""

    part: Part
    status: int
    cpu: float
    wall: float
    costs: list[TestCost] = field(default_factory=list)
    output: str = ""

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(cost.outcome for cost in self.costs)

    @property
    def passed(self) -> bool:
        return self.status == 0


@dataclass
class Running:
    """A part whose process has not ended."""

    part: Part
    process: subprocess.Popen[bytes]
    log: Path
    accounting: Path
    began: float

    def read_progress(self) -> str:
        return f"{self.part.name} {len(read_costs(self.accounting))}"


class Run:
    """One run of several parts, each in its slot. Results are printed as they come."""

    def __init__(self, directory: Path, arguments: Sequence[str] = (), *, full_search: bool = False) -> None:
        self._directory, self._arguments, self._full_search = directory, list(arguments), full_search
        self._running: list[Running] = []
        self.results: list[Result] = []
        self.speedometer = Speedometer()
        self._printed = time.monotonic()

    def execute(self, parts: Sequence[Part], report: Callable[[Result], object]) -> list[Result]:
        """Run the parts and return their results in the order of their ends."""
        pending = list(parts)
        compile_sources()
        try:
            while pending or self._running:
                while (chosen := self._choose(pending)) is not None:
                    pending.remove(chosen)
                    self._running.append(self._start(chosen))
                time.sleep(LOOK_SECONDS)
                for ended in [self._end(running, usage) for running, usage in self._reap()]:
                    self.results.append(ended)
                    report(ended)
                self._show_progress()
        finally:
            for running in self._running:
                running.process.kill()
        return self.results

    def _choose(self, pending: Sequence[Part]) -> Part | None:
        """Return the first part with a free slot.

        One more busy part runs when none that waits is left: parts on PostgreSQL do not keep a core busy by themselves."""
        taken = Counter(running.part.waits for running in self._running)
        is_last_phase = not taken[True] and not any(part.waits for part in pending)
        slots = {True: WAITING_SLOTS, False: BUSY_SLOTS + is_last_phase}
        return next((part for part in pending if taken[part.waits] < slots[part.waits]), None)

    def _start(self, part: Part) -> Running:
        log, accounting = self._directory / f"{part.name}.log", self._directory / f"{part.name}.jsonl"
        environment = os.environ | {VARIABLE: str(accounting)}
        environment.pop("DATABASE_URL", None)
        if part.database == POSTGRES:
            environment["DATABASE_URL"] = create_database(f"{part.name.replace('-', '_')}_{os.getpid()}")
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.lanes.accounting", *part.build_arguments(), *self._arguments]
        if self._full_search:
            environment["TEST_SEARCH"] = "full"
            argv += FULL_SEARCH_OPTIONS
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                preexec_fn=None if part.waits else lambda: os.nice(NICENESS_OF_BUSY_PARTS) and None,
            )  # fmt: skip
        return Running(part, process, log, accounting, time.monotonic())

    def _reap(self) -> "list[tuple[Running, os.struct_rusage]]":  # type: ignore[name-defined]
        ended = []
        for running in [*self._running]:
            pid, status, usage = os.wait4(running.process.pid, os.WNOHANG)
            if pid:
                running.process.returncode = os.waitstatus_to_exitcode(status)
                self._running.remove(running)
                ended.append((running, usage))
        return ended

    def _end(self, running: Running, usage: "os.struct_rusage") -> Result:  # type: ignore[name-defined]
        return Result(
            running.part, running.process.returncode, usage.ru_utime + usage.ru_stime, time.monotonic() - running.began,
            read_costs(running.accounting), running.log.read_text(errors="replace"),
        )  # fmt: skip

    def _show_progress(self) -> None:
        if time.monotonic() - self._printed >= PROGRESS_SECONDS:
            self._printed = time.monotonic()
            self.speedometer.sample()
            print("tests so far: " + ", ".join(running.read_progress() for running in self._running), flush=True)


def compile_sources() -> None:
    """Compile once what the processes of all parts would otherwise compile at the same time."""
    if COMPILED_PATHS:  # without a path compileall takes sys.path
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", *COMPILED_PATHS], cwd=REPO, check=True)


def create_database(name: str) -> str:
    """Create a database on the server of TEST_POSTGRES_URL, which is removed after the run, and return its URL."""
    server = os.environ["TEST_POSTGRES_URL"]
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}"')
        connection.execute(f'CREATE DATABASE "{name}"')
    return f"{server.rpartition('/')[0]}/{name}"
