"""manage.py up for real: its processes, what kills them, and what is left then."""

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
HEALTHY = 120.0  # seconds that a start may take on a machine that has other things to do
MANY = {"granian": 2, "qcluster": 5}  # processes of each of its children, with one worker


class Home:
    """One control plane below one directory: its processes are those that have the directory in their environment."""

    def __init__(self, path: Path, **env: str) -> None:
        self.path, self.env = path, env
        self.log = path / "up.log"
        [self.port] = ports.find_free_ports()
        self.process: subprocess.Popen[bytes] | None = None

    def up(self, *args: str) -> "subprocess.Popen[bytes]":
        """Start it, and return when it says that it is ready."""
        said = self.said()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(MANAGE), "up", "--port", str(self.port), *args],
                env=build_environment(self.path, **self.env), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.says("up: ready\n", times=said.count("up: ready\n") + 1)
        return self.process

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def says(self, text: str, times: int = 1) -> None:
        try:
            wait_until(lambda: self.said().count(text) >= times, text, within=HEALTHY)
        except AssertionError:
            raise AssertionError(f"it never said {text!r}:\n{self.said()}") from None

    def get(self, path: str) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=HEALTHY)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def processes(self, *words: str) -> set[int]:
        """Its processes whose command line has all these words."""
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                argv = Path(f"/proc/{name}/cmdline").read_text().split("\0")
                if f"LEASEHOLD_STATE_DIR={self.path / 'state'}".encode() in environ and set(words) <= set(argv):
                    found.add(int(name))
        return found

    def whole(self, word: str) -> set[int]:
        """The processes of one of its children, once all are there."""
        return wait_until(lambda: len(found := self.processes(word)) == MANY[word] and found, f"all of {word} is there")

    def ask(self, query: str) -> Any:
        """The first value of the first row."""
        with closing(sqlite3.connect(self.path / "leasehold.sqlite3", timeout=20)) as database, database:
            row = database.execute(query).fetchone()
            return row[0] if row else None

    def lease(self) -> str:
        done = run_manage(
            self.path, "acquire", "--agent", "did:plc:ada", "--environment", "game-1", "--type", "catan", "--json"
        )
        return str(json.loads(done.stdout)["id"])

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=HEALTHY)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    assert run_manage(tmp_path, "migrate").returncode == 0
    home = Home(tmp_path)
    yield home
    for pid in home.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if home.process:
        home.process.wait(timeout=HEALTHY)
    shutil.rmtree(get_runtime_dir(tmp_path), ignore_errors=True)


def test_it_serves_until_sigterm_and_leaves_no_process_but_the_sandboxes(home: Home) -> None:
    home.up()
    assert home.get("/livez")[0] == 200
    assert home.get("/healthz")[0] == 200
    assert wait_until(lambda: home.get("/readyz")[0] == 200, "the queue gives its heartbeat")
    assert f"admin http://127.0.0.1:{home.port}/admin/" in home.said()
    assert "WARNING: PROCESS DOES NOT ISOLATE" in home.said()
    assert run_manage(home.path, "exec", home.lease(), "--", "true").returncode == 0
    assert home.end(signal.SIGTERM) == 0
    assert home.processes() == set()
    assert home.ask("SELECT state FROM sandboxes_sandbox") == "waiting"


def test_a_second_one_is_refused_and_harms_nothing(home: Home) -> None:
    first = home.up()
    second = run_manage(home.path, "up", "--port", str(home.port))
    assert (second.returncode, second.stderr.count("\n")) == (1, 1)
    assert f"Another manage.py up is running on {home.path / 'state'} (pid {first.pid}, since " in second.stderr
    elsewhere = run_manage(home.path, "up", "--port", str(home.port), LEASEHOLD_STATE_DIR=str(home.path / "other"))
    assert (elsewhere.returncode, elsewhere.stderr.count("\n")) == (1, 1)
    assert f"Cannot listen on 127.0.0.1 port {home.port}" in elsewhere.stderr
    assert home.get("/healthz")[0] == 200


def test_without_migrations_it_says_what_to_run(home: Home) -> None:
    refused = run_manage(home.path, "up", DATABASE_URL=f"sqlite:///{home.path / 'empty.sqlite3'}")
    assert (refused.returncode, refused.stderr) == (
        1, "CommandError: Migrations are not applied: run manage.py migrate.\n",
    )  # fmt: skip


def test_without_a_provider_that_isolates_and_without_debug_it_does_not_start(home: Home) -> None:
    refused = run_manage(home.path, "up", DEBUG="0", SANDBOX_PROVIDER="auto", DOCKER_HOST="unix:///nowhere.sock")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert refused.stderr.startswith("The process provider does not isolate")


def test_after_sigkill_nothing_of_it_lives_and_the_next_start_takes_over_what_it_was_at(home: Home) -> None:
    dead, lease = home.up(), home.lease()
    instance = json.loads((home.path / "state/up.json").read_text())["instance"]
    leftover = subprocess.Popen(  # what a web worker would be that the kernel did not kill with its parent
        [sys.executable, str(MANAGE), "exec", lease, "--timeout", "1h", "--", "sleep", "600"],
        env=build_environment(home.path, LEASEHOLD_INSTANCE=f"{instance}.web.1"),
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: home.ask("SELECT outcome FROM sandboxes_run") == "open", "the run is open")
    dead.kill()
    dead.wait()
    wait_until(lambda: home.processes() <= {leftover.pid}, "web server and queue die with it")
    home.up()
    assert leftover.wait(timeout=HEALTHY) == -signal.SIGKILL
    assert "previous instance not stopped cleanly: 1 processes killed, 1 claims released" in home.said()
    wait_until(lambda: home.ask("SELECT outcome FROM sandboxes_run") == "lost", "the run is closed")
    assert home.ask("SELECT state FROM sandboxes_sandbox") == "waiting"
    assert run_manage(home.path, "exec", lease, "--", "true").returncode == 0


@pytest.mark.parametrize("word", MANY)
def test_what_is_killed_is_started_again_and_of_the_dead_nothing_is_left(home: Home, word: str) -> None:
    up = home.up()
    before = home.whole(word)
    leaders = {pid for pid in before if os.getpgid(pid) == pid}
    assert len(leaders) == 1
    os.kill(leaders.pop(), signal.SIGKILL)
    home.says("killed by SIGKILL; restarting in 1 s")
    assert not home.whole(word) & before
    home.says("up: ready", times=2 if word == "granian" else 1)
    assert home.get("/healthz")[0] == 200
    assert up.poll() is None


def test_a_queue_that_hangs_is_killed_and_started_again(home: Home) -> None:
    home.up("--hung-after", "20s")  # in which it has to be there, also on a busy machine
    before = home.whole("qcluster")
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    home.says("no heartbeat for 20 s; restarting in 1 s")
    assert not home.whole("qcluster") & before
    assert home.end(signal.SIGTERM) == 0
    assert home.processes() == set()


def test_leave_nothing_destroys_every_sandbox_before_it_ends(home: Home) -> None:
    home.up("--leave-nothing")
    assert run_manage(home.path, "exec", home.lease(), "--", "true").returncode == 0
    assert len(list((home.path / "state/process").glob("*/leasehold-*"))) == 1
    assert home.end(signal.SIGINT) == 0
    assert home.said().endswith("up: 1 leases ended, 1 sandboxes destroyed, 0 left\n")
    assert not list((home.path / "state/process").glob("*/leasehold-*"))
    assert home.ask("SELECT end_reason || status FROM leases_lease") == "operatordestroyed"
    assert home.processes() == set()
