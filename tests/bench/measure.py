"""Benchmark toolkit: interleaved rounds, percentiles, CPU time of a process tree, report."""

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connection

from tests.bench import table
from tests.bench.table import Aim

CLOCK_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_fork_context = multiprocessing.get_context("fork")


def list_process_tree(*roots: int) -> set[int]:
    """Return these process ids and those of all descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    seen, pending = set(), list(roots)
    while pending:
        pid = pending.pop()
        if pid not in seen:
            seen.add(pid)
            pending += children.get(pid, [])
    return seen


def get_own_pids() -> list[int]:
    return [os.getpid()]


def read_cpu_seconds(pids: Iterable[int]) -> float:
    """Return user and system time of these processes and of their ended children, in seconds."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(fields[index]) for index in (11, 12, 13, 14))
    return total / CLOCK_TICKS_PER_SECOND


@dataclass
class Timing:
    """Durations of the calls of one operation. `rate` is calls per second, by default of one sequential client.

    An operation with an `aim` is a row of the table at the end of the run."""

    name: str
    seconds: list[float] = field(default_factory=list, init=False)
    cpu: float = field(default=0.0, init=False)
    aim: Aim | None = field(default=None, kw_only=True)

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    def percentile(self, share: float) -> float:
        """Return the duration in seconds that this share of the calls does not exceed (nearest rank)."""
        return sorted(self.seconds)[max(math.ceil(len(self.seconds) * share) - 1, 0)]

    @property
    def p95(self) -> float:
        return self.percentile(0.95)

    @property
    def p99(self) -> float:
        return self.percentile(0.99)

    @property
    def rate(self) -> float:
        return 1 / self.p50

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu / len(self.seconds)


@dataclass
class BenchCase(Timing):
    """One operation, timed per call. `pids` returns the processes whose CPU time counts; `before` and `after` do not count."""

    operation: Callable[[int], object]
    pids: Callable[[], Iterable[int]] = lambda: ()
    before: Callable[[int], object] = lambda number: None
    after: Callable[[int], object] = lambda number: None

    def time(self, number: int, pids: Sequence[int] = ()) -> float:
        """Call the operation once and return its duration. Add the CPU time of `pids` during the call."""
        self.before(number)
        cpu = read_cpu_seconds(pids)
        seconds_taken = measure_seconds(lambda: self.operation(number))
        self.cpu += read_cpu_seconds(pids) - cpu
        self.after(number)
        return seconds_taken


@dataclass
class ConcurrentCase(Timing):
    """One operation of several concurrent clients. `make_operation` creates the operation of each client."""

    make_operation: Callable[[int], Callable[[int], object]]
    pids: Callable[[], Iterable[int]] = lambda: ()
    elapsed: float = field(default=0.0, init=False)

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.elapsed


def measure_seconds(operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def refresh_statistics(table: str = "") -> None:
    """Update the planner's statistics after many rows have changed."""
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {table}" if connection.vendor == "postgresql" else "ANALYZE")


def interleave(cases: Sequence[BenchCase], *, rounds: int, block: int = 1, warmup: int = 3) -> None:
    """Time the cases in turn, `block` calls of each per round, so that changes of the machine's speed affect all of them."""
    number = 0
    for case in cases:
        for _ in range(warmup):
            number += 1
            case.time(number)
    for _ in range(rounds):
        for case in cases:
            pids = list(case.pids())
            if block == 1:
                number += 1
                case.seconds.append(case.time(number, pids))
                continue
            before = read_cpu_seconds(pids)  # of a block at once: reading it around each call would slow down short calls
            for _ in range(block):
                number += 1
                case.seconds.append(case.time(number))
            case.cpu += read_cpu_seconds(pids) - before


def run_concurrently(cases: Sequence[ConcurrentCase], *, clients: int, seconds: float, rounds: int = 3) -> None:
    """Time the cases in turn with `clients` concurrent processes, for `seconds` per round."""
    for _ in range(rounds):
        for case in cases:
            start, results = _fork_context.Barrier(clients + 1), _fork_context.SimpleQueue()
            workers = [
                _fork_context.Process(target=_run_client, args=(case.make_operation, client, seconds, start, results))
                for client in range(clients)
            ]
            for worker in workers:
                worker.start()
            start.wait(60)
            pids = list(case.pids())
            before, started = read_cpu_seconds(pids), time.perf_counter()
            seconds_taken = [results.get() for _ in workers]
            case.elapsed += time.perf_counter() - started
            case.cpu += read_cpu_seconds(pids) - before
            case.seconds += [seconds_ for result in seconds_taken for seconds_ in result]
            for worker in workers:
                worker.join()


def _run_client(
    make_operation: Callable[[int], Callable[[int], object]], client: int, seconds: float, start: Any, results: Any
) -> None:
    operation, seconds_taken = make_operation(client), []
    for number in range(20):
        operation(number)
    start.wait(60)
    deadline = time.perf_counter() + seconds
    while (started := time.perf_counter()) < deadline:
        operation(len(seconds_taken))
        seconds_taken.append(time.perf_counter() - started)
    results.put(seconds_taken)


def print_report(title: str, cases: Sequence[Timing], *, raw: Timing, aim: str = "") -> None:
    """Print one line per case: percentiles, calls per second, CPU, and the ratios of p50 and rate to the raw operation.

    Each case with an aim is recorded for the table; else the last case, if the report has an aim in words."""
    print(f"\n{title}  ({len(raw.seconds)} calls, interleaved{'; aim: ' + aim if aim else ''})")
    print(f"  {'':<34}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}{'per s':>9}{'CPU us':>9}{'p50 : raw':>11}{'rate : raw':>12}")
    for case in cases:
        cpu = f"{case.cpu_us:9.0f}" if case.cpu else f"{'-':>9}"
        print(
            f"  {case.name:<34}{1e3 * case.p50:9.2f}{1e3 * case.p95:9.2f}{1e3 * case.p99:9.2f}{case.rate:9.0f}{cpu}"
            f"{case.p50 / raw.p50:10.2f}x{100 * case.rate / raw.rate:11.0f}%",
            flush=True,
        )
        if case.aim:
            table.record(case.aim.operation, connection.display_name, case, raw, aim=case.aim)
    if aim and not any(case.aim for case in cases):
        table.record(title, connection.display_name, cases[-1], raw, aim=aim)
