"""kill -9 in the middle of it, on the real engine: nothing leaks, nothing is lost, and the next start goes on."""

import http.client
import json
import os
import shutil
import signal
import sqlite3
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.test import override_settings

from sandboxes import providers
from sandboxes.egress.nginx import DIRECTORY_LABEL, NginxProxy
from sandboxes.providers.docker.engine import Engine
from tests.commands.manage import get_runtime_dir, run_manage
from tests.e2e.test_up import HEALTHY, Home
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
JOINS, AT_KILL = 50, 15  # with four threads a web process, some joins are answered by then, and some wait


class Fleet(Home):
    """A control plane on the real engine, and on PostgreSQL where the tests are."""

    key = ""

    def sweep(self) -> None:
        done = run_manage(self.path, "sweep", **self.env)
        assert done.returncode == 0, done.stdout + done.stderr

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
            connection.request("POST", f"/api/v1{path}", json.dumps(body or {}), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def join(self, number: int) -> str | None:
        """Join an environment; the lease, or None if no answer came."""
        try:
            status, said = self.post(
                f"/environments/e{number}/join", {"agent_did": f"did:plc:a{number}", "environment_type": "coding"}
            )
        except (OSError, http.client.HTTPException):
            return None
        assert status in (200, 201), said
        return str(said["id"])

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        url = self.env["DATABASE_URL"]
        if url.startswith("postgres"):
            with psycopg.connect(url) as database:
                return database.execute(query).fetchall()
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=20)) as found:
            return found.execute(query).fetchall()

    def ids(self, query: str) -> set[str]:
        return {str(uuid.UUID(str(row[0]))) for row in self.rows(query)}

    def wanted(self) -> dict[str, str]:
        """State of each sandbox that should have a container, by the container's name."""
        found = self.rows("SELECT id, incarnation, state FROM sandboxes_sandbox WHERE state NOT IN ('cold', 'destroyed')")
        return {f"leasehold-{uuid.UUID(str(pk)).hex}-{incarnation}": state for pk, incarnation, state in found}

    def listed(self) -> dict[str, bool]:
        """Whether it runs, by the name of each container of ours."""
        (owner,) = self.ids("SELECT owner FROM sandboxes_pool WHERE name = 'default'")
        return {found.name: found.running for found in providers.get_provider("docker").list(owner)}

    def proxies(self) -> list[str]:
        """The containers in front of its way out, and their states."""
        label = f"{DIRECTORY_LABEL}={get_runtime_dir(self.path) / 'egress'}"
        return [each["State"] for each in Engine().client.containers(all=True, filters={"label": label})]

    def kill(self) -> None:
        """SIGKILL to `up`, group and all; what it had started goes with it."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=HEALTHY)
        wait_until(lambda: not self.processes(), "nothing of it lives")


@pytest.fixture
def fleet(tmp_path: Path, docker_ready: None) -> Iterator[Fleet]:
    url, own = f"sqlite:///{tmp_path / 'leasehold.sqlite3'}", f"kill_{uuid.uuid4().hex[:12]}"
    if settings.ON_POSTGRES:
        url = f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{own}"
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as database:
            database.execute(f"CREATE DATABASE {own}")
    fleet = Fleet(
        tmp_path, DATABASE_URL=url, SANDBOX_PROVIDER="docker", LEASEHOLD_SANDBOX_MEMORY_MIB="128", LEASEHOLD_WEB_THREADS="4"
    )
    assert run_manage(tmp_path, "migrate", **fleet.env).returncode == 0
    fleet.key = json.loads(run_manage(tmp_path, "create_key", "--operator", "--json", **fleet.env).stdout)["key"]
    yield fleet
    for pid in fleet.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if fleet.process:
        fleet.process.wait(timeout=HEALTHY)
    for name in fleet.listed():
        providers.get_provider("docker").destroy(name)
    with override_settings(EGRESS_DIR=get_runtime_dir(tmp_path) / "egress"):
        NginxProxy(Engine()).stop()
    shutil.rmtree(get_runtime_dir(tmp_path), ignore_errors=True)
    if settings.ON_POSTGRES:
        with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as database:
            database.execute(f"DROP DATABASE {own} WITH (FORCE)")


def test_killed_among_fifty_joins_it_leaks_no_container_and_loses_no_lease(fleet: Fleet) -> None:
    fleet.up()
    with ThreadPoolExecutor(JOINS) as crowd:
        joins = [crowd.submit(fleet.join, number) for number in range(JOINS)]
        wait_until(lambda: len(fleet.listed()) >= AT_KILL, f"{AT_KILL} containers", within=120)
        fleet.kill()
    answered = {lease for join in joins if (lease := join.result())}
    at_kill, in_flight = len(fleet.listed()), list(fleet.wanted().values()).count("warming")

    assert fleet.proxies() == ["running"]  # it outlives whoever was to stop it, and is replaced
    fleet.up()
    fleet.sweep()
    fleet.sweep()
    assert fleet.proxies() == ["running"]
    wanted, listed = fleet.wanted(), fleet.listed()
    orphans, lost = set(listed) - set(wanted), set(wanted) - set(listed)
    print(
        f"\n{len(answered)} of {JOINS} joins answered; at the kill {at_kill} containers and {in_flight} rows warming; "
        f"after restart and two sweeps {len(listed)} containers, {len(orphans)} orphans, {len(lost)} rows without one"
    )
    assert (orphans, lost) == (set(), set())
    assert all(listed.values())
    assert set(wanted.values()) <= {"warm", "waiting"}
    active = fleet.ids("SELECT id FROM leases_lease WHERE status = 'active'")
    held = fleet.ids("SELECT holder FROM sandboxes_sandbox WHERE state <> 'destroyed'")
    assert answered <= held <= active  # whoever was answered has a sandbox; whoever was not may simply ask again

    unanswered = [number for number, join in enumerate(joins) if join.result() is None]
    assert all(fleet.join(number) for number in unanswered[:3])
    assert len(fleet.ids("SELECT id FROM leases_lease")) <= JOINS  # the same lease, where there was one
    for lease in sorted(answered)[:3]:
        assert fleet.post(f"/leases/{lease}/exec", {"argv": ["cat", "config.json"]})[1]["exit_code"] == 0

    for lease in fleet.ids("SELECT id FROM leases_lease WHERE status = 'active'"):
        assert fleet.post(f"/leases/{lease}/release")[0] == 200
    wait_until(lambda: fleet.sweep() or not fleet.listed(), "every container is gone", within=120)
    assert fleet.rows("SELECT count(*) FROM sandboxes_sandbox WHERE state <> 'destroyed'") == [(0,)]
    assert fleet.rows("SELECT used FROM sandboxes_pool WHERE name = 'default'") == [(0,)]
    assert fleet.end(signal.SIGTERM) == 0
    assert fleet.proxies() == []


def test_killed_during_an_exec_the_run_is_lost_and_the_sandbox_usable(fleet: Fleet) -> None:
    fleet.up()
    lease = fleet.join(1)
    nap = f"600.{uuid.uuid4().int % 10**9}"
    with ThreadPoolExecutor(1) as crowd:
        long: Future[Any] = crowd.submit(fleet.post, f"/leases/{lease}/exec", {"argv": ["sleep", nap], "timeout_seconds": 900})
        wait_until(lambda: fleet.rows("SELECT count(*) FROM sandboxes_run WHERE outcome = 'open'") == [(1,)], "the run is open")
        fleet.kill()
        assert isinstance(long.exception(timeout=HEALTHY), OSError | http.client.HTTPException)
    assert list(fleet.wanted().values()) == ["running"]

    fleet.up()
    fleet.sweep()
    assert fleet.rows("SELECT outcome, exit_code FROM sandboxes_run WHERE kind = 'exec'") == [("lost", None)]
    assert list(fleet.wanted().values()) == ["waiting"]
    look = f"grep -lsaz '[{nap[0]}]{nap[1:]}' /proc/[0-9]*/cmdline"
    status, said = fleet.post(f"/leases/{lease}/exec", {"argv": ["sh", "-c", look]})
    assert (status, said["stdout"]) == (200, "")  # what it had left running was killed
