"""Trades between players of Catan: answers, counter-offers, confirmation, and the decisions of the heuristic."""

import json
from collections import Counter
from typing import Any

import pytest
from catanatron import Color, Game, RandomPlayer
from catanatron.models.enums import RESOURCES, ActionPrompt
from catanatron.state_functions import player_freqdeck_add, player_num_resource_cards

from controlplane.games import catan
from controlplane.games.catan import COLORS, Seat, build_turn_state
from controlplane.games.catan_trading import Encoded, OfferBook, Trade, negotiate
from leases.packs.shipped.catan.skill import policy

RED, BLUE, ORANGE = COLORS[:3]
OFFER = {"type": "OFFER_TRADE", "value": [["WOOD"], ["ORE"]]}
ACCEPT, REJECT = {"type": "ACCEPT_TRADE", "value": None}, {"type": "REJECT_TRADE", "value": None}
CANCEL = {"type": "CANCEL_TRADE", "value": None}
DEARER = {"type": "COUNTER_OFFER", "value": [["WOOD", "WOOD"], ["ORE"]]}


def hand(game: Game, color: Color) -> dict[str, int]:
    counts = {kind: player_num_resource_cards(game.state, color, kind) for kind in RESOURCES}
    return {kind: count for kind, count in counts.items() if count}


@pytest.fixture
def game() -> Game:
    """Game of three after its setup phase. Red has wood, the others ore."""
    game = Game([RandomPlayer(color) for color in (RED, BLUE, ORANGE)], seed=1)
    while game.state.is_initial_build_phase:
        game.play_tick()
    for color, cards in {RED: [2, 0, 0, 0, 0], BLUE: [0, 0, 0, 0, 1], ORANGE: [0, 1, 0, 0, 1]}.items():
        held = [player_num_resource_cards(game.state, color, kind) for kind in RESOURCES]
        player_freqdeck_add(game.state, color, [new - old for new, old in zip(cards, held, strict=True)])
    return game


@pytest.mark.parametrize(
    ("answers", "confirmed", "partner", "hands"),
    [
        ({BLUE: REJECT, ORANGE: REJECT}, None, None, ({"WOOD": 2}, {"ORE": 1}, {"BRICK": 1, "ORE": 1})),
        ({BLUE: ACCEPT, ORANGE: REJECT}, BLUE, BLUE, ({"WOOD": 1, "ORE": 1}, {"WOOD": 1}, {"BRICK": 1, "ORE": 1})),
        ({BLUE: ACCEPT, ORANGE: DEARER}, ORANGE, ORANGE, ({"ORE": 1}, {"ORE": 1}, {"BRICK": 1, "WOOD": 2})),
        ({BLUE: ACCEPT, ORANGE: ACCEPT}, None, None, ({"WOOD": 2}, {"ORE": 1}, {"BRICK": 1, "ORE": 1})),
    ],
)
def test_cards_move_only_in_the_confirmed_trade(
    game: Game, answers: dict[Color, Encoded], confirmed: Color | None, partner: Color | None, hands: tuple[dict[str, int], ...]
) -> None:
    def ask(color: Color, legal: list[Encoded], trade: Trade) -> Encoded:
        if color in answers:
            assert answers[color] in legal
            return answers[color]
        return next((action for action in legal[1:] if confirmed and action["value"][0] == confirmed.value), CANCEL)

    assert negotiate(game, RED, OFFER, ask) == partner
    assert tuple(hand(game, color) for color in (RED, BLUE, ORANGE)) == hands


def test_counter_offer_that_the_player_cannot_pay_is_not_confirmed(game: Game) -> None:
    player_freqdeck_add(game.state, RED, [-1, 0, 0, 0, 0])
    asked: set[Color] = set()

    def ask(color: Color, legal: list[Encoded], trade: Trade) -> Encoded:
        asked.add(color)
        return DEARER

    assert negotiate(game, RED, OFFER, ask) is None
    assert asked == {BLUE, ORANGE}


def test_players_without_the_wanted_cards_are_not_asked(game: Game) -> None:
    wanted = {"type": "OFFER_TRADE", "value": [["WOOD"], ["BRICK"]]}
    asked: list[Color] = []
    negotiate(game, RED, wanted, lambda color, legal, trade: asked.append(color) or REJECT)  # type: ignore[func-returns-value]
    assert asked == [ORANGE]


def test_offers_are_limited_and_not_repeated_in_a_turn(game: Game) -> None:
    color = game.state.current_color()
    book = OfferBook()
    assert book.list_offers(game, color) == []  # before the roll
    while game.state.current_prompt != ActionPrompt.PLAY_TURN or not book.list_offers(game, game.state.current_color()):
        game.play_tick()
    first, second, *_ = offers = book.list_offers(game, game.state.current_color())
    book.made.append(first["value"])
    assert first not in book.list_offers(game, game.state.current_color()) and len(offers) > 2
    book.made.append(second["value"])
    assert (book.left, book.list_offers(game, game.state.current_color())) == (0, [])


def decide(game: Game, color: Color, trade: Trade, legal: list[Encoded]) -> Encoded | None:
    return policy.choose_action(json.loads(json.dumps(build_turn_state(game, color, "game", 1, legal, trade=trade))))


def test_heuristic_accepts_what_brings_its_goal_closer_but_not_from_a_leader(game: Game) -> None:
    # Blue needs ore and wheat for a city: it takes ore for wood, and gives none away.
    legal = [REJECT, ACCEPT]
    assert decide(game, BLUE, Trade(RED, ["ORE"], ["WOOD"]), legal) == ACCEPT
    assert decide(game, BLUE, Trade(RED, ["WOOD"], ["ORE"]), legal) == REJECT
    game.state.player_state[f"P{game.state.color_to_index[RED]}_VICTORY_POINTS"] = 7
    assert decide(game, BLUE, Trade(RED, ["ORE"], ["WOOD"]), legal) == REJECT


def test_heuristic_confirms_what_it_has_offered_unless_a_leader_answers(game: Game) -> None:
    # Red has offered wood for the sheep of a development card, its second goal.
    player_freqdeck_add(game.state, RED, [0, 0, 0, 1, 1])
    trade = Trade(RED, ["WOOD"], ["SHEEP"], {BLUE: ACCEPT})
    confirm = {"type": "CONFIRM_TRADE", "value": ["BLUE", ["WOOD"], ["SHEEP"]]}
    offer = {"type": "OFFER_TRADE", "value": [["WOOD"], ["SHEEP"]]}
    assert decide(game, RED, trade, [{"type": "END_TURN", "value": None}, offer]) == offer
    assert decide(game, RED, trade, [CANCEL, confirm]) == confirm
    game.state.player_state[f"P{game.state.color_to_index[BLUE]}_VICTORY_POINTS"] = 7
    assert decide(game, RED, trade, [CANCEL, confirm]) == CANCEL


class PolicyAgent:
    """Plays the heuristic."""

    def call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        state = json.loads(json.dumps(body["state"]))
        return {"action": policy.choose_action(state), "skipped": False, "duration_seconds": 0.0}


def test_heuristics_trade_with_each_other_in_a_whole_game() -> None:
    moves: Counter[str] = Counter()
    seats = [Seat(f"did:plc:{color.value}", PolicyAgent(), {"id": "x"}, color=color) for color in COLORS[:4]]  # type: ignore[arg-type]
    winner = catan.play(seats, "game", points=8, seed=1, on_move=lambda move: moves.update([move.action]))
    assert winner is not None and [seat.skipped for seat in seats] == [0] * 4
    assert moves["CONFIRM_TRADE"] > 0, moves
