"""A web server whose sandboxes execute commands that do not end."""

import http.client
import json
import threading
from contextlib import closing, suppress
from typing import Any

import pytest

from tests.commands.manage import run_manage
from tests.e2e.conftest import HEALTHY, Home
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
THREADS, LONG_CALLS = 4, 3
SHORT_SECONDS = 10.0  # a short call takes milliseconds; the commands take an hour


@pytest.fixture
def key(home: Home) -> str:
    home.env |= {"LEASEHOLD_WEB_THREADS": str(THREADS), "LEASEHOLD_WEB_WORKERS": "1"}
    created = run_manage(home.path, "create_key", "--operator", "--json", **home.env)
    home.up("--no-worker")
    return str(json.loads(created.stdout)["key"])


def call(home: Home, key: str, method: str, path: str, body: Any = None, timeout: float = HEALTHY) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", home.port, timeout=timeout)) as connection:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, dict(response.headers) | json.loads(response.read() or b"{}")


@pytest.fixture
def hanging(home: Home, key: str) -> list[str]:
    """Leases of different agents, as many as threads. The commands of all but one hang; the last one's has no thread."""
    leases = []
    for number in range(THREADS):
        body = {"agent_did": f"did:plc:a{number}", "environment_type": "catan"}
        status, lease = call(home, key, "POST", "/api/v1/environments/game/join", body)
        assert status in (200, 201), lease
        leases.append(lease["id"])

    def hang(lease: str) -> None:
        with suppress(OSError, http.client.HTTPException):  # the server is killed at the end of the test
            call(home, key, "POST", f"/api/v1/leases/{lease}/exec", {"argv": ["sleep", "3600"], "timeout_seconds": 3600})

    for lease in leases[:LONG_CALLS]:
        threading.Thread(target=hang, args=[lease], daemon=True).start()
    open_runs = "SELECT count(*) FROM sandboxes_run WHERE ended_at IS NULL AND kind = 'exec'"
    wait_until(lambda: home.query_value(open_runs) == LONG_CALLS, "all commands run")
    return leases


def test_short_calls_are_answered_while_commands_hang_and_a_further_command_is_refused(
    home: Home, key: str, hanging: list[str]
) -> None:
    last = hanging[-1]

    hang = {"argv": ["sleep", "3600"], "timeout_seconds": 3600}
    status, answer = call(home, key, "POST", f"/api/v1/leases/{last}/exec", hang, timeout=SHORT_SECONDS)
    assert (status, answer["code"], int(answer["retry-after"]) > 0) == (503, "server_busy", True)
    for method, path in [
        ("POST", f"/api/v1/leases/{last}/renew"), ("POST", f"/api/v1/leases/{hanging[0]}/renew"),
        ("GET", "/healthz"), ("GET", f"/api/v1/leases/{last}"),
    ]:  # fmt: skip
        assert call(home, key, method, path, timeout=SHORT_SECONDS)[0] == 200, path
    assert call(home, key, "POST", f"/api/v1/leases/{hanging[0]}/release", timeout=SHORT_SECONDS)[0] == 200
