"""Game host of the demo: a game of Catan whose players are agents in leased sandboxes.

The host uses the control plane only through the HTTP API, as any environment does. The rules come from `catanatron` (an
optional extra, GPL-3.0). An agent's action is checked against the legal actions before it is played."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import requests
from catanatron import Color, Game, RandomPlayer
from catanatron.json import GameEncoder
from catanatron.models.enums import RESOURCES, Action, ActionType
from catanatron.state_functions import (
    get_actual_victory_points,
    get_longest_road_length,
    get_player_buildings,
    get_visible_victory_points,
    player_num_dev_cards,
    player_num_resource_cards,
)

COLORS = (Color.RED, Color.BLUE, Color.ORANGE, Color.WHITE)
MAX_MOVES = 4000  # forced moves included; a longer game is a draw


class ApiError(Exception):
    """The control plane responded with a problem document."""


@dataclass
class Client:
    """HTTP client for agents and the game host, with one API key."""

    base: str
    key: str

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = 300) -> dict[str, Any]:
        response = requests.request(
            method, f"{self.base}/api/v1{path}", json=body, timeout=timeout, headers={"Authorization": f"Bearer {self.key}"}
        )
        if response.status_code >= 400:
            raise ApiError(f"{method} {path}: {response.status_code} {response.json().get('detail', '')}")
        return dict(response.json())


@dataclass
class Seat:
    """A player: an agent, its color and its lease."""

    did: str
    color: Color
    client: Client
    lease: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    skipped: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Move:
    """A decision of an agent and its result."""

    seat: Seat
    number: int
    action: str
    seconds: float
    points: str


def play(seats: list[Seat], environment: str, *, points: int, seed: int | None, on_move: Callable[[Move], None]) -> Seat | None:
    """Play one game and return the winner, None for a draw. Every seat must have joined before."""
    by_color = {seat.color: seat for seat in seats}
    game = Game([RandomPlayer(seat.color) for seat in seats], seed=seed, vps_to_win=points)
    for _ in range(MAX_MOVES):
        if game.winning_color() is not None:
            return by_color[game.winning_color()]
        legal: list[Action] = list(game.state.playable_actions)
        seat = by_color[game.state.current_color()]
        game.execute(legal[0] if len(legal) == 1 else _choose_action(game, seat, legal, environment, on_move))
    return None


def _choose_action(game: Game, seat: Seat, legal: list[Action], environment: str, on_move: Callable[[Move], None]) -> Action:
    """Request a turn from the agent. For an illegal action END_TURN or else the first legal action is played."""
    offered = [_encode_action(action) for action in legal]
    number = seat.turns + 1
    state = _build_visible_state(game, seat, environment) | {"turn_number": number, "legal_actions": offered}
    turn = seat.client.call("POST", f"/leases/{seat.lease['id']}/turns", {"turn_number": number, "state": state})
    seat.turns, seat.seconds = number, seat.seconds + turn["duration_seconds"]
    chosen_action = {"type": turn["action"].get("type"), "value": turn["action"].get("value")}
    if turn["skipped"] or chosen_action not in offered:
        seat.skipped += 1
        chosen = next((action for action in legal if action.action_type == ActionType.END_TURN), legal[0])
    else:
        chosen = legal[offered.index(chosen_action)]
    outcome = chosen.action_type.value if not turn["skipped"] else f"skipped: {turn['action'].get('reason', '')[:60]}"
    on_move(Move(seat, number, outcome, turn["duration_seconds"], _format_score(game)))
    return chosen


def _encode_action(action: Action) -> dict[str, Any]:
    """Encode an action for agents, such as {"type": "BUILD_ROAD", "value": [3, 4]}."""
    return {"type": action.action_type.value, "value": json.loads(json.dumps(action.value, cls=GameEncoder))}


def _build_visible_state(game: Game, seat: Seat, environment: str) -> dict[str, Any]:
    """Build the state visible to this player: its own hand and the public state of the others."""
    state = game.state
    return {
        "environment_type": "catan",
        "game_id": environment,
        "you": seat.color.value,
        "prompt": state.current_prompt.value,
        "hand": {kind: player_num_resource_cards(state, seat.color, kind) for kind in RESOURCES},
        "players": {
            color.value: {
                "points": (get_actual_victory_points if color == seat.color else get_visible_victory_points)(state, color),
                "cards": player_num_resource_cards(state, color),
                "development_cards": player_num_dev_cards(state, color),
                "longest_road": get_longest_road_length(state, color),
                "buildings": {kind: list(get_player_buildings(state, color, kind)) for kind in ("SETTLEMENT", "CITY")},
            }
            for color in state.colors
        },
    }


def _format_score(game: Game) -> str:
    return " ".join(f"{color.value}:{get_actual_victory_points(game.state, color)}" for color in game.state.colors)


def build_result_rows(seats: list[Seat]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the final table, the heading first."""
    yield ("agent", "lease", "status", "provider", "turns", "skipped", "seconds alive")
    for seat in seats:
        lease = seat.client.call("GET", f"/leases/{seat.lease['id']}")
        yield (
            seat.did,
            seat.lease["id"],
            f"{lease['status']} ({lease['end_reason']})" if lease["end_reason"] else lease["status"],
            seat.lease["sandbox"]["provider"],
            str(seat.turns),
            str(seat.skipped),
            f"{lease['seconds_alive']:.1f}",
        )
