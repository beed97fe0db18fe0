"""Games that their server drives by signed events alone, with a control plane that is killed in the middle.

In one of them each action becomes a record in the repository of its agent, on an emulated server."""

import base64
import http.client
import json
import time
from collections.abc import Iterator
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
from tests.e2e.conftest import HEALTHY
from tests.e2e.disturbances import PATIENCE_SECONDS, Disturbances
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.emulators.pds import CUT_AFTER_CREATE, CUT_BEFORE_CREATE, DidDocuments, Pds, serve
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
AGENTS, ROUNDS = ("did:plc:red", "did:plc:blue"), 4
COLLECTION = "org.example.duel.action"
# Appends its turn to a file in /data, waits in one of the turns for a file, and prints what it has played so far.
TURN = """import json, os, sys, time
state = json.load(sys.stdin)
with open("/data/played", "a") as file:
    file.write(f"{state['n']}\\n")
while state["wait"] and not os.path.exists("/tmp/go"):
    time.sleep(0.1)
print(json.dumps({"action": "count", "n": state["n"], "played": open("/data/played").read().split()}))
"""


class GameServer:
    """Sends each event until it is accepted, and repeats all of them after a restart, as a server without a memory would."""

    def __init__(self, fleet: Fleet, environment: str) -> None:  # noqa: F811
        status, document = fleet.post(f"/environments/{environment}/secrets")
        assert status == 201, document
        secret = document["secret"]
        self.fleet, self.environment = fleet, environment
        self.secret = base64.b64decode(secret.removeprefix(signatures.SECRET_PREFIX))
        self.runs: dict[tuple[str, int], str] = {}

    def send(self, agent: str, number: int, *, wait: bool = False) -> bool:
        return self.send_state(agent, number, {"n": number, "wait": wait})

    def send_state(self, agent: str, number: int, state: dict[str, Any]) -> bool:
        """Send one event. Return whether it was accepted; a repeated one must name the same run."""
        event = {"type": "turn", "agent_did": agent, "turn_number": number, "state": state}
        body, message_id, timestamp = json.dumps(event).encode(), f"{agent}-{number}", str(int(time.time()))
        headers = {
            "Content-Type": "application/json", "webhook-id": message_id, "webhook-timestamp": timestamp,
            "webhook-signature": signatures.sign(self.secret, message_id, timestamp, body),
        }  # fmt: skip
        with suppress(OSError, http.client.HTTPException):
            with closing(http.client.HTTPConnection("127.0.0.1", self.fleet.port, timeout=60)) as connection:
                connection.request("POST", f"/api/v1/environments/{self.environment}/events", body, headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
            assert response.status == 202, answer
            assert self.runs.setdefault((agent, number), answer["queued_run_id"]) == answer["queued_run_id"]
            return True
        return False

    def find_result(self, agent: str, number: int) -> dict[str, Any]:
        return self.fleet.request("GET", f"/runs/queued/{self.runs[agent, number]}")[1]


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
EnvironmentType.objects.filter(name="coding").update(policy=policy, turn_collection="{collection}", turn_argv={argv})
for agent, password in {passwords}.items():
    accounts.set_account(agent, service_url="{url}", password=password, now=timezone.now())
"""


def configure(fleet: Fleet, pds: Pds) -> None:  # noqa: F811
    """Set the command of turns, and let each action become a record in the repository of its agent."""
    script = RECORD_TURNS.format(collection=COLLECTION, argv=["python3", "-c", TURN], passwords=pds.passwords, url=pds.url)
    process = run_manage(fleet.path, "shell", "-c", script, **fleet.env)
    assert process.returncode == 0, process.stderr


def test_game_of_signed_events_is_played_once_across_a_kill(fleet: Fleet, pds: Pds) -> None:  # noqa: F811
    fleet.up()
    configure(fleet, pds)
    pds.faults = [CUT_AFTER_CREATE, 503, CUT_BEFORE_CREATE]
    leases = {}
    for agent in AGENTS:
        status, lease = fleet.post("/environments/duel/join", {"agent_did": agent, "environment_type": "coding"})
        assert status == 201, lease
        leases[agent] = lease["id"]
    server = GameServer(fleet, "duel")
    events = [(agent, number) for number in range(1, ROUNDS + 1) for agent in AGENTS]
    waiting = (AGENTS[0], 2)  # in progress when the control plane is killed; later turns of this agent are queued

    for agent, number in events[: len(events) // 2 + 1]:
        assert server.send(agent, number, wait=(agent, number) == waiting)
    in_progress = "SELECT count(*) FROM leases_turn WHERE number = 2 AND ended_at IS NULL"
    wait_until(lambda: fleet.select(in_progress) == [(1,)], "the waiting turn is in progress", within=HEALTHY)
    other = [(AGENTS[1], 1), (AGENTS[1], 2)]
    wait_until(lambda: all(server.find_result(*event)["ended_at"] for event in other), "the other agent plays on", within=90.0)
    fleet.kill()
    assert not server.send(*events[-1])
    fleet.up()
    for agent, number in events:
        wait_until(lambda: server.send(agent, number, wait=(agent, number) == waiting), "the event is accepted", within=60.0)  # noqa: B023
    assert fleet.post(f"/leases/{leases[AGENTS[0]]}/exec", {"argv": ["touch", "/tmp/go"]})[0] == 200

    def have_ended() -> bool:
        fleet.sweep()
        return all(server.find_result(*event)["ended_at"] for event in events)

    wait_until(have_ended, "every turn has its result", within=180.0, every=1.0)
    for agent, number in events:
        row = server.find_result(agent, number)
        assert (row["state"], row["skipped"]) == ("completed", False), row
        assert row["action"] == {"action": "count", "n": number, "played": [str(n) for n in range(1, number + 1)]}
    assert fleet.select("SELECT count(*) FROM leases_turn") == [(len(events),)]

    status, ended = fleet.post("/environments/duel/end", {"outcome": "draw"})
    assert (status, sorted(ended["ended"])) == (200, sorted(leases.values()))
    document = fleet.request("GET", "/environments/duel")[1]
    assert (document["outcome"], [row["turns"] for row in document["members"]]) == ("draw", [ROUNDS, ROUNDS])
    wait_until(lambda: fleet.sweep() or not fleet.list_containers(), "every sandbox is destroyed", within=90.0)

    fleet.update("UPDATE leases_atprotorecord SET next_attempt_at = '2020-01-01 00:00:00+00:00' WHERE status = 'pending'")
    fleet.sweep()
    assert fleet.select("SELECT DISTINCT status, error FROM leases_atprotorecord") == [("created", "")]
    recorded = sorted((agent, value["turn"], value["action"]["n"]) for (agent, _, _), value in pds.records.items())
    assert recorded == sorted((agent, number, number) for agent, number in events)


@dataclass
class EventSeat(catan.Seat):
    """Seat whose turns are signed events. Their results are polled."""

    server: GameServer | None = None

    def _request_turn(self, body: dict[str, Any]) -> dict[str, Any]:
        server, number = self.server, body["turn_number"]
        assert server is not None
        wait_until(lambda: server.send_state(self.did, number, body["state"]), "the event is accepted", within=PATIENCE_SECONDS)

        def find_result() -> dict[str, Any] | None:
            run = self.client.call("GET", f"/runs/queued/{server.runs[self.did, number]}")
            return run if run["ended_at"] else None

        run = wait_until(find_result, "the turn has a result", within=PATIENCE_SECONDS)
        assert (run["state"], run["skipped"]) == ("completed", False), run
        return {**run, "duration_seconds": 0.0}


def test_catan_is_played_by_events_alone_through_a_kill(fleet: Fleet) -> None:  # noqa: F811
    fleet.up()
    host = Client(f"http://127.0.0.1:{fleet.port}", fleet.key, PATIENCE_SECONDS)
    seats = [EventSeat(did, host, color=color) for did, color in zip(AGENTS, COLORS, strict=False)]
    for seat in seats:
        seat.join("catan-events", "catan")
    server = GameServer(fleet, "catan-events")
    for seat in seats:
        seat.server = server
    disturbances = Disturbances(fleet, seats, host, plan={5: "kill_control_plane"})
    winner = catan.play(list(seats), "catan-events", points=3, seed=7, on_move=lambda move: disturbances.note_move())
    disturbances.finish()
    assert winner in seats
    for seat in seats:
        assert seat.skipped == 0
        assert disturbances.read_played_turns(seat) == list(range(1, seat.turns + 1))
    assert disturbances.moves == sum(seat.turns for seat in seats) == len(server.runs) > 5
    assert fleet.select("SELECT count(*) FROM leases_turn WHERE NOT skipped") == [(disturbances.moves,)]
    assert len(post_condition(host, "catan-events", catan.CONDITION)) == len(seats)
    wait_until(lambda: not fleet.list_containers(), "every sandbox is destroyed", within=90.0, every=0.5)
