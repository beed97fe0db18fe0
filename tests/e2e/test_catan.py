"""A game of Catan between agents in Docker sandboxes, through sleeps and kills to its end."""

import subprocess
import threading
from decimal import Decimal
from typing import Any

import pytest

from controlplane.games import catan
from controlplane.games.catan import COLORS, Client, Move, Seat
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
ENVIRONMENT = "catan-kills"
PATIENCE_SECONDS = 240.0
AWAKE = "state IN ('warm', 'waiting')"
HELD = "state NOT IN ('destroying', 'destroyed')"
STATES = f"SELECT DISTINCT state FROM sandboxes_sandbox WHERE {HELD}"
# Policy of an agent that waits in its turn while its workspace has the file `hold`. It plays as the shipped policy does.
WAITING_POLICY = """
import pathlib, time
from skill.shipped import *
from skill import shipped
def choose_action(state):
    hold = pathlib.Path("/workspace/hold")
    while hold.exists():
        pathlib.Path("/workspace/waits").touch()
        time.sleep(0.05)
    with open("/data/played", "a") as played:
        played.write(f"{state['turn_number']}\\n")
    return shipped.choose_action(state)
"""


class Game:
    """Seats of two agents, and disturbances between and during their moves."""

    def __init__(self, fleet: Fleet) -> None:  # noqa: F811
        self.fleet = fleet
        base = f"http://127.0.0.1:{fleet.port}"
        self.host = Client(base, fleet.key, PATIENCE_SECONDS)
        agents = {"did:web:ada.example.org": COLORS[0], "did:web:bob.example.org": COLORS[1]}
        self.seats = [Seat(did, self.host, color=color) for did, color in agents.items()]
        self.moves: list[Move] = []
        self.disturbed: list[str] = []
        self.threads: list[threading.Thread] = []
        for seat in self.seats:
            seat.join(ENVIRONMENT, "catan")
            self.exec(seat, 'cd /data/skills/catan && mv policy.py shipped.py && printf %s "$1" >policy.py', WAITING_POLICY)

    def exec(self, seat: Seat, script: str, *words: str) -> str:
        body = {"argv": ["sh", "-c", script, "sh", *words]}
        result = self.host.call("POST", f"/leases/{seat.lease['id']}/exec", body)
        assert result["exit_code"] == 0, result
        return str(result["stdout"])

    def on_move(self, move: Move) -> None:
        self.moves.append(move)
        disturbances = {4: self.put_to_sleep, 7: self.kill_container, 11: self.kill_control_plane, 14: self.put_to_sleep}
        if disturb := disturbances.get(len(self.moves)):
            disturb()
            self.disturbed.append(disturb.__name__)

    def put_to_sleep(self) -> None:
        self.fleet.update(
            "UPDATE sandboxes_sandbox SET idle_at = '2020-01-01 00:00:00+00:00' WHERE state IN ('warm', 'waiting')"
        )
        wait_until(
            lambda: self.fleet.sweep() or self.fleet.select(STATES) == [("cold",)],
            "all sandboxes are cold",
            within=60.0,
        )

    def kill_container(self) -> None:
        """Kill the container of the agent that plays next, in its turn."""
        self.hold_and(lambda container: subprocess.run(["docker", "kill", container], check=True, stdout=subprocess.DEVNULL))

    def kill_control_plane(self) -> None:
        """Kill all processes of the control plane in a turn, and let the turn go on before the next start."""

        def kill(container: str) -> None:
            self.fleet.kill()
            subprocess.run(["docker", "exec", container, "rm", "/workspace/hold"], check=True)
            self.fleet.up()

        self.hold_and(kill)

    def hold_and(self, act: Any) -> None:
        for seat in self.seats:
            self.exec(seat, "rm -f waits; touch hold")

        def wait_and_act() -> None:
            container = wait_until(self.find_waiting_container, "an agent waits in its turn", within=60.0)
            for seat in self.seats:
                if self.find_container(seat) != container:
                    subprocess.run(["docker", "exec", self.find_container(seat), "rm", "/workspace/hold"], check=True)
            act(container)

        thread = threading.Thread(target=wait_and_act)
        thread.start()
        self.threads.append(thread)

    def read_costs(self, by: str) -> dict[str, dict[str, str]]:
        """Return the billed quantities of each lease or environment."""
        return {total["key"]: total["quantities"] for total in self.host.call("GET", f"/costs?by={by}")["results"]}

    def count_billed_calls(self) -> int:
        return sum(int(quantities.get("llm", 0)) for quantities in self.read_costs("lease").values())

    def find_container(self, seat: Seat) -> str:
        query = f"SELECT id, incarnation FROM sandboxes_sandbox WHERE agent_did = '{seat.did}' AND {HELD}"
        [(pk, incarnation)] = self.fleet.select(query)
        return f"leasehold-{str(pk).replace('-', '')}-{incarnation}"

    def find_waiting_container(self) -> str:
        waits = ["test", "-e", "/workspace/waits"]
        containers = map(self.find_container, self.seats)
        return next((name for name in containers if not subprocess.run(["docker", "exec", name, *waits]).returncode), "")


def test_game_is_played_to_its_end_through_sleeps_and_kills(fleet: Fleet) -> None:  # noqa: F811
    fleet.up()
    game = Game(fleet)
    winner = catan.play(game.seats, ENVIRONMENT, points=4, seed=7, on_move=game.on_move)
    for thread in game.threads:
        thread.join()
    assert winner in game.seats
    assert game.disturbed == ["put_to_sleep", "kill_container", "kill_control_plane", "put_to_sleep"]
    for seat in game.seats:
        assert seat.skipped == 0
        assert game.exec(seat, "cat /data/played").split() == [str(number) for number in range(1, seat.turns + 1)]
    assert sum(len(seat.lost_leases) for seat in game.seats) == 1

    ended = game.host.call("POST", f"/environments/{ENVIRONMENT}/conditions", {"condition": "game.finished"})
    assert len(ended["ended"]) == 2
    gone = "SELECT count(*) FROM leases_lease WHERE status <> 'destroyed'"
    wait_until(lambda: fleet.sweep() or fleet.select(gone) == [(0,)], "every lease is destroyed", within=60.0)
    assert fleet.list_containers() == {}
    wait_until(lambda: fleet.sweep() or game.count_billed_calls() == len(game.moves), "each turn is billed once", within=60.0)
    check_bill(game)


def check_bill(game: Game) -> None:
    """Check that the leases add up to the environment, and that none is billed for longer than its sandboxes were alive."""
    by_lease = game.read_costs("lease")
    [(environment, total)] = game.read_costs("environment").items()
    assert environment == ENVIRONMENT
    for item in ("time", "llm"):
        assert sum(Decimal(quantities[item]) for quantities in by_lease.values()) == Decimal(total[item])
    for lease, quantities in by_lease.items():
        assert 0 < float(quantities["time"]) * 3600 <= game.host.call("GET", f"/leases/{lease}")["seconds_alive"]
