"""A game of Catan between agents in Docker sandboxes, through sleeps and kills to its end."""

from decimal import Decimal

import pytest

from controlplane.games import catan
from controlplane.games.catan import COLORS, Seat
from controlplane.games.client import Client, post_condition
from tests.commands.manage import run_manage
from tests.e2e.disturbances import PATIENCE_SECONDS, Disturbances
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
ENVIRONMENT = "catan-kills"
PLAN = {4: "put_to_sleep", 7: "kill_container", 11: "kill_control_plane", 14: "put_to_sleep"}


def read_costs(host: Client, by: str) -> dict[str, dict[str, str]]:
    """Return the billed quantities of each lease or environment."""
    return {total["key"]: total["quantities"] for total in host.call("GET", f"/costs?by={by}")["results"]}


def test_game_is_played_to_its_end_through_sleeps_and_kills(fleet: Fleet) -> None:  # noqa: F811
    fleet.up()
    host = Client(f"http://127.0.0.1:{fleet.port}", fleet.key, PATIENCE_SECONDS)
    agents = {"did:web:ada.example.org": COLORS[0], "did:web:bob.example.org": COLORS[1]}
    seats = [Seat(did, host, color=color) for did, color in agents.items()]
    for seat in seats:
        seat.join(ENVIRONMENT, "catan")
    disturbances = Disturbances(fleet, seats, host, plan=PLAN)
    winner = catan.play(seats, ENVIRONMENT, points=4, seed=7, on_move=lambda move: disturbances.note_move())
    disturbances.finish()
    assert winner in seats
    for seat in seats:
        assert seat.skipped == 0
        assert disturbances.read_played_turns(seat) == list(range(1, seat.turns + 1))
    assert sum(len(seat.lost_leases) for seat in seats) == 1

    assert len(post_condition(host, ENVIRONMENT, catan.CONDITION)) == 2
    gone = "SELECT count(*) FROM leases_lease WHERE status <> 'destroyed'"
    wait_until(lambda: fleet.select(gone) == [(0,)], "every lease is destroyed", within=90.0, every=0.5)
    assert fleet.list_containers() == {}

    def count_billed_calls() -> int:
        return sum(int(quantities.get("llm", 0)) for quantities in read_costs(host, "lease").values())

    assert run_manage(fleet.path, "meter", **fleet.env).returncode == 0
    wait_until(lambda: count_billed_calls() == disturbances.moves, "each turn is billed once", within=90.0, every=2.0)
    check_bill(host)


def check_bill(host: Client) -> None:
    """Check that the leases add up to the environment, and that none is billed for longer than its sandboxes were alive."""
    by_lease = read_costs(host, "lease")
    [(environment, total)] = read_costs(host, "environment").items()
    assert environment == ENVIRONMENT
    for item in ("time", "llm"):
        assert sum(Decimal(quantities[item]) for quantities in by_lease.values()) == Decimal(total[item])
    for lease, quantities in by_lease.items():
        assert 0 < float(quantities["time"]) * 3600 <= host.call("GET", f"/leases/{lease}")["seconds_alive"]
