"""Deterministic simulation of hosts, processes and faults.

A seed that fails prints its violations and the command that replays it."""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice

from tests.simulation.history import Report, run_history
from tests.simulation.mutants import MUTANTS, run_mutant
from tests.simulation.world import close_providers
from tests.support.suites import TEST_PROVIDER

PROGRESS_INTERVAL_SECONDS = 30.0
SEEDS_PER_BATCH = 100
VARIABLE = f"LEASEHOLD_TEST_PROVIDER={TEST_PROVIDER} " if TEST_PROVIDER != "memory" else ""
REPLAY = VARIABLE + "python -m tests.simulation --seed {seed} --length {length} --trace"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1; 0: until interrupted)")
    parser.add_argument("--seed", type=int, default=1, help="first seed (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--length", type=int, default=0, help="operations of a history (default: 60 to 600, by seed)")
    parser.add_argument("--stop", action="store_true", help="stop after the first seed that fails")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--mutant", choices=[*MUTANTS], help="put a known fault back in a copy of the tree, and search it")
    options = parser.parse_args()
    if options.mutant:
        return run_mutant(options.mutant, seed=options.seed, seeds=options.seeds, jobs=options.jobs, length=options.length)
    try:
        return search(options)
    finally:
        close_providers()


def search(options: argparse.Namespace) -> int:
    """Run the seeds. Return 1 if a seed failed, else 0."""
    seeds, began, printed, done, failed, cpu = iter_seeds(options), time.monotonic(), time.monotonic(), 0, 0, 0.0
    try:
        for report in iter_reports(seeds, options):
            done, failed, cpu = done + 1, failed + bool(report.violations), cpu + report.cpu_seconds
            if report.violations or options.seeds == 1:
                print_report(report)
            if time.monotonic() - printed > PROGRESS_INTERVAL_SECONDS:
                printed = time.monotonic()
                print(describe_progress(done, failed, cpu, began), flush=True)
            if options.stop and report.violations:
                break
    except KeyboardInterrupt:
        print()
    print(describe_progress(done, failed, cpu, began), flush=True)
    return int(failed > 0)


def iter_seeds(options: argparse.Namespace) -> Iterator[int]:
    number = options.seed
    while not options.seeds or number < options.seed + options.seeds:
        yield number
        number += 1


def iter_reports(seeds: Iterator[int], options: argparse.Namespace) -> Iterator[Report]:
    """Yield the reports, in the order of the seeds, so that the first failure is the same with any number of processes."""
    if options.jobs == 1:
        for seed in seeds:
            yield run_history(seed, length=options.length, print_events=options.trace)
        return
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=50) as pool:
        while batch := [*islice(seeds, SEEDS_PER_BATCH)]:  # imap reads its argument ahead without a limit
            yield from pool.imap(partial(run_history, length=options.length), batch)


def describe_progress(done: int, failed: int, cpu: float, began: float) -> str:
    elapsed = time.monotonic() - began
    return (
        f"{done} seeds in {elapsed:.0f} s, {failed} failed; {done / max(elapsed, 0.001):.2f} seeds per second, "
        f"{cpu / max(done, 1):.2f} s of CPU per seed"
    )


def print_report(report: Report) -> None:
    print(
        f"seed {report.seed}: {report.operations} operations, {report.events} events, {report.virtual_hours:.1f} h, "
        f"{report.sleeps} sleeps (at most {report.max_sleeps} of a lease), "
        f"{report.kills} kills, {report.cpu_seconds:.2f} s, trace {report.trace[:16]}"
    )
    for violation in report.violations[:5]:
        print(f"  {violation[:600]}")
    if report.violations:
        print(f"  replay: {REPLAY.format(seed=report.seed, length=report.length)}", flush=True)
