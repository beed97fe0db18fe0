"""A burst of requests at a PostgreSQL server with few connections."""

import http.client
import json
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands.manage import run_manage
from tests.e2e.conftest import HEALTHY, Home
from tests.load.postgres import Postgres
from tests.support.servers.services import require_program
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.matrix("bounds and waits of the pool: tests/unit/sandboxes/db/test_postgresql_pool.py"),
]
MAX_CONNECTIONS, CALLERS, EXECS = 25, 30, 6
MAX_IDLE, IDLE_SECONDS = 15, 5.0  # after the burst; the processes of `up` use about ten at rest
MAX_PAUSE_SECONDS = 2.0  # of a client that is told to try again
TRIES = 40  # of a call that is refused for the moment
CLIENT_BACKENDS = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"


@pytest.fixture
def server() -> Iterator[Postgres]:
    require_program("postgres", "runuser")
    directory = Path(tempfile.mkdtemp(prefix="lh-small-postgres-"))
    directory.chmod(0o755)
    server = Postgres(directory / "cluster", max_connections=MAX_CONNECTIONS)
    server.create()
    try:
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(directory)


class Caller:
    """Client that repeats a refused call with the same idempotency key."""

    def __init__(self, home: Home, key: str) -> None:
        self.home, self.key, self.refusals = home, key, list[tuple[int, str]]()

    def post(self, path: str, body: dict[str, Any], idempotency_key: str) -> tuple[int, Any, str | None]:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        headers["Idempotency-Key"] = idempotency_key
        with closing(http.client.HTTPConnection("127.0.0.1", self.home.port, timeout=HEALTHY)) as connection:
            connection.request("POST", f"/api/v1/{path}", json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read()), response.headers["Retry-After"]

    def insist(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer of a call that succeeds in the end. Refusals must say that they are for the moment."""
        key = uuid.uuid4().hex
        for _ in range(TRIES):
            status, answer, retry_after = self.post(path, body, key)
            if status < 300:
                return answer
            self.refusals.append((status, answer["code"]))
            assert retry_after and status in (409, 429, 503), answer
            threading.Event().wait(min(float(retry_after), MAX_PAUSE_SECONDS))
        raise AssertionError(self.refusals)


def acquisition(number: int) -> dict[str, Any]:
    return {"agent_did": f"did:plc:a{number}", "environment_type": "catan", "environment_id": f"game-{number}"}


def test_burst_ends_with_few_connections_and_each_command_executed_once(server: Postgres, home: Home, tmp_path: Path) -> None:
    home.env |= {"DATABASE_URL": server.url}
    run_manage(home.path, "migrate", **home.env)
    home.up()
    key = json.loads(run_manage(home.path, "create_key", "--operator", "--json", **home.env).stdout)["key"]
    log = tmp_path / "executions"

    def call(number: int) -> Caller:
        caller = Caller(home, key)
        lease = caller.insist("leases", acquisition(number))["id"]
        for step in range(EXECS):
            script = f"echo {number}-{step} >> {log}; sleep 0.3"
            answer = caller.insist(f"leases/{lease}/exec", {"argv": ["sh", "-c", script]})
            assert answer["exit_code"] == 0, answer
        return caller

    with ThreadPoolExecutor(CALLERS) as threads:
        callers = list(threads.map(call, range(CALLERS)))
    expected = sorted(f"{number}-{step}" for number in range(CALLERS) for step in range(EXECS))
    assert sorted(log.read_text().split()) == expected
    with psycopg.connect(server.url, autocommit=True) as database:

        def count() -> int:
            return int(database.execute(f"SELECT count(*) {CLIENT_BACKENDS}").fetchone()[0])  # type: ignore[index]

        wait_until(lambda: count() <= MAX_IDLE, "idle connections are closed", within=IDLE_SECONDS)
    lease = callers[0].insist("leases", acquisition(0))["id"]
    for number in range(20):
        status, answer, _ = callers[0].post(f"leases/{lease}/exec", {"argv": ["true"]}, uuid.uuid4().hex)
        assert (number, status) == (number, 200), answer
