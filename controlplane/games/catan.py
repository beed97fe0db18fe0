"""Game host of Catan: a game whose players are agents in leased sandboxes.

The rules come from `catanatron` (an optional extra, GPL-3.0). An agent's action is checked against the legal actions before it
is played."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from catanatron import Color, Game, RandomPlayer
from catanatron.json import GameEncoder
from catanatron.models.board import get_edges
from catanatron.models.enums import DEVELOPMENT_CARDS, RESOURCES, Action, ActionType
from catanatron.models.map import CatanMap
from catanatron.state import State
from catanatron.state_functions import (
    get_actual_victory_points,
    get_longest_road_length,
    get_player_buildings,
    get_visible_victory_points,
    player_has_rolled,
    player_key,
    player_num_dev_cards,
    player_num_resource_cards,
)
from rich.console import Console

from controlplane.games import DemoOptions
from controlplane.games.catan_terminal import MIN_TERMINAL_LINES, GameView
from controlplane.games.catan_trading import TRADE_TYPES, OfferBook, Trade, negotiate
from controlplane.games.client import Client, Player

CONDITION = "game.finished"
COLORS = (Color.RED, Color.BLUE, Color.ORANGE, Color.WHITE)
MAX_MOVES = 4000  # forced moves included; a longer game is a draw


@dataclass
class Seat(Player):
    """A player with a color."""

    color: Color = COLORS[0]

    @property
    def label(self) -> str:
        return str(self.color.value)


@dataclass(frozen=True)
class Move:
    """A decision of an agent and its result."""

    seat: Seat
    number: int
    action: str
    seconds: float
    points: str
    state: Mapping[str, Any]  # that the agent got


def create_player(number: int, did: str, client: Client) -> Seat:
    return Seat(did, client, color=COLORS[number])


def run_demo(
    players: list[Seat], environment: str, host: Client, options: DemoOptions, print_line: Callable[[str], None]
) -> str:
    """Play one game, print each decision, on a terminal with the board, and return the outcome."""

    def format_move(move: Move) -> str:
        number = sum(seat.turns for seat in players)
        return f"turn {number:>3}  {move.seat.label:<6} {move.action:<24} {move.seconds:5.2f} s   {move.points}"

    def run(on_move: Callable[[Move], None]) -> Seat | None:
        return play(players, environment, points=options.points, seed=options.seed, on_move=on_move)

    console = Console()
    if console.is_terminal and console.height >= MIN_TERMINAL_LINES:
        with GameView(console, environment, {seat.color.value: seat.did for seat in players}) as view:
            winner = run(lambda move: view.show(move.state, format_move(move)))
    else:
        winner = run(lambda move: print_line(format_move(move)))
    return f"{winner.did} wins." if winner else "Draw."


def play(seats: list[Seat], environment: str, *, points: int, seed: int | None, on_move: Callable[[Move], None]) -> Seat | None:
    """Play one game and return the winner, None for a draw. Every seat must have joined before."""
    by_color = {seat.color: seat for seat in seats}
    game = Game([RandomPlayer(seat.color) for seat in seats], seed=seed, vps_to_win=points)
    table = _Table(game, by_color, environment, on_move)
    for _ in range(MAX_MOVES):
        if game.winning_color() is not None:
            return by_color[game.winning_color()]
        table.play_move()
    return None


class _Table:
    """A game with its seats."""

    def __init__(self, game: Game, seats: dict[Color, Seat], environment: str, on_move: Callable[[Move], None]) -> None:
        self.game, self.seats, self.environment, self.on_move = game, seats, environment, on_move
        self.offers = OfferBook()

    def play_move(self) -> None:
        """Execute one action of the current player, or one trade. A single legal action needs no decision."""
        legal: list[Action] = list(self.game.state.playable_actions)
        color = self.game.state.current_color()
        offers = self.offers.list_offers(self.game, color)
        if len(legal) == 1 and not offers:
            self._execute(legal[0])
            return
        encoded = [encode_action(action) for action in legal]
        fallback = next((action for action in encoded if action["type"] == ActionType.END_TURN.value), encoded[0])
        chosen = self._request(color, encoded + offers, fallback, None)
        if chosen["type"] in TRADE_TYPES:
            self.offers.made.append(chosen["value"])
            negotiate(self.game, color, chosen, lambda who, actions, trade: self._request(who, actions, actions[0], trade))
        else:
            self._execute(legal[encoded.index(chosen)])

    def _execute(self, action: Action) -> None:
        self.game.execute(action)
        if action.action_type == ActionType.END_TURN:
            self.offers = OfferBook()

    def _request(
        self, color: Color, legal: list[dict[str, Any]], fallback: dict[str, Any], trade: Trade | None
    ) -> dict[str, Any]:
        """Request a turn from the agent. In place of an action that is not legal, the fallback is played."""
        seat = self.seats[color]
        number = seat.turns + 1
        state = build_turn_state(self.game, color, self.environment, number, legal, trade=trade, offers=self.offers)
        turn = seat.take_turn(state)
        chosen = {"type": turn["action"].get("type"), "value": turn["action"].get("value")}
        if turn["skipped"] or chosen not in legal:
            seat.skipped += 1
            chosen = fallback
        outcome = chosen["type"] if not turn["skipped"] else f"skipped: {turn['action'].get('reason', '')[:60]}"
        self.on_move(Move(seat, number, outcome, turn["duration_seconds"], _format_score(self.game), state))
        return chosen


def encode_action(action: Action) -> dict[str, Any]:
    """Encode an action for agents, such as {"type": "BUILD_ROAD", "value": [3, 4]}."""
    return {"type": action.action_type.value, "value": json.loads(json.dumps(action.value, cls=GameEncoder))}


def build_turn_state(
    game: Game,
    color: Color,
    environment: str,
    number: int,
    legal: list[dict[str, Any]],
    *,
    trade: Trade | None = None,
    offers: OfferBook | None = None,
) -> dict[str, Any]:
    """Build the state of one turn: the state visible to this color, and its legal actions, encoded."""
    prompt = None if trade is None else "CONFIRM_TRADE" if trade.player == color else "DECIDE_TRADE"
    return _build_visible_state(game, color, environment) | {
        **({"prompt": prompt} if prompt else {}),
        "turn_number": number,
        "trade": trade and trade.encode(),
        "offers_left": offers.left if offers else 0,
        "legal_actions": legal,
    }


def _build_visible_state(game: Game, color: Color, environment: str) -> dict[str, Any]:
    """Build the state visible to this player: its own hand and the public state of the others."""
    state = game.state
    return {
        "environment_type": "catan",
        "game_id": environment,
        "you": color.value,
        "prompt": state.current_prompt.value,
        "phase": _name_phase(state),
        "dice": next((list(done.value) for done in reversed(state.actions) if done.action_type == ActionType.ROLL), None),
        "board": _encode_board(state.board.map),
        "robber": state.board.map.land_tiles[state.board.robber_coordinate].id,
        "hand": {kind: player_num_resource_cards(state, color, kind) for kind in RESOURCES},
        "own_development_cards": {
            kind: state.player_state[f"{player_key(state, color)}_{kind}_IN_HAND"] for kind in DEVELOPMENT_CARDS
        },
        "trade_rates": _list_trade_rates(state.board.get_player_port_resources(color)),
        "players": {
            other.value: {
                "points": (get_actual_victory_points if other == color else get_visible_victory_points)(state, other),
                "cards": player_num_resource_cards(state, other),
                "development_cards": player_num_dev_cards(state, other),
                "longest_road": get_longest_road_length(state, other),
                "buildings": {kind: list(get_player_buildings(state, other, kind)) for kind in ("SETTLEMENT", "CITY")},
                "roads": sorted([a, b] for (a, b), owner in state.board.roads.items() if owner == other and a < b),
            }
            for other in state.colors
        },
    }


def _name_phase(state: State) -> str:
    """Return SETUP, ROAD_BUILDING (free roads of a card), BEFORE_ROLL or AFTER_ROLL."""
    if state.is_initial_build_phase:
        return "SETUP"
    if state.is_road_building:
        return "ROAD_BUILDING"
    return "AFTER_ROLL" if player_has_rolled(state, state.colors[state.current_turn_index]) else "BEFORE_ROLL"


def _encode_board(board: CatanMap) -> dict[str, Any]:
    """Encode the constant part of the board. A node's port is a resource (2:1), "ANY" (3:1) or null."""
    ports = {node: kind or "ANY" for kind, nodes in board.port_nodes.items() for node in nodes}
    return {
        "tiles": [
            {"id": tile.id, "coordinate": list(coordinate), "resource": tile.resource, "number": tile.number}
            for coordinate, tile in board.land_tiles.items()
        ],
        "nodes": [
            {"id": node, "tiles": [tile.id for tile in board.adjacent_tiles[node]], "port": ports.get(node)}
            for node in sorted(board.land_nodes)
        ],
        "edges": sorted(sorted(edge) for edge in get_edges(board.land_nodes)),
    }


def _list_trade_rates(ports: set[str | None]) -> dict[str, int]:
    """Return the number of cards that the bank takes for one card, by resource given."""
    return {kind: 2 if kind in ports else 3 if None in ports else 4 for kind in RESOURCES}


def _format_score(game: Game) -> str:
    return " ".join(f"{color.value}:{get_actual_victory_points(game.state, color)}" for color in game.state.colors)
