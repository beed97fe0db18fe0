"""Control planes as separate processes."""

import http.client
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.conf import settings

from tests.commands.manage import MANAGE, build_environment, get_runtime_dir, run_manage
from tests.support.database import build_database_url, connect_to_server, copy_postgres_template, get_sqlite_template
from tests.support.servers import ports
from tests.support.waiting import wait_until

HEALTHY = 120.0  # seconds that a start can take on a busy machine
CHILDREN = ("web", "queue")


class Home:
    """A control plane whose state is below one directory. Its processes have that directory in their environment."""

    launcher: tuple[str, ...] = (sys.executable,)

    def __init__(self, path: Path, **env: str) -> None:
        self.path, self.env = path, env
        self.log = path / "up.log"
        [self.port] = ports.find_free_ports()
        self.process: subprocess.Popen[bytes] | None = None

    def up(self, *args: str) -> "subprocess.Popen[bytes]":
        """Start `manage.py up` and return once it prints "ready"."""
        output = self.read_log()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.launcher, str(MANAGE), "up", "--port", str(self.port), *args],
                env=build_environment(self.path, **self.env), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.wait_for_line("up: ready\n", times=output.count("up: ready\n") + 1)
        return self.process

    def read_log(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for_line(self, text: str, times: int = 1) -> None:
        """Wait until `up` has printed this text. Fails with its output, at once if `up` has ended before."""
        try:
            wait_until(lambda: self._has_ended() or self.read_log().count(text) >= times, text, within=HEALTHY)
            assert self.read_log().count(text) >= times
        except AssertionError:
            status = self.process.poll() if self.process else None
            raise AssertionError(f"not printed: {text!r}, exit status {status}:\n{self.read_log()}") from None

    def _has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def get(self, path: str) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=HEALTHY)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def find_processes(self, child: str = "") -> set[int]:
        """Process ids of this control plane, or of one child of `up`."""
        pids = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                instance = next((entry.decode() for entry in environ if entry.startswith(b"LEASEHOLD_INSTANCE=")), "")
                is_own = f"LEASEHOLD_STATE_DIR={self.path / 'state'}".encode() in environ
                if is_own and (not child or instance.split(".")[1:2] == [child]):
                    pids.add(int(name))
        return pids

    def wait_for_child(self, child: str, other_than: Collection[int] = ()) -> int:
        """Wait until the process of a child exists, which is none of `other_than`, and return its id."""
        return wait_until(lambda: next(iter(self.find_processes(child) - set(other_than)), 0), f"{child} runs")

    def query_value(self, query: str) -> Any:
        """Return the first column of the first row, or None."""
        row = next(iter(self.execute(query)), None)
        return row[0] if row else None

    def execute(self, statement: str) -> list[Any]:
        """Execute a statement in a transaction of its own, and return its rows."""
        with closing(sqlite3.connect(self.path / "leasehold.sqlite3", timeout=20)) as database, database:
            return database.execute(statement).fetchall()

    def acquire_lease(self) -> str:
        argv = ("acquire", "--agent", "did:plc:ada", "--environment", "game-1", "--type", "catan", "--json")
        return str(json.loads(run_manage(self.path, *argv).stdout)["id"])

    def stop(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=HEALTHY)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    shutil.copyfile(get_sqlite_template(), tmp_path / "leasehold.sqlite3")
    home = Home(tmp_path)
    yield home
    for pid in home.find_processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if home.process:
        home.process.wait(timeout=HEALTHY)
    shutil.rmtree(get_runtime_dir(tmp_path), ignore_errors=True)


class FleetTemplate(NamedTuple):
    """A migrated database with an operator's key, copied for each fleet."""

    database: str  # name on the PostgreSQL server, or path of a SQLite file
    key: str


@contextmanager
def drop_at_exit(name: str) -> Iterator[str]:
    """Yield the URL of the PostgreSQL database `name`, which the caller creates, and drop the database."""
    try:
        yield build_database_url(name)
    finally:
        execute_on_server(f"DROP DATABASE {name} WITH (FORCE)")


def execute_on_server(statement: str) -> None:
    with connect_to_server() as server:
        server.execute(statement)


@pytest.fixture(scope="session")
def fleet_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetTemplate]:
    path = tmp_path_factory.mktemp("fleet-template")
    with ExitStack() as stack:
        database = str(path / "leasehold.sqlite3")
        url = f"sqlite:///{database}"
        if settings.ON_POSTGRES:
            database = f"kill_{uuid.uuid4().hex[:12]}"
            copy_postgres_template(database)
            url = stack.enter_context(drop_at_exit(database))
        else:
            shutil.copyfile(get_sqlite_template(), database)
        process = run_manage(path, "create_key", "--operator", "--json", DATABASE_URL=url)
        yield FleetTemplate(database, json.loads(process.stdout)["key"])
