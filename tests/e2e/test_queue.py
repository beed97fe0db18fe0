"""Queued runs in real containers, with control planes that are killed."""

import http.client
import os
import signal
from contextlib import suppress
from typing import Any

import pytest

from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
# Counts its executions, and ends once a file exists.
WAITING = "echo x >> executions; until [ -e /tmp/go ]; do sleep 0.1; done; echo done"


def enqueue(fleet: Fleet, argv: list[str], **fields: Any) -> str:  # noqa: F811
    body = {"agent_did": "did:plc:a0", "argv": argv, "queued": True, "limits": {"timeout_seconds": 600}} | fields
    status, row = fleet.post("/runs", body)
    assert status == 202, row
    return str(row["queued_run_id"])


def get(fleet: Fleet, pk: str) -> dict[str, Any]:  # noqa: F811
    return fleet.request("GET", f"/runs/queued/{pk}")[1]


def wait_for_state(fleet: Fleet, pk: str, *states: str) -> dict[str, Any]:  # noqa: F811
    wait_until(lambda: get(fleet, pk)["state"] in states, f"the run is {states}", within=90.0, every=0.2)
    return get(fleet, pk)


def execute(fleet: Fleet, lease: str, *argv: str) -> str:  # noqa: F811
    status, answer = fleet.post(f"/leases/{lease}/exec", {"argv": list(argv)})
    assert (status, answer["exit_code"]) == (200, 0), answer
    return str(answer["stdout"])


def test_run_goes_on_while_the_control_plane_is_killed_and_is_executed_once(fleet: Fleet) -> None:  # noqa: F811
    fleet.up()
    lease = fleet.join(0)
    assert lease
    pk = enqueue(fleet, ["sh", "-c", WAITING], lease_id=lease)
    wait_for_state(fleet, pk, "started")
    wait_until(lambda: execute(fleet, lease, "sh", "-c", "cat executions 2>/dev/null || true") == "x\n", "the command runs")
    fleet.kill()
    fleet.up()
    assert get(fleet, pk)["state"] == "started"
    execute(fleet, lease, "touch", "/tmp/go")

    def has_ended() -> bool:
        fleet.sweep()  # closes the Run whose process was killed; otherwise within a minute
        return bool(get(fleet, pk)["ended_at"])

    wait_until(has_ended, "the run has ended", within=90.0, every=1.0)
    row = get(fleet, pk)
    assert (row["state"], row["attempt"], row["exit_code"], row["stdout"]) == ("completed", 1, 0, "done\n"), row
    assert execute(fleet, lease, "cat", "executions") == "x\n"


def test_started_run_is_interrupted_and_runs_without_a_lease_leave_no_container(fleet: Fleet) -> None:  # noqa: F811
    fleet.up()
    lease = fleet.join(0)
    assert lease
    pk = enqueue(fleet, ["sleep", "600"], lease_id=lease)
    wait_for_state(fleet, pk, "started")
    wait_until(
        lambda: get(fleet, pk)["run_id"] and fleet.select("SELECT id FROM sandboxes_run WHERE outcome = 'open'"), "it runs"
    )
    assert fleet.post(f"/runs/queued/{pk}/interrupt")[0] == 200
    assert wait_for_state(fleet, pk, "interrupted", "failed")["state"] == "interrupted"
    several = [enqueue(fleet, ["sh", "-c", f"exit {number}"]) for number in range(3)]
    codes = [wait_for_state(fleet, each, "completed", "failed")["exit_code"] for each in several]
    assert codes == [0, 1, 2]
    wait_until(lambda: len(fleet.list_containers()) == 1, "only the sandbox of the lease is left", within=60.0)


# Prints four messages, and waits for a file before each but the first.
AGENT = """echo x >> executions
for i in 1 2 3 4; do
    [ $i = 1 ] || until [ -e /tmp/message$i ]; do sleep 0.05; done
    echo '{"type": "assistant", "turn_id": "t'$i'", "text": "message '$i'"}'
done
echo '{"type": "result", "text": "done"}'"""


def read_chat(fleet: Fleet, lease: str) -> list[str]:  # noqa: F811
    events = fleet.request("GET", f"/leases/{lease}/chat?order=oldest&limit=100")[1]["results"]
    contents = [event["message"]["content"] for event in events if event["message"]["role"] == "assistant"]
    return [content["text"] for content in contents]


@pytest.mark.matrix("more than a minute; the simulation kills the runners and recorders of agent runs")
def test_queued_agent_run_survives_kills_of_gateway_and_runner_between_its_messages(fleet: Fleet) -> None:  # noqa: F811
    fleet.up()
    lease = fleet.join(0)
    assert lease
    body = {"cli": "program", "argv": ["sh", "-c", AGENT], "prompt": "x", "queued": True, "timeout_seconds": 600}
    status, row = fleet.post(f"/leases/{lease}/agent-runs", body)
    assert status == 202, row
    pk = str(row["queued_run_id"])
    wait_until(lambda: read_chat(fleet, lease) == ["message 1"], "the first message is recorded", within=60.0)
    gateway = fleet.wait_for_child("egress")
    os.kill(gateway, signal.SIGKILL)
    fleet.wait_for_child("egress", [gateway])
    execute(fleet, lease, "touch", "/tmp/message2")
    wait_until(lambda: read_chat(fleet, lease) == ["message 1", "message 2"], "the second message is recorded", within=60.0)
    for pid in fleet.find_processes("web") | fleet.find_processes("web1"):
        os.kill(pid, signal.SIGKILL)  # with the runner and the recorder

    def print_message(number: int) -> bool:
        with suppress(OSError, http.client.HTTPException, KeyError):
            return execute(fleet, lease, "touch", f"/tmp/message{number}") == ""
        return False

    wait_until(lambda: print_message(3), "the web server is restarted", within=60.0)
    fleet.kill()
    fleet.up()
    wait_until(lambda: print_message(4), "the control plane is restarted", within=60.0)

    def has_ended() -> bool:
        fleet.sweep()
        return bool(get(fleet, pk)["ended_at"])

    wait_until(has_ended, "the run has ended", within=120.0, every=1.0)
    row = get(fleet, pk)
    assert (row["state"], row["attempt"], row["exit_code"]) == ("completed", 1, 0), row

    def is_recorded() -> bool:
        fleet.sweep()
        return bool(fleet.request("GET", f"/leases/{lease}/agent-runs/{row['run_id']}")[1]["ended_at"])

    wait_until(is_recorded, "the agent run is recorded", within=120.0, every=1.0)
    agent_run = fleet.request("GET", f"/leases/{lease}/agent-runs/{row['run_id']}")[1]
    assert (agent_run["state"], agent_run["result"], agent_run["lost_bytes"]) == ("completed", "done", 0)
    assert read_chat(fleet, lease) == [f"message {number}" for number in (1, 2, 3, 4)]
    assert execute(fleet, lease, "cat", "executions") == "x\n"
