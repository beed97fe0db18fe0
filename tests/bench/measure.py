"""What a benchmark is made of: interleaved rounds, medians, and the CPU that a process tree has used."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLOCK_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_fork_context = multiprocessing.get_context("fork")


def list_process_tree(*roots: int) -> set[int]:
    """These processes and all that descend from them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = set(), list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def read_cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes and of their children that have ended."""
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
    """How long each call of one operation took. `rate` is calls a second, by default of one caller at a time."""

    name: str
    seconds: list[float] = field(default_factory=list, init=False)
    cpu: float = field(default=0.0, init=False)

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(len(self.seconds) * 0.99))]

    @property
    def rate(self) -> float:
        return 1 / self.p50

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu / len(self.seconds)


@dataclass
class BenchCase(Timing):
    """One operation, timed call by call. `pids` are the processes that work for it; `before` and `after` each call is
    done what is not timed."""

    act: Callable[[int], object]
    pids: Callable[[], Iterable[int]] = lambda: ()
    before: Callable[[int], object] = lambda number: None
    after: Callable[[int], object] = lambda number: None

    def time(self, number: int) -> float:
        self.before(number)
        began = time.perf_counter()
        self.act(number)
        took = time.perf_counter() - began
        self.after(number)
        return took


@dataclass
class ConcurrentCase(Timing):
    """One operation by several clients at once: `make` gives each client its own way to do it."""

    make: Callable[[int], Callable[[int], object]]
    elapsed: float = field(default=0.0, init=False)

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.elapsed


def interleave(cases: Sequence[BenchCase], *, rounds: int, block: int = 1, warmup: int = 3) -> None:
    """Time all cases in turn, `block` calls of each a round, so that a machine that slows down slows all of them."""
    number = 0
    for case in cases:
        for _ in range(warmup):
            number += 1
            case.time(number)
    for _ in range(rounds):
        for case in cases:
            pids = list(case.pids())
            before = read_cpu_seconds(pids)
            for _ in range(block):
                number += 1
                case.seconds.append(case.time(number))
            case.cpu += read_cpu_seconds(pids) - before


def run_concurrently(cases: Sequence[ConcurrentCase], *, clients: int, seconds: float, rounds: int = 3) -> None:
    """Time all cases in turn, by `clients` processes at once, for this long in each round."""
    for _ in range(rounds):
        for case in cases:
            start, results = _fork_context.Barrier(clients + 1), _fork_context.SimpleQueue()
            workers = [
                _fork_context.Process(target=_run_client, args=(case.make, one, seconds, start, results))
                for one in range(clients)
            ]
            for worker in workers:
                worker.start()
            start.wait(60)
            began = time.perf_counter()
            took = [results.get() for _ in workers]
            case.elapsed += time.perf_counter() - began
            case.seconds += [one for each in took for one in each]
            for worker in workers:
                worker.join()


def _run_client(make: Callable[[int], Callable[[int], object]], client: int, seconds: float, start: Any, results: Any) -> None:
    act, took = make(client), []
    for number in range(20):
        act(number)
    start.wait(60)
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        act(len(took))
        took.append(time.perf_counter() - began)
    results.put(took)


def print_report(title: str, cases: Sequence[Timing], *, raw: Timing, aim: str = "") -> None:
    """One line a case: p50, p99, calls a second, CPU, and how p50 and the rate compare to the raw operation's."""
    print(f"\n{title}  ({len(raw.seconds)} calls, interleaved{'; aim: ' + aim if aim else ''})")
    print(f"  {'':<34}{'p50 ms':>9}{'p99 ms':>9}{'per s':>9}{'CPU us':>9}{'p50 : raw':>11}{'rate : raw':>12}")
    for case in cases:
        cpu = f"{case.cpu_us:9.0f}" if case.cpu else f"{'-':>9}"
        print(
            f"  {case.name:<34}{1e3 * case.p50:9.2f}{1e3 * case.p99:9.2f}{case.rate:9.0f}{cpu}"
            f"{case.p50 / raw.p50:10.2f}x{100 * case.rate / raw.rate:11.0f}%",
            flush=True,
        )
