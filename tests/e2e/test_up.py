"""manage.py up with real processes: start, shutdown, killed and hanging children."""

import http.client
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.commands.manage import MANAGE, build_environment, get_runtime_dir, run_manage
from tests.support import ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
HEALTHY = 120.0  # seconds that a start can take on a busy machine
PROCESS_COUNTS = {"granian": 2, "qcluster": 5}  # processes per child, with one worker


class Home:
    """A control plane whose state is below one directory. Its processes have that directory in their environment."""

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
                [sys.executable, str(MANAGE), "up", "--port", str(self.port), *args],
                env=build_environment(self.path, **self.env), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.wait_for_line("up: ready\n", times=output.count("up: ready\n") + 1)
        return self.process

    def read_log(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for_line(self, text: str, times: int = 1) -> None:
        try:
            wait_until(lambda: self.read_log().count(text) >= times, text, within=HEALTHY)
        except AssertionError:
            raise AssertionError(f"not printed: {text!r}:\n{self.read_log()}") from None

    def get(self, path: str) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=HEALTHY)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def find_processes(self, *arguments: str) -> set[int]:
        """Process ids of this control plane whose command line contains all `arguments`."""
        pids = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                argv = Path(f"/proc/{name}/cmdline").read_text().split("\0")
                if f"LEASEHOLD_STATE_DIR={self.path / 'state'}".encode() in environ and set(arguments) <= set(argv):
                    pids.add(int(name))
        return pids

    def wait_for_child(self, program: str) -> set[int]:
        """Wait until all processes of a child exist and return their ids."""
        return wait_until(
            lambda: len(pids := self.find_processes(program)) == PROCESS_COUNTS[program] and pids, f"all of {program} exists"
        )

    def query_value(self, query: str) -> Any:
        """Return the first column of the first row, or None."""
        with closing(sqlite3.connect(self.path / "leasehold.sqlite3", timeout=20)) as database, database:
            row = database.execute(query).fetchone()
            return row[0] if row else None

    def acquire_lease(self) -> str:
        process = run_manage(
            self.path, "acquire", "--agent", "did:plc:ada", "--environment", "game-1", "--type", "catan", "--json"
        )
        return str(json.loads(process.stdout)["id"])

    def stop(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=HEALTHY)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    assert run_manage(tmp_path, "migrate").returncode == 0
    home = Home(tmp_path)
    yield home
    for pid in home.find_processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if home.process:
        home.process.wait(timeout=HEALTHY)
    shutil.rmtree(get_runtime_dir(tmp_path), ignore_errors=True)


def test_up_serves_until_sigterm_and_leaves_only_the_sandboxes(home: Home) -> None:
    home.up()
    assert home.get("/livez")[0] == 200
    assert home.get("/healthz")[0] == 200
    assert wait_until(lambda: home.get("/readyz")[0] == 200, "the queue has written its heartbeat")
    assert f"admin http://127.0.0.1:{home.port}/admin/" in home.read_log()
    assert "WARNING: PROCESS DOES NOT ISOLATE" in home.read_log()
    assert run_manage(home.path, "exec", home.acquire_lease(), "--", "true").returncode == 0
    assert home.stop(signal.SIGTERM) == 0
    assert home.find_processes() == set()
    assert home.query_value("SELECT state FROM sandboxes_sandbox") == "waiting"


def test_a_second_up_is_refused_and_does_not_disturb_the_first(home: Home) -> None:
    first = home.up()
    second = run_manage(home.path, "up", "--port", str(home.port))
    assert (second.returncode, second.stderr.count("\n")) == (1, 1)
    assert f"Another manage.py up is running on {home.path / 'state'} (pid {first.pid}, since " in second.stderr
    other = run_manage(home.path, "up", "--port", str(home.port), LEASEHOLD_STATE_DIR=str(home.path / "other"))
    assert (other.returncode, other.stderr.count("\n")) == (1, 1)
    assert f"Cannot listen on 127.0.0.1 port {home.port}" in other.stderr
    assert home.get("/healthz")[0] == 200


