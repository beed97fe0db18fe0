"""Command line of the simulation."""

import argparse
import time

from tests.simulation.history import Report, run_history


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="first seed (default: 1)")
    parser.add_argument("--trace", action="store_true", help="print every event")
    options = parser.parse_args()
    began, failed = time.monotonic(), 0
    for seed in range(options.seed, options.seed + options.seeds):
        report = run_history(seed, print_events=options.trace)
        failed += bool(report.violations)
        print_report(report, verbose=options.seeds == 1)
    print(f"{options.seeds} seeds in {time.monotonic() - began:.1f} s, {failed} failed")
    return int(failed > 0)


def print_report(report: Report, *, verbose: bool) -> None:
    if verbose or report.violations:
        print(
            f"seed {report.seed}: {report.operations} operations, {report.events} events, {report.virtual_hours:.1f} h, "
            f"{report.seconds:.2f} s, trace {report.trace[:16]}"
        )
    for violation in report.violations[:5]:
        print(f"  {violation[:600]}")
