"""`make bench`: ours against the raw operation that it wraps, side by side in one run.

Ratios are what counts: the machine, its neighbours and its disk are in both sides. CPU is user and system time of the
server's processes and of PostgreSQL's, per call. Each part is a process of its own with a database of its own; arguments
name the parts to run. BENCH_CALLS, BENCH_SECONDS, BENCH_EXECS, BENCH_STARTS, BENCH_ROUNDS, BENCH_ROWS, BENCH_SWEPT,
BENCH_TURNS, BENCH_SLEEPS, BENCH_WORKSPACE_MB, BENCH_MODEL_CALLS, BENCH_BOXES, BENCH_READINGS, BENCH_TRANSITIONS, BENCH_USAGE
and BENCH_GRANTS make it shorter."""

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
    wanted = sys.argv[1:] or BENCH_MODULES
    for part in wanted:
        for name in ("PostgreSQL", "SQLite"):
            if name == "PostgreSQL" and not server:
                print(f"{part}: PostgreSQL left out, since TEST_POSTGRES_URL is not set")
                continue
            here = Path(tempfile.mkdtemp(prefix="lh-bench-"))
            own = f"bench_{uuid.uuid4().hex[:8]}"
            try:
                url = f"sqlite:///{here}/bench.sqlite3"
                if name == "PostgreSQL":
                    assert server
                    _execute(server, f"CREATE DATABASE {own}")
                    url = f"{server.rpartition('/')[0]}/{own}"
                subprocess.run([sys.executable, "-m", part, name, url, str(here)], check=True, cwd=REPO)
            finally:
                shutil.rmtree(here, ignore_errors=True)
                if name == "PostgreSQL" and server:
                    _execute(server, f"DROP DATABASE IF EXISTS {own} WITH (FORCE)")


def _execute(server: str, statement: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(statement)


if __name__ == "__main__":
    main()
