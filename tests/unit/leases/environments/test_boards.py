"""Boards: drawn from the states of the shipped packs, with escaped text, and never from a malformed state."""

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from leases.environments import boards
from leases.environments.boards import catan, catan_geometry
from leases.environments.boards.base import UnreadableState

EXAMPLES = Path(boards.__file__).parents[2] / "packs" / "shipped" / "catan" / "examples"
SVG = "{http://www.w3.org/2000/svg}"
MARKUP = '"><script>alert(1)</script>'


def load_state(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((EXAMPLES / f"{name}.json").read_text())
    return content.get("state", content)


@pytest.mark.parametrize("name", ["setup", "robber", "after-roll"])
def test_every_example_is_drawn_with_all_its_parts(name: str) -> None:
    state = load_state(name)
    svg = ElementTree.fromstring(catan.draw(state, {}).svg)
    titles = [title.text or "" for title in svg.iter(f"{SVG}title")]
    assert sum(title.startswith("tile ") for title in titles) == len(state["board"]["tiles"]) == 19
    assert "robber" in titles
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert (texts.count("2:1"), texts.count("3:1")) == (5, 4)
    for kind in ("SETTLEMENT", "CITY"):
        expected = sum(len(player["buildings"][kind]) for player in state["players"].values())
        assert sum(title.startswith(f"{kind.lower()} at") for title in titles) == expected


def test_nodes_are_placed_one_side_apart_along_every_edge() -> None:
    state = load_state("after-roll")
    places = catan_geometry.place_nodes(state)
    assert len(set(places.values())) == len(state["board"]["nodes"]) == 54
    for first, second in state["board"]["edges"]:
        (x1, y1), (x2, y2) = places[first], places[second]
        assert abs(((x1 - x2) ** 2 + (y1 - y2) ** 2) ** 0.5 - catan.SIZE) < 0.01


def test_text_of_a_state_is_escaped() -> None:
    state = load_state("after-roll")
    state["board"]["tiles"][0]["resource"] = MARKUP
    state["players"][MARKUP] = state["players"].pop(next(iter(state["players"])))
    board = catan.draw(state, {"type": "BUILD_CITY", "value": MARKUP})
    assert "<script" not in board.svg
    assert {player.colour for player in board.players} <= {*catan.COLOURS.values(), catan.UNKNOWN_COLOUR}


@pytest.mark.parametrize(
    "change",
    [
        {"board": None}, {"board": {}}, {"board": {"tiles": [], "nodes": [], "edges": []}}, {"players": []},
        {"players": {"RED": {"roads": [[0, 999]]}}}, {"board": {"tiles": [{"id": 0, "coordinate": "abc"}]}},
    ],
)  # fmt: skip
def test_malformed_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnreadableState):
        catan.draw(load_state("after-roll") | change, {})


def test_board_whose_edges_do_not_fit_is_refused() -> None:
    state = copy.deepcopy(load_state("after-roll"))
    state["board"]["edges"] = []
    with pytest.raises(UnreadableState):
        catan.draw(state, {})


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ({"type": "BUILD_ROAD", "value": [3, 4]}, "builds a road from 3 to 4"),
        ({"type": "MARITIME_TRADE", "value": ["SHEEP", "SHEEP", "SHEEP", None, "ORE"]}, "trades 3 sheep for ore"),
        ({"type": "MOVE_ROBBER", "value": [[1, -2, 1], "BLUE", None]}, "moves the robber and robs Blue"),
        ({"type": "MOVE_ROBBER", "value": [[1, -2, 1], None, None]}, "moves the robber"),
        ({"type": "BUILD_CITY", "value": MARKUP}, f"build city · value: {MARKUP}"),
        ({"type": "SOMETHING_NEW", "value": None}, "something new"),
    ],
)
def test_action_is_described_in_words(action: dict[str, Any], text: str) -> None:
    assert boards.describe_action("catan", action) == text


def test_other_types_have_the_fields_of_the_action_and_an_outline_of_the_state() -> None:
    assert boards.describe_action("rpg", {"action": "attack", "target": "goblin"}) == "attack · target: goblin"
    assert boards.outline({"room": "cave", "exits": ["n", "s"], "foes": [{"name": "goblin", "hp": 3}], "loot": []}) == (
        "room: cave\nexits: n, s\nfoes:\n  - name: goblin, hp: 3\nloot:"
    )


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"type": "OFFER_TRADE", "value": [["WOOD"], ["ORE"]]}, "offers wood for ore"),
        ({"type": "COUNTER_OFFER", "value": [["WOOD", "WOOD"], ["ORE"]]}, "asks for wood and wood for ore"),
        ({"type": "CONFIRM_TRADE", "value": ["BLUE", ["WOOD"], ["ORE"]]}, "trades wood for ore with Blue"),
        ({"type": "OFFER_TRADE", "value": None}, "offers a trade"),
    ],
)
def test_trades_between_players_are_described(action: dict[str, Any], words: str) -> None:
    assert catan.describe_action(action) == words
