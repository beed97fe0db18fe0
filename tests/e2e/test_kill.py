"""SIGKILL of the control plane on the Docker Engine: no leaked container, no lost lease, recovery by the next start."""

import http.client
import json
import os
import shutil
import signal
import sqlite3
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
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
from tests.conftest import DOCKER_IMAGE
from tests.e2e.conftest import HEALTHY, FleetTemplate, Home, drop_at_exit, execute_on_server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
JOIN_COUNT, CONTAINERS_AT_KILL = 24, 10  # with four threads per web process, some have completed by then and others repeat


class Fleet(Home):
    """A control plane with the docker provider, and with PostgreSQL if the tests use it."""

    key = ""

    def sweep(self) -> None:
        process = run_manage(self.path, "sweep", **self.env)
        assert process.returncode == 0, process.stdout + process.stderr

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        return self.request("POST", path, body or {})

    def request(self, method: str, path: str, content: dict[str, Any] | bytes | None = None) -> tuple[int, dict[str, Any]]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            is_json = isinstance(content, dict)
            headers = {"Authorization": f"Bearer {self.key}"} | ({"Content-Type": "application/json"} if is_json else {})
            connection.request(method, f"/api/v1{path}", json.dumps(content) if is_json else content, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"{}")

    def join(self, number: int) -> str | None:
        """Join an environment. Return the lease id, or None if the request got no response."""
        body = {"agent_did": f"did:plc:a{number}", "environment_type": "coding"}

        def post_unless_too_many() -> tuple[int, dict[str, Any]] | None:
            status, response_body = self.post(f"/environments/e{number}/join", body)
            return None if (status, response_body.get("code")) == (503, "server_busy") else (status, response_body)

        try:
            status, response_body = wait_until(post_unless_too_many, "the join is admitted", within=HEALTHY, every=2.0)
        except (OSError, http.client.HTTPException):
            return None
        assert status in (200, 201), response_body
        return str(response_body["id"])

    def select(self, query: str) -> list[tuple[Any, ...]]:
        url = self.env["DATABASE_URL"]
        if url.startswith("postgres"):
            with psycopg.connect(url) as database:
                return database.execute(query).fetchall()
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=20)) as database:
            return database.execute(query).fetchall()

    def update(self, statement: str) -> None:
        url = self.env["DATABASE_URL"]
        if url.startswith("postgres"):
            with psycopg.connect(url) as database:
                database.execute(statement)
        else:
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=20)) as database, database:
                database.execute(statement)

    def select_ids(self, query: str) -> set[str]:
        return {str(uuid.UUID(str(row[0]))) for row in self.select(query)}

    def find_expected_containers(self) -> dict[str, str]:
        """State of each sandbox that must have a container, by container name."""
        return dict(self.select("SELECT ref, state FROM sandboxes_sandbox WHERE state NOT IN ('cold', 'destroyed')"))

    def list_containers(self) -> dict[str, bool]:
        """Running state of each container of the default pool, by name."""
        (owner,) = self.select_ids("SELECT owner FROM sandboxes_pool WHERE name = 'default'")
        return {container.name: container.running for container in providers.get_provider("docker").list(owner)}

    def list_proxy_states(self) -> list[str]:
        """States of the containers of the egress proxy."""
        label = f"{DIRECTORY_LABEL}={get_runtime_dir(self.path) / 'egress'}"
        return [container["State"] for container in Engine().client.containers(all=True, filters={"label": label})]

    def kill(self) -> None:
        """Send SIGKILL to the process group of `up` and wait until all its processes have ended."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=HEALTHY)
        wait_until(lambda: not self.find_processes(), "all its processes have ended")

    def remove(self) -> None:
        """Kill all processes, and remove all containers and the runtime directory."""
        for pid in self.find_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process:
            self.process.wait(timeout=HEALTHY)
        for name in self.list_containers():
            providers.get_provider("docker").destroy(name)
        with override_settings(EGRESS_DIR=get_runtime_dir(self.path) / "egress"):
            NginxProxy(Engine()).stop()
        shutil.rmtree(get_runtime_dir(self.path), ignore_errors=True)


@contextmanager
def copy_database(path: Path, template: FleetTemplate) -> Iterator[str]:
    """Yield the URL of a copy of the template's database: a file below `path`, or a database that is dropped at the end."""
    if settings.ON_POSTGRES:
        name = f"kill_{uuid.uuid4().hex[:12]}"
        execute_on_server(f"CREATE DATABASE {name} TEMPLATE {template.database}")
        with drop_at_exit(name) as url:
            yield url
    else:
        shutil.copy(template.database, path)
        yield f"sqlite:///{path / 'leasehold.sqlite3'}"


