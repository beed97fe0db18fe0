"""A game of Catan that its server drives by signed events alone, with a control plane that is killed in a turn.

Each action becomes a record in the repository of its agent, on an emulated server."""

import base64
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from controlplane.games import catan
from controlplane.games.catan import COLORS
from controlplane.games.client import Client, post_condition
from sandboxes.webhooks import signatures
from tests.commands.manage import run_manage
from tests.e2e.disturbances import PATIENCE_SECONDS, Disturbances
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.emulators.pds import CUT_AFTER_CREATE, CUT_BEFORE_CREATE, DidDocuments, Pds, serve
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker, pytest.mark.matrix("game of a minute; test_catan.py plays it by turns")]
AGENTS = ("did:plc:red", "did:plc:blue")
ENVIRONMENT, COLLECTION = "catan-events", "org.example.catan.action"


class GameServer:
    """Signs and sends events. `runs` are the queued runs by agent and number."""

    def __init__(self, fleet: Fleet) -> None:  # noqa: F811
        status, document = fleet.post(f"/environments/{ENVIRONMENT}/secrets")
        assert status == 201, document
        self.fleet = fleet
        self.secret = base64.b64decode(document["secret"].removeprefix(signatures.SECRET_PREFIX))
        self.runs: dict[tuple[str, int], str] = {}

    def send(self, agent: str, number: int, state: dict[str, Any]) -> bool:
        """Send one event. Return whether it was accepted; a repeated one must name the same run."""
        event = {"type": "turn", "agent_did": agent, "turn_number": number, "state": state}
        body, message_id, timestamp = json.dumps(event).encode(), f"{agent}-{number}", str(int(time.time()))
        headers = {
            "Content-Type": "application/json", "webhook-id": message_id, "webhook-timestamp": timestamp,
            "webhook-signature": signatures.sign(self.secret, message_id, timestamp, body),
        }  # fmt: skip
        with suppress(OSError, http.client.HTTPException):
            with closing(http.client.HTTPConnection("127.0.0.1", self.fleet.port, timeout=60)) as connection:
                connection.request("POST", f"/api/v1/environments/{ENVIRONMENT}/events", body, headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
            assert response.status == 202, answer
            assert self.runs.setdefault((agent, number), answer["queued_run_id"]) == answer["queued_run_id"]
            return True
        return False


@pytest.fixture
def pds() -> Iterator[Pds]:
    with serve(Pds(DidDocuments(), now=lambda: datetime.now(UTC))) as pds:
        pds.passwords = dict.fromkeys(AGENTS, "password-of-the-account")
        yield pds


RECORD_TURNS = """
import sys
from django.utils import timezone
from leases.atproto import accounts
from leases.models import EnvironmentType
from sandboxes.models import Policy
policy = Policy.objects.create(name="recorded", record_collections=["{collection}"])
EnvironmentType.objects.filter(name="catan").update(policy=policy, turn_collection="{collection}")
for agent, password in {passwords}.items():
    accounts.set_account(agent, service_url="{url}", password=password, now=timezone.now())
"""


def record_turns(fleet: Fleet, pds: Pds) -> None:  # noqa: F811
    """Let each action become a record in the repository of its agent. Some answers of the repository's server are lost."""
    pds.faults = [CUT_AFTER_CREATE, 503, CUT_BEFORE_CREATE]
    script = RECORD_TURNS.format(collection=COLLECTION, passwords=pds.passwords, url=pds.url)
    process = run_manage(fleet.path, "shell", "-c", script, **fleet.env)
    assert process.returncode == 0, process.stderr


@dataclass
class EventSeat(catan.Seat):
    """Seat whose turns are signed events. Their results are polled."""

    server: GameServer | None = None

    def _request_turn(self, body: dict[str, Any]) -> dict[str, Any]:
        server, number = self.server, body["turn_number"]
        assert server is not None
        wait_until(lambda: server.send(self.did, number, body["state"]), "the event is accepted", within=PATIENCE_SECONDS)

        def find_result() -> dict[str, Any] | None:
            run = self.client.call("GET", f"/runs/queued/{server.runs[self.did, number]}")
            return run if run["ended_at"] else None

        run = wait_until(find_result, "the turn has a result", within=PATIENCE_SECONDS)
        assert (run["state"], run["skipped"]) == ("completed", False), run
        return {**run, "duration_seconds": 0.0}


def test_catan_is_played_by_events_alone_through_a_kill(fleet: Fleet, pds: Pds) -> None:  # noqa: F811
    fleet.up()
    record_turns(fleet, pds)
    host = Client(f"http://127.0.0.1:{fleet.port}", fleet.key, PATIENCE_SECONDS)
    seats = [EventSeat(did, host, color=color) for did, color in zip(AGENTS, COLORS, strict=False)]
    for seat in seats:
        seat.join(ENVIRONMENT, "catan")
    server = GameServer(fleet)
    for seat in seats:
        seat.server = server
    disturbances = Disturbances(fleet, seats, host, plan={5: "kill_control_plane"})
    states: dict[tuple[str, int], Mapping[str, Any]] = {}

    def note_move(move: catan.Move) -> None:
        states[move.seat.did, move.number] = move.state
        disturbances.note_move()

    winner = catan.play(list(seats), ENVIRONMENT, points=3, seed=7, on_move=note_move)
    disturbances.finish()
    assert winner in seats
    for seat in seats:
        assert seat.skipped == 0
        assert disturbances.read_played_turns(seat) == list(range(1, seat.turns + 1))
    assert disturbances.moves == sum(seat.turns for seat in seats) == len(server.runs) > 5
    assert fleet.select("SELECT count(*) FROM leases_turn WHERE NOT skipped") == [(disturbances.moves,)]
    runs = dict(server.runs)
    for (agent, number), state in states.items():  # a server without a memory sends all events again
        assert server.send(agent, number, dict(state))
    assert server.runs == runs

    assert len(post_condition(host, ENVIRONMENT, catan.CONDITION)) == len(seats)
    fleet.update("UPDATE leases_atprotorecord SET next_attempt_at = '2020-01-01 00:00:00+00:00' WHERE status = 'pending'")
    wait_until(lambda: fleet.sweep() or not fleet.list_containers(), "every sandbox is destroyed", within=90.0, every=0.5)
    assert fleet.select("SELECT DISTINCT status, error FROM leases_atprotorecord") == [("created", "")]
    assert sorted((agent, value["turn"]) for (agent, _, _), value in pds.records.items()) == sorted(states)
    assert all("type" in value["action"] for value in pds.records.values())
