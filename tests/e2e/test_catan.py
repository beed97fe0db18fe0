"""A game of Catan between agents in Docker sandboxes, through sleeps and kills to its end."""

import pytest

from controlplane.games import catan
from controlplane.games.catan import COLORS, Seat
from controlplane.games.client import Client, post_condition
from tests.e2e.bill import check_bill
from tests.e2e.disturbances import PATIENCE_SECONDS, Disturbances
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
ENVIRONMENT = "catan-kills"
PLAN = {4: "put_to_sleep", 7: "kill_container", 11: "kill_control_plane", 14: "put_to_sleep"}


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
    skipped = sum(seat.skipped for seat in seats)
    assert skipped == 1  # the turn in which the container was killed
    for seat in seats:
        played = disturbances.read_played_turns(seat)
        assert played == sorted({*played}) and {*played} <= {*range(1, seat.turns + 1)}
        assert len(played) == seat.turns - seat.skipped
        assert seat.lost_leases == []

    assert len(post_condition(host, ENVIRONMENT, catan.CONDITION)) == 2
    gone = "SELECT count(*) FROM leases_lease WHERE status <> 'destroyed'"
    wait_until(lambda: fleet.select(gone) == [(0,)], "every lease is destroyed", within=90.0, every=0.5)
    assert fleet.list_containers() == {}
    check_bill(fleet, host, ENVIRONMENT, calls=disturbances.moves - skipped)