@contextmanager
def create_fleet(path: Path, template: FleetTemplate) -> Iterator[Fleet]:
    """Yield a fleet that has not been started, with its own database, and remove it."""
    with copy_database(path, template) as url:
        fleet = Fleet(
            path,
            DATABASE_URL=url,
            SANDBOX_PROVIDER="docker",
            LEASEHOLD_SANDBOX_MEMORY_MIB="128",
            LEASEHOLD_WEB_THREADS="4",
            LEASEHOLD_SANDBOX_IMAGE=DOCKER_IMAGE,
        )
        fleet.key = template.key
        fleet.update(f"UPDATE sandboxes_pool SET owner = '{uuid.uuid4().hex}'")  # each installation lists its own containers
        yield fleet
        fleet.remove()


@pytest.fixture
def fleet(tmp_path: Path, docker_ready: None, fleet_template: FleetTemplate) -> Iterator[Fleet]:
    with create_fleet(tmp_path, fleet_template) as fleet:
        yield fleet


def test_a_kill_during_concurrent_joins_leaks_no_container_and_loses_no_lease(fleet: Fleet) -> None:
    """At the kill, another lease executes a command."""
    fleet.up()
    busy = fleet.join(JOIN_COUNT)
    assert busy
    script = "echo begun; until [ -e go ]; do sleep 0.1; done; echo finished; exit 3"
    with ThreadPoolExecutor(JOIN_COUNT + 1) as executor:
        body = {"argv": ["sh", "-c", script], "timeout_seconds": 900}
        interrupted: Future[Any] = executor.submit(fleet.post, f"/leases/{busy}/exec", body)
        open_runs = "SELECT count(*) FROM sandboxes_run WHERE outcome = 'open'"
        wait_until(lambda: fleet.select(open_runs) == [(1,)], "the run is open")
        joins = [executor.submit(fleet.join, number) for number in range(JOIN_COUNT)]
        wait_until(lambda: len(fleet.list_containers()) >= CONTAINERS_AT_KILL, f"{CONTAINERS_AT_KILL} containers", within=120)
        fleet.kill()
    assert isinstance(interrupted.exception(), OSError | http.client.HTTPException)
    answered = {busy} | {lease for join in joins if (lease := join.result())}
    states_at_kill = [*fleet.find_expected_containers().values()]
    assert states_at_kill.count("running") == 1

    assert fleet.list_proxy_states() == ["running"]  # it survives the kill and is replaced by the next start
    fleet.up()
    settled = {"warm", "waiting", "running"}  # the worker of the new start recovers rows as well
    wait_until(lambda: fleet.sweep() or {*fleet.find_expected_containers().values()} <= settled, "all is recovered", within=120)
    assert fleet.list_proxy_states() == ["running"]
    expected, actual = fleet.find_expected_containers(), fleet.list_containers()
    orphans, lost = set(actual) - set(expected), set(expected) - set(actual)
    print(
        f"\n{len(answered)} of {JOIN_COUNT + 1} joins completed; {states_at_kill.count('warming')} rows warming at the kill; "
        f"after the recovery {len(actual)} containers, {len(orphans)} orphans, {len(lost)} rows without one"
    )
    assert (orphans, lost) == (set(), set())
    assert all(actual.values())
    active = fleet.select_ids("SELECT id FROM leases_lease WHERE status = 'active'")
    held = fleet.select_ids("SELECT holder FROM sandboxes_sandbox WHERE state <> 'destroyed'")
    assert answered <= held <= active  # a completed join has a sandbox; an interrupted one can be repeated

    # The interrupted command has gone on, and its result is recorded although the process that waited for it is dead.
    assert fleet.select(open_runs) == [(1,)]
    assert fleet.post(f"/leases/{busy}/exec", {"argv": ["touch", "go"]})[0] == 200
    wait_until(lambda: fleet.sweep() or fleet.select(open_runs) == [(0,)], "the run is closed")
    interrupted_run = "SELECT outcome, exit_code, stdout FROM sandboxes_run WHERE exit_code <> 0"
    [(outcome, exit_code, stdout)] = fleet.select(interrupted_run)
    assert (outcome, exit_code, bytes(stdout)) == ("failed", 3, b"begun\nfinished\n")

    unanswered = [number for number, join in enumerate(joins) if join.result() is None]
    assert all(fleet.join(number) for number in unanswered[:3])
    count = len(fleet.select_ids("SELECT id FROM leases_lease"))
    assert count <= JOIN_COUNT + 1  # a repeated join returns an existing lease
    for lease in sorted(answered)[:3]:
        assert fleet.post(f"/leases/{lease}/exec", {"argv": ["cat", "config.json"]})[1]["exit_code"] == 0

    for lease in fleet.select_ids("SELECT id FROM leases_lease WHERE status = 'active'"):
        assert fleet.post(f"/leases/{lease}/release")[0] == 200
    wait_until(lambda: fleet.sweep() or not fleet.list_containers(), "every container is gone", within=120)
    assert fleet.select("SELECT count(*) FROM sandboxes_sandbox WHERE state <> 'destroyed'") == [(0,)]
    assert fleet.select("SELECT used FROM sandboxes_pool WHERE name = 'default'") == [(0,)]
    assert fleet.stop(signal.SIGTERM) == 0
    assert fleet.list_proxy_states() == []
