"""`make bench`: each operation against the raw operation that it wraps, interleaved in one run.

Only the ratios are comparable between machines. CPU is user and system time per call of the server's and PostgreSQL's
processes. Each part runs in its own process with its own database; arguments select parts.

These variables reduce the number of calls, rows or seconds: BENCH_CALLS, BENCH_SECONDS, BENCH_EXECS, BENCH_STARTS,
BENCH_ROUNDS, BENCH_ROWS, BENCH_SWEPT, BENCH_TURNS, BENCH_SLEEPS, BENCH_WORKSPACE_MB, BENCH_MODEL_CALLS, BENCH_BOXES,
BENCH_READINGS, BENCH_TRANSITIONS, BENCH_USAGE and BENCH_GRANTS."""

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psycopg

REPO = Path(__file__).resolve().parents[2]
BENCH_MODULES = tuple(f"tests.bench.{name}" for name in ("cases", "pool", "places", "egress", "state", "metering", "spending"))


def main() -> None:
    server = os.environ.get("TEST_POSTGRES_URL")
    parts = sys.argv[1:] or BENCH_MODULES
    for part in parts:
        for name in ("PostgreSQL", "SQLite"):
            if name == "PostgreSQL" and not server:
                print(f"{part}: PostgreSQL skipped, TEST_POSTGRES_URL is not set")
                continue
            directory = Path(tempfile.mkdtemp(prefix="lh-bench-"))
            database = f"bench_{uuid.uuid4().hex[:8]}"
            try:
                url = f"sqlite:///{directory}/bench.sqlite3"
                if name == "PostgreSQL":
                    assert server
                    _execute(server, f"CREATE DATABASE {database}")
                    url = f"{server.rpartition('/')[0]}/{database}"
                subprocess.run([sys.executable, "-m", part, name, url, str(directory)], check=True, cwd=REPO)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
                if name == "PostgreSQL" and server:
                    _execute(server, f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")


def _execute(server: str, statement: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(statement)


if __name__ == "__main__":
    main()
