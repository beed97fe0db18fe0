"""Benchmark of the Catan heuristic against the random players of catanatron, with the states that agents get."""

import json
from dataclasses import dataclass

from catanatron import Color, Game, RandomPlayer
from catanatron.models.enums import Action
from catanatron.models.player import Player
from catanatron.players.weighted_random import WeightedRandomPlayer

from controlplane.games.catan import MAX_MOVES, build_turn_state, encode_action
from leases.packs.shipped.catan.skill import policy

OPPONENTS: dict[str, type[Player]] = {"random": RandomPlayer, "weighted": WeightedRandomPlayer}
HEURISTIC_COLORS = (Color.RED, Color.BLUE)


@dataclass(frozen=True)
class BenchmarkResult:
    """Games won by the heuristic, and games without a winner."""

    wins: int
    draws: int


def run_games(games: int, opponent: str, *, points: int, seed: int) -> BenchmarkResult:
    """Play games on consecutive seeds. Two games share a seed, with the seats exchanged. Equal arguments give equal results."""
    outcomes = [
        _play_game(HEURISTIC_COLORS[number % 2], OPPONENTS[opponent], points=points, seed=seed + number // 2)
        for number in range(games)
    ]
    return BenchmarkResult(wins=outcomes.count(True), draws=outcomes.count(None))


def _play_game(color: Color, opponent: type[Player], *, points: int, seed: int) -> bool | None:
    """Return whether the heuristic wins, None after MAX_MOVES without a winner."""
    players = [opponent(seat) for seat in HEURISTIC_COLORS]
    by_color = {player.color: player for player in players}
    game = Game(players, seed=seed, vps_to_win=points)
    for number in range(MAX_MOVES):
        winner = game.winning_color()
        if winner is not None:
            return bool(winner == color)
        # catanatron builds some lists from sets of strings, whose order changes with each process.
        legal = sorted(game.state.playable_actions, key=lambda action: json.dumps(encode_action(action)))
        current = game.state.current_color()
        if len(legal) == 1:
            game.execute(legal[0])
        elif current == color:
            game.execute(_choose_action(game, legal, number))
        else:
            game.execute(by_color[current].decide(game, legal))
    return None


def _choose_action(game: Game, legal: list[Action], number: int) -> Action:
    offered = [encode_action(action) for action in legal]
    state = json.loads(json.dumps(build_turn_state(game, game.state.current_color(), "benchmark", number, offered)))
    return legal[state["legal_actions"].index(policy.choose_action(state))]
