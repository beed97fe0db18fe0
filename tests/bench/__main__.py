"""`make bench`: each operation against the raw operation that it wraps, interleaved in one run, and a table of the aims.

Only the ratios are comparable between machines. CPU is user and system time per call: of the server's and PostgreSQL's
processes, or of the measuring process. Each part runs in its own process with its own database, on SQLite and, if
TEST_POSTGRES_URL is set, on PostgreSQL.

These variables reduce the number of calls, rows or seconds: BENCH_CALLS, BENCH_SECONDS, BENCH_EXECS, BENCH_STARTS,
BENCH_ROUNDS, BENCH_ROWS, BENCH_SWEPT, BENCH_TURNS, BENCH_SLEEPS, BENCH_WORKSPACE_MB, BENCH_MODEL_CALLS, BENCH_BOXES,
BENCH_TRANSITIONS, BENCH_HISTORY_ROWS, BENCH_PENDING, BENCH_DAY, BENCH_USAGE and BENCH_GRANTS. BENCH_MAX_SANDBOXES and
BENCH_MAX_MIB limit the part density."""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

import psycopg

from tests.bench import table
from tests.bench.parts import DEFAULT_PARTS, PARTS, run_part


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {', '.join(DEFAULT_PARTS)}")
    parser.add_argument("--all", action="store_true", help=f"run all parts: {', '.join(PARTS)}")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):  # argparse would compare the empty list with its choices
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Parts: {', '.join(PARTS)}")
    parts = PARTS if options.all else options.parts or DEFAULT_PARTS
    server = os.environ.get("TEST_POSTGRES_URL")
    if not server:
        print("PostgreSQL skipped, TEST_POSTGRES_URL is not set", flush=True)
    with tempfile.TemporaryDirectory(prefix="lh-bench-") as directory:
        results = Path(directory) / "results.jsonl"
        os.environ[table.RESULTS_VARIABLE] = str(results)
        try:
            for part in parts:
                _run_part(part, server)
        finally:
            if rows := table.read_rows(results):
                print(f"\n===== aims, load {os.getloadavg()[0]:.1f} =====\n\n{table.format_table(rows)}", flush=True)


def _run_part(part: str, server: str | None) -> None:
    """Run one part on PostgreSQL, if there is a server, and on SQLite."""
    if server:
        database = f"bench_{uuid.uuid4().hex[:8]}"
        _execute(server, f"CREATE DATABASE {database}")
        try:
            _run_process(part, "PostgreSQL", f"{server.rpartition('/')[0]}/{database}")
        finally:
            _execute(server, f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
    _run_process(part, "SQLite")


def _execute(server: str, statement: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(statement)


def _run_process(part: str, name: str, database_url: str = "") -> None:
    """Run one part in a new process and state directory, by default on SQLite."""
    directory = Path(tempfile.mkdtemp(prefix="lh-bench-"))
    try:
        url = database_url or f"sqlite:///{directory}/bench.sqlite3"
        process = multiprocessing.get_context("spawn").Process(target=run_part, args=(part, name, url, directory))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{part} on {name} failed")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