def test_without_migrations_the_error_names_the_command_to_run(home: Home) -> None:
    refused = run_manage(home.path, "up", DATABASE_URL=f"sqlite:///{home.path / 'empty.sqlite3'}")
    assert (refused.returncode, refused.stderr) == (
        1, "CommandError: Migrations are not applied: run manage.py migrate.\n",
    )  # fmt: skip


def test_without_isolation_and_without_debug_up_does_not_start(home: Home) -> None:
    refused = run_manage(home.path, "up", DEBUG="0", SANDBOX_PROVIDER="auto", DOCKER_HOST="unix:///nowhere.sock")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert refused.stderr.startswith("The process provider does not isolate")


def test_after_sigkill_no_process_survives_and_the_next_start_recovers_the_work(home: Home) -> None:
    first_up, lease = home.up(), home.acquire_lease()
    instance = json.loads((home.path / "state/up.json").read_text())["instance"]
    leftover = subprocess.Popen(  # stands for a web worker that the kernel did not kill with its parent
        [sys.executable, str(MANAGE), "exec", lease, "--timeout", "1h", "--", "sleep", "600"],
        env=build_environment(home.path, LEASEHOLD_INSTANCE=f"{instance}.web.1"),
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: home.query_value("SELECT outcome FROM sandboxes_run") == "open", "the run is open")
    first_up.kill()
    first_up.wait()
    wait_until(lambda: home.find_processes() <= {leftover.pid}, "web server and queue have ended")
    home.up()
    assert leftover.wait(timeout=HEALTHY) == -signal.SIGKILL
    assert "previous instance not stopped cleanly: 1 processes killed, 1 claims released" in home.read_log()
    wait_until(lambda: home.query_value("SELECT outcome FROM sandboxes_run") == "lost", "the run is closed")
    assert home.query_value("SELECT state FROM sandboxes_sandbox") == "waiting"
    assert run_manage(home.path, "exec", lease, "--", "true").returncode == 0


@pytest.mark.parametrize("program", PROCESS_COUNTS)
def test_a_killed_child_is_restarted_and_leaves_no_process(home: Home, program: str) -> None:
    up = home.up()
    before = home.wait_for_child(program)
    leaders = {pid for pid in before if os.getpgid(pid) == pid}
    assert len(leaders) == 1
    os.kill(leaders.pop(), signal.SIGKILL)
    home.wait_for_line("killed by SIGKILL; restarting in 1 s")
    assert not home.wait_for_child(program) & before
    home.wait_for_line("up: ready", times=2 if program == "granian" else 1)
    assert home.get("/healthz")[0] == 200
    assert up.poll() is None


def test_a_hanging_queue_is_killed_and_restarted(home: Home) -> None:
    home.up("--hung-after", "20s")  # must suffice for a start on a busy machine
    before = home.wait_for_child("qcluster")
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    home.wait_for_line("no heartbeat for 20 s; restarting in 1 s")
    assert not home.wait_for_child("qcluster") & before
    assert home.stop(signal.SIGTERM) == 0
    assert home.find_processes() == set()


def test_leave_nothing_destroys_every_sandbox_before_the_end(home: Home) -> None:
    home.up("--leave-nothing")
    assert run_manage(home.path, "exec", home.acquire_lease(), "--", "true").returncode == 0
    assert len(list((home.path / "state/process").glob("*/leasehold-*"))) == 1
    assert home.stop(signal.SIGINT) == 0
    assert home.read_log().endswith("up: 1 leases ended, 1 sandboxes destroyed, 0 left\n")
    assert not list((home.path / "state/process").glob("*/leasehold-*"))
    assert home.query_value("SELECT end_reason || status FROM leases_lease") == "operatordestroyed"
    assert home.find_processes() == set()
