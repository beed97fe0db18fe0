"""Two hosts of one installation. The clock of one of them is set forward and back by an hour and a day under load."""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands.manage import MANAGE, build_environment, run_manage
from tests.e2e.conftest import HEALTHY, Home
from tests.e2e.test_small_postgres import Caller
from tests.load.clock import ShiftedClock
from tests.load.postgres import Postgres
from tests.load.system import stop_home
from tests.support.servers.receiver import run_receiver
from tests.support.servers.services import require_program
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.matrix("uses of the time: tests/races/test_clock_skew.py, tests/unit/controlplane/test_queue_cluster.py"),
]
SHIFTS = [timedelta(hours=1), timedelta(hours=-1), timedelta(days=1), timedelta(days=-1)]
PHASES = [each for shift in SHIFTS for each in (shift, timedelta(0))]
PHASE_SECONDS = 30.0
MIGRATION_SECONDS = 900  # on a busy machine
MAX_AGE_SECONDS = 180.0  # three intervals of a sweep
TTL_SECONDS, SLEEP_AFTER = 1800, "20m"  # less than the smallest shift
AGES = """
    SELECT name, host_id, extract(epoch FROM clock_timestamp() - succeeded_at) FROM sandboxes_sweep
    WHERE every = interval '1 minute' AND name NOT IN ('egress', 'watch')"""


class HostUnderLoad:
    """A host, a lease that is used all the time, and one that is idle."""

    def __init__(self, home: Home, key: str, number: int) -> None:
        self.home, self.caller = home, Caller(home, key)
        self.used, self.idle = (self._acquire(number + offset) for offset in (0, 1))
        self.results = list[Any]()

    def _acquire(self, number: int) -> str:
        body = {"agent_did": f"did:plc:a{number}", "environment_type": "catan", "environment_id": f"game-{number}"}
        times = {"ttl_seconds": TTL_SECONDS, "sleep_after": SLEEP_AFTER}
        lease = str(self.caller.insist("leases", body | times)["id"])
        self.caller.insist(f"leases/{lease}/exec", {"argv": ["true"]})
        return lease

    def work(self, stop: threading.Event) -> None:
        """Execute commands that last until the clock has been set in between."""
        while not stop.is_set():
            self.results.append(self.caller.insist(f"leases/{self.used}/exec", {"argv": ["sleep", "7"]}))


@pytest.fixture
def server() -> Iterator[Postgres]:
    require_program("postgres", "runuser")
    directory = Path(tempfile.mkdtemp(prefix="lh-two-clocks-"))
    directory.chmod(0o755)
    server = Postgres(directory / "cluster")
    server.create()
    try:
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(directory)


@pytest.fixture
def homes(server: Postgres, tmp_path: Path) -> Iterator[tuple[Home, Home, ShiftedClock]]:
    clock = ShiftedClock(tmp_path)
    homes = []
    for name, env in (("wrong", clock.env), ("right", {})):
        (tmp_path / name).mkdir()
        shared = {"DATABASE_URL": server.url, "LEASEHOLD_STORAGE_DIR": str(tmp_path / "store")}
        homes.append(Home(tmp_path / name, **shared, **env))
    try:
        yield homes[0], homes[1], clock
    finally:
        for home in homes:
            with suppress(FileNotFoundError):
                stop_home(home)


