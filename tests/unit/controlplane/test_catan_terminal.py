"""Live view of Catan in a terminal, from the states that agents get."""

import io

import pytest
from rich.console import Console

from controlplane.games.catan_terminal import CITY, ROBBER, SETTLEMENT, STYLES, GameView, draw_board
from leases.packs.folder import SHIPPED_DIRECTORY, read_folder

EXAMPLES = read_folder(SHIPPED_DIRECTORY / "catan").examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_board_shows_every_tile_piece_and_road(name: str) -> None:
    state = EXAMPLES[name]
    board = draw_board(state)
    buildings = [player["buildings"] for player in state["players"].values()]
    assert board.plain.count(SETTLEMENT) == sum(len(each["SETTLEMENT"]) for each in buildings)
    assert board.plain.count(CITY) == sum(len(each["CITY"]) for each in buildings)
    assert board.plain.count(ROBBER) == 1
    for resource, count in {"wood": 4, "brick": 3, "sheep": 4, "wheat": 4, "ore": 3, "desert": 1}.items():
        assert board.plain.count(resource) == count
    assert max(map(len, board.plain.splitlines())) < 79
    roads = {board.plain[span.start] for span in board.spans if span.style in STYLES.values()} - {SETTLEMENT, CITY}
    assert bool(roads) == any(player["roads"] for player in state["players"].values())


def test_view_has_players_and_the_last_lines() -> None:
    output = io.StringIO()
    with GameView(Console(file=output, force_terminal=True, width=100), "game-1", {"RED": "did:web:ada.example.org"}) as view:
        for number in range(12):
            view.show(EXAMPLES["robber.json"], f"line {number};")
    last = output.getvalue().split("game-1")[-1]
    assert "did:web:ada.example.org" in last and "line 11;" in last and "line 4;" in last and "line 3;" not in last
