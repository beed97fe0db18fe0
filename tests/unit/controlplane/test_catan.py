"""Contract between the prompt of the Catan skill and the game host: the taught answer is the accepted answer."""

import json
import random
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from controlplane.games import catan
from controlplane.games.catan import COLORS, Move, Seat
from leases.packs.folder import SHIPPED_DIRECTORY, read_folder
from leases.packs.shipped.catan.skill import policy
from sandboxes.image import take_turn

PACK = read_folder(SHIPPED_DIRECTORY / "catan")
PROMPT = PACK.skill["prompt.md"].decode()
NAME_PATTERN = re.compile(r"`([a-z_]+)`")


class LiteralAgent:
    """Stand-in for a model that does what the prompt says: it answers in the form of the prompt's example."""

    def __init__(self) -> None:
        self.form = list(take_turn.extract_first_object(PROMPT))
        self.random, self.states = random.Random(7), list[dict[str, Any]]()

    def call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        state = body["state"]
        self.states.append(state)
        chosen = self.random.choice(state["legal_actions"])
        action = {name: chosen.get(name, "a reason") for name in self.form}
        return {"action": json.loads(json.dumps(action)), "skipped": False, "duration_seconds": 0.0}


GameFixture = tuple[LiteralAgent, list[Seat], list[Move]]


@pytest.fixture(scope="module")
def game() -> GameFixture:
    """A game between three literal agents, to its end."""
    agent, moves = LiteralAgent(), list[Move]()
    seats = [Seat(f"did:plc:{color.value}", agent, {"id": "x"}, color=color) for color in COLORS[:3]]  # type: ignore[arg-type]
    catan.play(seats, "game", points=4, seed=3, on_move=moves.append)
    return agent, seats, moves


def test_every_answer_in_the_taught_form_is_played(game: GameFixture) -> None:
    agent, seats, moves = game
    assert sum(seat.turns for seat in seats) == len(moves) == len(agent.states) > 20
    assert [seat.skipped for seat in seats] == [0, 0, 0]
    assert {move.action for move in moves} >= {"OFFER_TRADE", "ACCEPT_TRADE", "COUNTER_OFFER", "CONFIRM_TRADE"}


def test_every_state_and_answer_matches_the_schemas_of_the_pack(game: GameFixture) -> None:
    check_state, check_action = (Draft202012Validator(PACK.schemas[key]).validate for key in ("state", "action"))
    for state in game[0].states[:: max(1, len(game[0].states) // 50)]:
        check_state(state)
        for action in state["legal_actions"]:
            check_action(action)


def test_every_field_that_the_prompt_names_is_in_the_state(game: GameFixture) -> None:
    agent = game[0]
    state = next(state for state in agent.states if state["trade"])
    board = state["board"]
    parts = (
        state["trade"],
        state["legal_actions"][0],
        next(iter(state["players"].values())),
        board,
        board["tiles"][0],
        board["nodes"][0],
    )
    known = {*state, "reason"}.union(*parts)
    assert set(NAME_PATTERN.findall(PROMPT)) - known == set()
    assert known - set(NAME_PATTERN.findall(PROMPT)) == {"environment_type", "game_id", "turn_number"}


def test_state_describes_the_board_compactly(game: GameFixture) -> None:
    states = game[0].states
    assert {state["phase"] for state in states} >= {"SETUP", "AFTER_ROLL"}
    for state in states:
        board = state["board"]
        assert (len(board["tiles"]), len(board["nodes"]), len(board["edges"])) == (19, 54, 72)
        assert state["robber"] in {tile["id"] for tile in board["tiles"]}
        assert (state["dice"] is None) == (state["phase"] == "SETUP") or state["phase"] == "BEFORE_ROLL"
        assert set(state["trade_rates"]) == set(state["hand"])
        assert json.loads(json.dumps(state)) == state
        assert len(json.dumps({**state, "legal_actions": []})) < 8000
    assert sum(node["port"] is not None for node in states[0]["board"]["nodes"]) == 18


def test_action_that_is_not_offered_is_counted_as_skipped() -> None:
    class IllegalAgent(LiteralAgent):
        def call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return {**super().call(method, path, body), "action": {"action": "build_city", "position": 12}}

    agent = IllegalAgent()
    seats = [Seat(f"did:plc:{color.value}", agent, {"id": "x"}, color=color) for color in COLORS[:2]]  # type: ignore[arg-type]
    catan.play(seats, "game", points=2, seed=3, on_move=lambda move: None)
    assert all(seat.skipped == seat.turns > 0 for seat in seats)


@pytest.mark.parametrize(
    ("name", "arguments", "keys"),
    [
        ("evaluate_node", {"node": 0}, {"pips", "tiles", "port", "port_value", "is_free", "is_reachable"}),
        ("evaluate_builds", {}, {"missing", "bank_rates"}),
        ("evaluate_trade", {"gives": [], "gets": ["ORE"]}, {"missing", "hand"}),
        ("evaluate_robber", {"tile": 3}, {"RED", "BLUE", "ORANGE"}),
    ],
)
def test_tools_answer_for_every_state(name: str, arguments: dict[str, Any], keys: set[str], game: GameFixture) -> None:
    tool = policy.TOOLS[name]
    assert set(tool["schema"]["parameters"]["properties"]) == set(arguments)
    for state in game[0].states[::25]:
        result = tool["call"](state, **arguments)
        assert set(result) == keys and json.loads(json.dumps(result)) == result


def test_tools_evaluate_a_trade_and_suggest_legal_actions(game: GameFixture) -> None:
    state = next(state for state in game[0].states if state["hand"]["WOOD"] and not state["hand"]["ORE"])
    before, after = (policy.TOOLS["evaluate_trade"]["call"](state, gives, ["ORE"]) for gives in ([], ["WOOD"]))
    assert (after["hand"]["WOOD"], after["hand"]["ORE"]) == (state["hand"]["WOOD"] - 1, 1)
    assert after["missing"]["CITY"]["ORE"] == before["missing"]["CITY"]["ORE"] == 2
    with pytest.raises(ValueError, match="not in your hand"):
        policy.TOOLS["evaluate_trade"]["call"](state, ["ORE"], [])
    suggested = policy.TOOLS["suggest_actions"]["call"](state)
    assert suggested[0] == policy.choose_action(state) and all(action in state["legal_actions"] for action in suggested)