def test_nothing_ends_pauses_or_is_billed_because_one_of_two_hosts_has_a_wrong_clock(
    homes: tuple[Home, Home, ShiftedClock],
    server: Postgres,
) -> None:
    wrong, right, clock = homes
    migrate = [sys.executable, str(MANAGE), "migrate", "--verbosity", "0"]
    subprocess.run(migrate, env=build_environment(right.path, **right.env), check=True, timeout=MIGRATION_SECONDS)
    for home in (right, wrong):
        home.up()
    key = json.loads(run_manage(right.path, "create_key", "--operator", "--json", **right.env).stdout)["key"]
    began = time.time()
    hosts = [HostUnderLoad(wrong, key, 10), HostUnderLoad(right, key, 20)]
    stop, late = threading.Event(), dict[tuple[Any, ...], float]()
    with (
        run_receiver() as receiver,
        ThreadPoolExecutor(2) as threads,
        psycopg.connect(server.url, autocommit=True) as database,
    ):
        added = run_manage(right.path, "webhooks", "add", receiver.url, "--internal", "--kind", "lease.ended", **right.env)
        assert added.returncode == 0, added.stderr
        working = [threads.submit(host.work, stop) for host in hosts]
        try:
            count = 2 * len(database.execute("SELECT DISTINCT name FROM sandboxes_sweep WHERE host_id IS NOT NULL").fetchall())
            wait_until(lambda: len(database.execute(AGES).fetchall()) > count / 2, "the sweeps run", within=2 * HEALTHY)
            for number, shift in enumerate(PHASES):
                clock.set(shift)
                observe(hosts, shift, database, late)
                released = hosts[number % 2].caller
                ended = released.insist("leases", acquisition(number))["id"]
                released.insist(f"leases/{ended}/release", {})
        finally:
            stop.set()
        for each in working:
            each.result(timeout=HEALTHY)
        wait_until(
            lambda: len({one.headers["webhook-id"] for one in receiver.received}) == len(PHASES),
            "all events",
            within=HEALTHY,
        )
        assert not late
        assert [result["exit_code"] for host in hosts for result in host.results] == [0] * sum(
            len(host.results) for host in hosts
        )
        kept = [lease for host in hosts for lease in (host.used, host.idle)]
        rows = database.execute("SELECT status FROM leases_lease WHERE id = ANY(%s)", [[uuid.UUID(each) for each in kept]])
        assert [status for (status,) in rows] == ["active"] * 4
        ends = database.execute(
            "SELECT t.code FROM sandboxes_transition t JOIN sandboxes_sandbox s ON s.id = t.sandbox_id"
            " WHERE s.holder = ANY(%s) AND t.\"to\" IN ('evicting', 'cold', 'destroying', 'destroyed')",
            [[uuid.UUID(each) for each in kept]],
        )
        assert not ends.fetchall()
        assert not database.execute("SELECT id FROM sandboxes_run WHERE outcome <> 'ok' AND ended_at IS NOT NULL").fetchall()
        assert not database.execute(
            "SELECT id FROM sandboxes_run WHERE ended_at > clock_timestamp() + interval '2 s'"
        ).fetchall()
        for table, column in (
            ("sandboxes_transition", "at"),
            ("billing_usagerecord", "ended_at"),
            ("sandboxes_sweep", "started_at"),
        ):
            future = database.execute(f"SELECT id FROM {table} WHERE {column} > clock_timestamp() + interval '2 s'").fetchall()
            assert not future, table
        [(billed, sandboxes)] = database.execute(
            "SELECT coalesce(extract(epoch FROM sum(ended_at - began_at)), 0), count(DISTINCT sandbox_id)"
            " FROM billing_usagerecord WHERE item = 'time'"
        ).fetchall()
        assert 0 < billed <= sandboxes * (time.time() - began)
    assert not [line for home in (wrong, right) for line in home.read_log().splitlines() if "restarting" in line]


def acquisition(number: int) -> dict[str, Any]:
    return {"agent_did": f"did:plc:b{number}", "environment_type": "catan", "environment_id": f"short-{number}"}


def observe(
    hosts: list[HostUnderLoad], shift: timedelta, database: "psycopg.Connection[Any]", late: dict[tuple[Any, ...], float]
) -> None:
    """Check that the clock was set, and that each host reports its own. Note the sweeps that are late."""
    wrong = hosts[0]
    landed = 0
    ends_at = time.monotonic() + PHASE_SECONDS
    while time.monotonic() < ends_at:
        late |= {tuple(row): float(age) for *row, age in database.execute(AGES).fetchall() if float(age) > MAX_AGE_SECONDS}
        for host in hosts:
            status, report = host.home.get("/readyz")
            assert status == 200, report
            warned = any("clock" in warning for warning in report["warnings"])
            expected = shift.total_seconds() if host is wrong else 0.0
            is_known = abs(report["clock_skew_seconds"] - expected) < 2
            assert host is wrong or (is_known and not warned), report
            landed += is_known and host is wrong and warned is bool(shift)
        threading.Event().wait(2)
    assert landed, "the host whose clock was set does not report it"
