"""`make bench`: ours against the raw operation that it wraps, side by side in one run.

Ratios are what counts: the machine, its neighbours and its disk are in both sides. CPU is user and system time of the
server's processes and of PostgreSQL's, per call."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
CALLS = int(os.environ.get("BENCH_CALLS", "2000"))
EXECS = int(os.environ.get("BENCH_EXECS", "150"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def control_plane(database_url: str, here: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A migrated control plane of its own on a free port, web processes only."""
    os.environ |= {
        "LEASEHOLD_ENV_FILE": "",
        "SECRET_KEY": uuid.uuid4().hex,
        "DEBUG": "0",
        "DATABASE_URL": database_url,
        "LEASEHOLD_STATE_DIR": str(here / "state"),
        "LEASEHOLD_RUNTIME_DIR": str(here / "run"),
        "LEASEHOLD_CREATES_PER_MINUTE": "0",
        "LEASEHOLD_LOG_LEVEL": "WARNING",
        "LEASEHOLD_ALLOW_UNISOLATED": "1",
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
    }
    manage = [sys.executable, str(REPO / "manage.py")]
    subprocess.run([*manage, "migrate", "--verbosity", "0"], check=True)
    port = free_port()
    up = subprocess.Popen([*manage, "up", "--no-worker", "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port, up)
        yield up, port
    finally:
        up.terminate()
        up.wait(60)


def _wait_for(port: int, up: "subprocess.Popen[bytes]") -> None:
    import time

    for _ in range(300):
        if up.poll() is not None:
            raise SystemExit("The control plane did not start.")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("The control plane did not answer.")


class Api:
    """One kept-alive connection with one key."""

    def __init__(self, port: int, key: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self.connection.request("POST", f"/api/v1{path}", json.dumps(body) if body else None, self.headers)
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.status >= 400:
            raise SystemExit(f"{path}: {answer.status} {content[:300]!r}")
        return dict(json.loads(content))


def main() -> None:
    url = os.environ.get("TEST_POSTGRES_URL")
    here = Path(tempfile.mkdtemp(prefix="lh-bench-"))
    try:
        for database, name in [(url, "PostgreSQL")] * bool(url) + [(f"sqlite:///{here}/bench.sqlite3", "SQLite")]:
            assert database
            if name == "PostgreSQL":
                database = _own_database(database)
            # A process of its own each, since Django is set up once per process.
            subprocess.run([sys.executable, "-m", "tests.bench.cases", name, database, str(here / name)], check=True, cwd=REPO)
    finally:
        shutil.rmtree(here, ignore_errors=True)


def _own_database(server: str) -> str:
    import psycopg

    name = f"bench_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.rpartition("/")[0] + f"/{name}"


if __name__ == "__main__":
    main()
