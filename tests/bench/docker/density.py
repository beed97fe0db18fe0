"""Density: the largest number of sandboxes with 0.1 execs a second each at which p99 of an exec is at most one second.

Sandboxes are added step by step. In each step an exec of `true` is due in each sandbox every ten seconds, evenly spread.
Latency counts from the time at which a call is due, also if no client is free. The search ends at the first step above the
limit of p99, at BENCH_MAX_SANDBOXES, or before the sandboxes use BENCH_MAX_MIB.

MiB each is the decrease of the machine's available memory for each sandbox; other programs on the machine change it, too. PSS
is that of the sandbox's processes and of its containerd shim."""

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from django.db import connection

from tests.bench import table
from tests.bench.docker import leases as bench_leases
from tests.bench.footprint import read_sizes
from tests.bench.measure import Timing, list_process_tree, read_cpu_seconds
from tests.bench.server import ApiClient, call_engine, run_control_plane

MAX_SANDBOXES = int(os.environ.get("BENCH_MAX_SANDBOXES", "300"))
MAX_MIB = int(os.environ.get("BENCH_MAX_MIB", "4096"))
STEP_SECONDS = float(os.environ.get("BENCH_SECONDS", "30"))
STEP = 50  # sandboxes
PERIOD_SECONDS = 10.0  # between two execs of one sandbox
P99_LIMIT_SECONDS = 1.0
CLIENT_COUNT = 24  # the web process leaves a quarter of its threads to short requests
SANDBOXES_PER_AGENT = 10
OPERATION = "density: sandboxes at 0.1 execs a second each, p99 ≤ 1 s"


@dataclass(frozen=True)
class Step:
    """Result of one step. `mib` is the decrease of the machine's available memory for each sandbox."""

    count: int
    timing: Timing
    errors: int
    mib: float

    def is_within_limits(self) -> bool:
        return not self.errors and self.timing.p99 <= P99_LIMIT_SECONDS

    def print_line(self) -> None:
        milliseconds = [1e3 * seconds for seconds in (self.timing.p50, self.timing.p95, self.timing.p99)]
        numbers = [f"{number:.1f}" for number in (*milliseconds, self.mib, os.getloadavg()[0])]
        print_columns(str(self.count), str(len(self.timing.seconds)), str(self.errors), *numbers)


def print_columns(*cells: str) -> None:
    print("".join(f"{cell:>11}" for cell in cells), flush=True)


def main() -> None:
    dids = [f"did:web:bench-{number}.invalid" for number in range(MAX_SANDBOXES // SANDBOXES_PER_AGENT + 1)]
    print_columns("sandboxes", "calls", "errors", "p50 ms", "p95 ms", "p99 ms", "MiB each", "load")
    with run_control_plane(with_worker=True) as (up, port):
        key, leases, best = bench_leases.create_key(*dids), list[str](), None
        stopped = f"capped at {MAX_SANDBOXES} sandboxes"
        for step in iterate_steps(port, key, dids, leases, up.pid):
            step.print_line()
            if not step.is_within_limits():
                stopped = f"{step.errors} errors at {step.count}" if step.errors else f"p99 above the limit at {step.count}"
                break
            best = step
            if step.count < MAX_SANDBOXES and step.mib * (step.count + STEP) > MAX_MIB:
                stopped = f"capped at {MAX_MIB} MiB"
                break
        pss = measure_sandbox_pss(bench_leases.find_refs(leases[:SANDBOXES_PER_AGENT]))
    report(best, pss=pss, stopped=stopped)


def iterate_steps(port: int, key: str, dids: list[str], leases: list[str], up: int) -> Iterator[Step]:
    """Add sandboxes and measure the execs of all of them, up to MAX_SANDBOXES. The ids of new leases are added to `leases`."""
    available_mib = read_available_mib()
    for count in range(min(STEP, MAX_SANDBOXES), MAX_SANDBOXES + 1, STEP):
        environments = {f"density-{at}": dids[at // SANDBOXES_PER_AGENT] for at in range(len(leases), count)}
        leases += bench_leases.join_many(port, key, environments)
        timing, errors = measure_step(port, key, leases, up)
        yield Step(count, timing, errors, (available_mib - read_available_mib()) / count)


def measure_step(port: int, key: str, leases: list[str], up: int) -> tuple[Timing, int]:
    """Send the execs of STEP_SECONDS. Return their durations, and the number of calls that were refused."""
    period = PERIOD_SECONDS / len(leases)
    due = ((number * period, leases[number % len(leases)]) for number in range(int(STEP_SECONDS / period)))
    timing, lock, errors, pids = Timing("exec"), threading.Lock(), [0], list(bench_leases.list_server_pids(up))
    cpu, began = read_cpu_seconds(pids), time.perf_counter()

    def work(_: int) -> None:
        api = ApiClient(port, key)
        for at, lease in take(due, lock):
            time.sleep(max(began + at - time.perf_counter(), 0))
            try:
                api.post(f"/leases/{lease}/exec", {"argv": ["true"]})
            except (SystemExit, OSError, http.client.HTTPException):
                errors[0] += 1
                api = ApiClient(port, key)
            timing.seconds.append(time.perf_counter() - began - at)

    with ThreadPoolExecutor(CLIENT_COUNT) as threads:
        list(threads.map(work, range(CLIENT_COUNT)))
    timing.cpu = read_cpu_seconds(pids) - cpu
    return timing, errors[0]


def take(due: Iterator[tuple[float, str]], lock: threading.Lock) -> Iterator[tuple[float, str]]:
    """Take the next call that no other thread has taken, until there is none."""
    while True:
        with lock:
            call = next(due, None)
        if call is None:
            return
        yield call


def read_available_mib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/meminfo has no MemAvailable.")


def measure_sandbox_pss(refs: list[str]) -> float:
    """Return the mean PSS of a sandbox in MiB: its processes and the containerd shim that is their parent."""
    firsts = [json.loads(call_engine("GET", f"/containers/{ref}/json"))["State"]["Pid"] for ref in refs]
    shims = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in firsts]
    return sum(read_sizes(pid)["Pss"] for pid in list_process_tree(*shims)) / 1024 / len(refs)


def report(best: Step | None, *, pss: float, stopped: str) -> None:
    count = best.count if best else 0
    print(
        f"\n  {count} sandboxes ({stopped}); {pss:.1f} MiB PSS each, {best.mib if best else 0:.1f} MiB of the machine's memory"
    )
    if best:
        reached = f"{count} sandboxes ({stopped}), {pss:.1f} MiB PSS each"
        table.record(
            OPERATION, connection.display_name, best.timing, best.timing, aim="how many, and their memory", reached=reached
        )
