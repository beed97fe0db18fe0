"""What a benchmark is made of: interleaved rounds, medians, and the CPU that a process tree has used."""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def tree(*roots: int) -> set[int]:
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


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes and of their children that have ended."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(fields[index]) for index in (11, 12, 13, 14))
    return total / TICK


@dataclass
class Case:
    """One operation, timed call by call; `pids` are the processes that work for it."""

    name: str
    act: Callable[[int], object]
    pids: Callable[[], Iterable[int]] = lambda: ()
    seconds: list[float] = field(default_factory=list)
    cpu: float = 0.0

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(len(self.seconds) * 0.99))]

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu / len(self.seconds)


def interleave(cases: list[Case], *, rounds: int, block: int = 1, warmup: int = 3) -> None:
    """Time all cases in turn, `block` calls of each a round, so that a machine that slows down slows all of them."""
    number = 0
    for case in cases:
        for _ in range(warmup):
            number += 1
            case.act(number)
    for _ in range(rounds):
        for case in cases:
            pids = list(case.pids())
            before = cpu_seconds(pids)
            for _ in range(block):
                number += 1
                began = time.perf_counter()
                case.act(number)
                case.seconds.append(time.perf_counter() - began)
            case.cpu += cpu_seconds(pids) - before


def report(title: str, cases: list[Case], *, raw: Case) -> None:
    """One line a case: p50, p99, calls a second at one caller, CPU, and the ratio of p50 to the raw operation's."""
    print(f"\n{title}  ({len(raw.seconds)} calls each, interleaved)")
    print(f"  {'':<34}{'p50 ms':>9}{'p99 ms':>9}{'per s':>9}{'CPU us':>9}{'p50 : raw':>11}{'rate : raw':>12}")
    for case in cases:
        cpu = f"{case.cpu_us:9.0f}" if case.cpu else f"{'-':>9}"
        print(
            f"  {case.name:<34}{1e3 * case.p50:9.2f}{1e3 * case.p99:9.2f}{1 / case.p50:9.0f}{cpu}"
            f"{case.p50 / raw.p50:10.2f}x{100 * raw.p50 / case.p50:11.0f}%"
        )
