"""Installation under measurement: a PostgreSQL cluster, and a control plane for each host."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.bench.measure import list_process_tree
from tests.commands.manage import MANAGE, build_environment
from tests.e2e.conftest import Home
from tests.load.postgres import Postgres
from tests.load.system import stop_home
from tests.scale.plan import Plan

CONNECTIONS_PER_HOST = 40  # at most: 7/4 x 8 threads of the web server, the queue, the egress server, and room
STARTED_AT_ONCE = 4  # control planes


class HostHome(Home):
    """Control plane that is a host of its own."""

    launcher = (sys.executable, str(Path(__file__).with_name("host.py")))

    def manage(self, *arguments: str) -> str:
        """Run a management command of this host. Return its output."""
        return subprocess.run(
            [*self.launcher, str(MANAGE), *arguments], env=build_environment(self.path, **self.env),
            capture_output=True, check=True, text=True, timeout=120,
        ).stdout  # fmt: skip


class Installation:
    """The running control planes and their database."""

    def __init__(self, postgres: Postgres, homes: list[HostHome]) -> None:
        self.postgres, self.homes = postgres, homes

    def list_host_pids(self) -> set[int]:
        return list_process_tree(*(home.process.pid for home in self.homes if home.process))

    def list_database_pids(self) -> set[int]:
        pid = int((self.postgres.directory / "data/postmaster.pid").read_text().split()[0])
        return list_process_tree(pid)

    def count_restarts(self) -> int:
        """Return how often `up` has started the processes of a host again."""
        return sum(home.read_log().count("; restarting in ") for home in self.homes)

    def select(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.postgres.url, connect_timeout=30) as connection:
            return connection.execute(query).fetchall()

    def create_operator_key(self) -> str:
        return str(json.loads(self.homes[0].manage("create_key", "--operator", "--json"))["key"])


@contextmanager
def run_installation(plan: Plan, directory: Path) -> Iterator[Installation]:
    """Start everything below `directory`. At the end, stop it."""
    postgres = Postgres(directory / "postgres", max_connections=plan.hosts * CONNECTIONS_PER_HOST + 50)
    homes: list[HostHome] = []
    try:
        postgres.create()
        homes += [_build_home(directory / f"host-{number}", postgres, plan) for number in range(plan.hosts)]
        installation = Installation(postgres, homes)
        homes[0].manage("migrate", "--verbosity", "0")
        with ThreadPoolExecutor(STARTED_AT_ONCE) as executor:
            list(executor.map(lambda home: home.up(), homes))
        [(registered,)] = installation.select("SELECT count(*) FROM sandboxes_host")
        assert registered == plan.hosts, f"{registered} hosts are registered"
        yield installation
    finally:
        for home in homes:
            stop_home(home)
        postgres.stop("immediate")


def _build_home(path: Path, postgres: Postgres, plan: Plan) -> HostHome:
    path.mkdir()
    return HostHome(
        path,
        DATABASE_URL=postgres.url,
        DEBUG="0",  # in debug mode each statement is formatted for the log
        ALLOWED_HOSTS="127.0.0.1",
        LEASEHOLD_ALLOW_UNISOLATED="1",
        LEASEHOLD_PROFILE="small",
        SANDBOX_PROVIDER="memory",
        LEASEHOLD_WEB_THREADS="8",
        LEASEHOLD_QUEUE_WORKERS="1",
        LEASEHOLD_STORAGE_DIR=str(path.parent / "store"),
        LEASEHOLD_MAX_SANDBOXES=str(plan.sandboxes),  # the capacity follows new hosts after minutes only
        LEASEHOLD_IDLE_TIMEOUT="1m",
        LEASEHOLD_CREATES_PER_MINUTE="1000000",  # one key creates all leases
    )
